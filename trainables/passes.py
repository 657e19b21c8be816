"""Times of a step's passes on one rank, by marks among what its device is given to do."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice, pairwise
from typing import NamedTuple

from search_spaces.schedules import Action, Pass, PassTime
from trainables.platforms.base import Mark


class Moment(StrEnum):
    """What is told of a step beside the passes of its pipeline: by an engine, but for the first."""

    DEALT = "dealt"
    """Without a pipeline: a microbatch is there."""

    DONE = "done"
    """The latest pass is computed, perhaps but for its loss, after which this is told again. Messages come then."""
    PASSED = "passed"
    """Passes have ended, perhaps the last ones."""
    AGREED = "agreed"
    """All ranks of the pipeline have come to the norm of the gradient."""


Observer = Callable[[Action | Moment], None]
"""Told by an engine of every pass as it begins, and of moments."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one step on one rank.

    `head_s` is from the step's begin to its first pass, `passes_s` each pass, from its begin to that of the next one,
    or until the gradients of its stage are reduced, `reduces_s` that, by the pass that it follows, but for the last,
    and `tail_s` from the end of the last pass to the step's; `update_s` of it comes after ranks agreed on the norm of
    the gradient, 0 where the engine does not tell. Without a pipeline the whole step is in the tail, and `microbatch_s`
    what a microbatch takes of it that is neither the first nor the last, 0 where there is none. `waited_s` are the
    pauses besides.
    """

    head_s: float
    passes_s: dict[Action, float]
    tail_s: float
    update_s: float
    waited_s: float
    reduces_s: dict[Action, float] = field(default_factory=dict)
    microbatch_s: float = 0.0


class _Event(NamedTuple):
    """What was told, and when, in ns; the end of what was before it, and its own begin, which is later if there was a
    pause."""

    what: Action | Moment
    told_ns: int
    ended: Mark
    begun: Mark


@dataclass
class _Step:
    start_ns: int
    start: Mark
    events: list[_Event]
    end: Mark


class PassClock:
    """Times each step between `begin` and `end`, and, as an engine's observer, its passes, without waiting for any.

    The device pauses for so many seconds before whatever has some in `pauses`.
    """

    def __init__(
        self, mark: Callable[[], Mark], pause: Callable[[float], None] | None = None, kept: int | None = None
    ) -> None:
        """`mark` puts a mark among what the device is given to do, `pause` so many seconds of waiting. So many of the
        latest steps are `kept`, all by default."""
        self.mark, self.pause = mark, pause
        self.pauses: Mapping[Action | Moment, float] = {}
        self.steps: deque[_Step] = deque(maxlen=kept)

    def begin(self) -> None:
        start = self.mark()
        self.steps.append(_Step(time.monotonic_ns(), start, [], start))

    def observe(self, what: Action | Moment) -> None:
        told_ns = time.monotonic_ns()
        ended = begun = self.mark()
        if self.pause is not None and (seconds := self.pauses.get(what, 0.0)) > 0:
            self.pause(seconds)
            begun = self.mark()
        self.steps[-1].events.append(_Event(what, told_ns, ended, begun))

    def end(self) -> None:
        self.steps[-1].end = self.mark()

    def mean(self, steps: int) -> PassTimes:
        """The mean of the latest `steps` steps, all of the same passes. The device must have done them."""
        times = [_times(step) for step in self._latest(steps)]
        return PassTimes(
            head_s=statistics.fmean(step.head_s for step in times),
            passes_s={
                action: statistics.fmean(step.passes_s[action] for step in times) for action in times[0].passes_s
            },
            tail_s=statistics.fmean(step.tail_s for step in times),
            update_s=statistics.fmean(step.update_s for step in times),
            waited_s=statistics.fmean(step.waited_s for step in times),
            reduces_s={
                action: statistics.fmean(step.reduces_s[action] for step in times) for action in times[0].reduces_s
            },
            microbatch_s=statistics.fmean(step.microbatch_s for step in times),
        )

    def ahead_s(self) -> float:
        """The least that the host was ahead of the device, when it began to give it a pass of the latest step, or a
        microbatch, but for the first. The device must have done them, and nothing else when the step began."""
        step = self.steps[-1]
        begins = [event for event in step.events if isinstance(event.what, Action) or event.what is Moment.DEALT]
        return min(
            (_seconds(step.start, event.ended) - (event.told_ns - step.start_ns) / 1e9 for event in begins[1:]),
            default=0.0,
        )

    def computing(self, steps: int) -> tuple[PassTime, ...]:
        """The passes of the latest `steps` steps, or of as many as are kept, on average: from each one's begin until it
        has computed, without what it waits for. None without a pipeline. The device must have done them."""
        firsts: dict[tuple[int, Pass], list[float]] = defaultdict(list)
        laters: dict[tuple[int, Pass], list[float]] = defaultdict(list)
        for step in self._latest(steps):
            for (stage, kind, microbatch), seconds in _computing(step).items():
                (laters if microbatch else firsts)[stage, kind].append(seconds)
        return tuple(
            PassTime(*kind, statistics.fmean(first_s), statistics.fmean(laters[kind] or first_s))
            for kind, first_s in sorted(firsts.items())
        )

    def _latest(self, steps: int) -> list[_Step]:
        return list(islice(self.steps, max(0, len(self.steps) - steps), None))


def _computing(step: _Step) -> dict[Action, float]:
    seconds: dict[Action, float] = {}
    latest: _Event | None = None
    for event in step.events:
        if isinstance(event.what, Action):
            latest = event
        elif event.what is Moment.DONE and latest is not None:
            assert isinstance(latest.what, Action)
            seconds[latest.what] = _seconds(latest.begun, event.ended)
    return seconds


def _times(step: _Step) -> PassTimes:
    events = [event for event in step.events if event.what is not Moment.DONE]
    passes = [event for event in events if isinstance(event.what, Action)]
    waited_s = sum(_seconds(event.ended, event.begun) for event in events if event.begun is not event.ended)
    if not passes:
        dealt = [event.begun for event in events if event.what is Moment.DEALT]
        between = dealt[1:]  # the begins of the second and of all after it, of which the last ends with the step
        microbatch_s = _seconds(between[0], between[-1]) / (len(between) - 1) if len(between) > 1 else 0.0
        return PassTimes(0.0, {}, _seconds(step.start, step.end) - waited_s, 0.0, waited_s, microbatch_s=microbatch_s)
    last = events.index(passes[-1])
    over = events[last + 1]
    within = list(pairwise(events[: last + 2]))
    agreed = next((event for event in events if event.what == Moment.AGREED), None)
    update_s = 0.0 if agreed is None else _seconds(agreed.begun, step.end)
    reduced_s = 0.0 if agreed is None else _seconds(over.begun, agreed.ended)
    return PassTimes(
        head_s=_seconds(step.start, passes[0].ended),
        passes_s={
            before.what: _seconds(before.begun, after.ended)
            for before, after in within
            if isinstance(before.what, Action)
        },
        tail_s=_seconds(over.begun, step.end) if agreed is None else reduced_s + update_s,
        update_s=update_s,
        waited_s=waited_s,
        reduces_s={
            before.what: _seconds(between.begun, after.ended)
            for (before, between), (_, after) in pairwise(within)
            if between.what is Moment.PASSED and isinstance(before.what, Action)
        },
    )


def _seconds(start: Mark, end: Mark) -> float:
    return start.elapsed_time(end) / 1e3
