"""What a rank does in a whole step, from what it was measured to do in a step of fewer microbatches.

Once it is full, a pipeline does the same over and over until it drains. So a step of few microbatches has each kind of
pass that a step of many has, and how long the whole one takes then follows by playing its schedule
(`search_spaces.composition`), rather than by a line through steps of several sizes. Without a pipeline, all
microbatches but the first and the last are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from search_spaces.composition import RankTimes
from search_spaces.layout import Layout
from search_spaces.schedules import Action, Order, Pass, order


@dataclass(frozen=True)
class Overlap:
    """What the orders of one rank in a step of `few` and in one of `many` microbatches have in common.

    `few[:end]` are how both begin, and `few[begin:]` how both end, microbatches counted from the last. So between the
    two are passes of a full pipeline, of which the first and the last of each kind are not counted as such: they may
    do what happens once a step.
    """

    few: Order
    many: Order

    @cached_property
    def end(self) -> int:
        return _alike(self.few, self.many, 0)

    @cached_property
    def begin(self) -> int:
        # Not the first of them: what comes before it may still fill the pipeline.
        return len(self.few) - _alike(self.few[::-1], self.many[::-1], self.longer) + 1

    @cached_property
    def longer(self) -> int:
        """Microbatches by which the one is longer."""
        return _microbatches(self.many) - _microbatches(self.few)

    @cached_property
    def steady(self) -> dict[tuple[int, Pass], list[Action]]:
        """Of `few`, the passes of a full pipeline by their kind; kinds without any are left out."""
        last, found = _microbatches(self.few) - 1, defaultdict(list)
        for action in self.few[self.begin : self.end]:
            if 0 < action.microbatch < last:
                found[action.stage, action.step].append(action)
        return dict(found)

    def passes(self, seconds: Mapping[Action, float]) -> dict[Action, float]:
        """Seconds of each pass of `many`, from those of `few`: the first and the last ones as measured, those of a full
        pipeline by the mean of their kind. Raises KeyError if a kind has none."""
        begin, from_end, longer = self.begin, len(self.few) - self.end, self.longer
        last = _microbatches(self.many) - 1
        means = {kind: fmean(seconds[action] for action in actions) for kind, actions in self.steady.items()}
        passes = {}
        for index, action in enumerate(self.many):
            if index < begin or action.microbatch == 0:
                passes[action] = seconds[action]
            elif index >= len(self.many) - from_end or action.microbatch == last:
                passes[action] = seconds[action._replace(microbatch=action.microbatch - longer)]
            else:
                passes[action] = means[action.stage, action.step]
        return passes


def overlap(few: Layout, many: Layout, pipeline_rank: int) -> Overlap:
    """Of a pipeline rank of two layouts that differ in nothing but the global batch."""
    return Overlap(order(few, pipeline_rank), order(many, pipeline_rank))


def stretch(times: RankTimes, few: Layout, many: Layout, pipeline_rank: int) -> RankTimes:
    """What a rank does in a step of `many` microbatches, from what it was measured to do in one of `few`.

    The two layouts differ in nothing but the global batch. What happens once a step is as measured; exposed
    communication keeps its share of the step. Memory is that of the step of few. Of a pipeline's rank, pauses are left
    out, and power is that of what it does between them. Raises KeyError if there are too few microbatches.
    """
    if many.pipeline_parallel_size == 1:
        return _with_more(times, many.gradient_accumulation_steps - few.gradient_accumulation_steps)
    found = overlap(few, many, pipeline_rank)
    passes = found.passes(times.passes)
    longer = 1 + (sum(passes.values()) - sum(times.passes.values())) / times.busy_s
    watt_seconds = times.busy_power_w * (times.busy_s + times.waited_s) - times.waiting_power_w * times.waited_s
    return replace(
        times,
        passes=passes,
        busy_power_w=watt_seconds / times.busy_s,
        waited_s=0.0,
        exposed_s={kind: longer * seconds for kind, seconds in times.exposed_s.items()},
        reduces={
            action._replace(microbatch=action.microbatch + found.longer): seconds
            for action, seconds in times.reduces.items()
        },
    )


def _with_more(times: RankTimes, microbatches: int) -> RankTimes:
    """A step without a pipeline, with so many microbatches more."""
    if not times.microbatch_s:
        raise KeyError("no microbatch is neither the first nor the last")
    more_s = microbatches * times.microbatch_s
    longer = 1 + more_s / times.busy_s
    return replace(
        times,
        tail_s=times.tail_s + more_s,
        busy_power_w=(times.busy_power_w * times.busy_s + times.microbatch_power_w * more_s) / (times.busy_s + more_s),
        exposed_s={kind: longer * seconds for kind, seconds in times.exposed_s.items()},
    )


def _alike(one: Order, other: Order, apart: int) -> int:
    """How many actions two orders have in common from their begin on, where microbatches of `other` have numbers that
    are by `apart` higher."""
    for count, (action, same) in enumerate(zip(one, other, strict=False)):
        if action != same._replace(microbatch=same.microbatch - apart):
            return count
    return min(len(one), len(other))


def _microbatches(passes: Order) -> int:
    return 1 + max(action.microbatch for action in passes)
