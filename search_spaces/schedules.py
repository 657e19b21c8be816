"""The order in which each rank of a pipeline goes through its passes, as the engines run it.

GPipe: Huang et al. 2019. 1F1B and interleaved 1F1B: Narayanan et al. 2021, section 2.2. Zero bubble, interleaved and
V-shaped: Qi et al. 2023, sections 2 and 6. Where torch's schedules differ from the papers, torch's order is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from search_spaces.layout import Layout


class Pass(StrEnum):
    """A way of a microbatch through a stage. `INPUT` and `WEIGHT` are the two parts of a split `BACKWARD`: the
    gradients of what came in, which the stage before waits for, and those of the weights."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input"
    WEIGHT = "weight"


class Action(NamedTuple):
    """One pass of one microbatch through one stage; all counted from 0, stages in the model's order."""

    stage: int
    step: Pass
    microbatch: int


class PassTime(NamedTuple):
    """Seconds that a pass through a stage takes one of its ranks: that of a step's first microbatch, which may gather
    weights and finds no gradient to add to, and those of the later ones on average."""

    stage: int
    step: Pass
    first_s: float
    later_s: float

    def of(self, microbatch: int) -> float:
        """Of one microbatch of a step."""
        return self.later_s if microbatch else self.first_s

    @classmethod
    def of_rows(cls, rows: Iterable[Sequence[Any]]) -> tuple[PassTime, ...]:
        """Those that were written as JSON."""
        return tuple(cls(stage, Pass(step), *times) for stage, step, *times in rows)


Order = tuple[Action, ...]

_Passes = list[tuple[int, Pass]]
"""Passes through stages, of which the n-th of a kind through a stage is that of microbatch n."""


def orders(layout: Layout) -> tuple[Order, ...]:
    """What each pipeline rank does in one optimizer step, by rank; nothing is told of a layout without a pipeline."""
    return tuple(order(layout, rank) for rank in range(layout.pipeline_parallel_size))


def order(layout: Layout, pipeline_rank: int) -> Order:
    """What one pipeline rank does in one optimizer step; nothing is told of a layout without a pipeline."""
    if layout.pipeline_parallel_size == 1:
        return ()
    return _numbered(_passes(layout, pipeline_rank), layout.gradient_accumulation_steps)


def _passes(layout: Layout, rank: int) -> _Passes:
    ranks, microbatches, stages = (
        layout.pipeline_parallel_size,
        layout.gradient_accumulation_steps,
        layout.stages_of(rank),
    )
    match layout.pipeline_schedule:
        case "gpipe":
            return _alternating(stages * microbatches, stages * microbatches, microbatches)
        case "1f1b":
            return _alternating(stages * microbatches, stages * microbatches, ranks - 1 - rank)
        case "interleaved_1f1b" | "interleaved_zero_bubble":
            together = microbatches // max(1, microbatches // ranks)
            ahead = ranks - 1 - rank
            warm = (len(stages) - 1) * together + (ahead if layout.splits_backward else 2 * ahead)
            forwards = _in_turns(stages, together, microbatches)
            backwards = _in_turns(stages[::-1], together, microbatches)
            if layout.splits_backward:
                return _alternating(forwards, backwards, warm, late=rank)
            return _alternating(forwards, backwards, warm)
        case _:
            return _v_shaped(ranks, rank, max(microbatches, 2 * ranks - 1))


def _in_turns(stages: Sequence[int], together: int, microbatches: int) -> list[int]:
    """Stages that `together` microbatches after one another go through, then the next so many."""
    return [stage for stage in stages for _ in range(together)] * (microbatches // together)


def _alternating(forwards: Sequence[int], backwards: Sequence[int], warm: int, late: int | None = None) -> _Passes:
    """One forward pass, one backward pass, after `warm` forward passes; the numbers are stages.

    With `late` the backward pass is split, and the gradients of weights follow so many backward passes later.
    """
    passes = [(stage, Pass.FORWARD) for stage in forwards[:warm]]
    for index, stage in enumerate(backwards):
        passes += [(stage, Pass.FORWARD) for stage in forwards[warm + index : warm + index + 1]]
        passes.append((stage, Pass.BACKWARD if late is None else Pass.INPUT))
        if late is not None and index >= late:
            passes.append((backwards[index - late], Pass.WEIGHT))
    return passes + [(stage, Pass.WEIGHT) for stage in (backwards[len(backwards) - late :] if late else ())]


def _v_shaped(ranks: int, rank: int, microbatches: int) -> _Passes:
    """The V schedule (Qi et al. 2023, section 6) of `2 * ranks - 1` microbatches at least; fewer leave gaps in it."""
    down, up = rank, 2 * ranks - 1 - rank
    f, i, w = ((down, step) for step in (Pass.FORWARD, Pass.INPUT, Pass.WEIGHT))
    fu, iu, wu = ((up, step) for step in (Pass.FORWARD, Pass.INPUT, Pass.WEIGHT))
    passes = [f] * (2 * (ranks - rank) - 1) + [fu, f] * rank + [fu, iu, wu] * (ranks - rank)
    passes += [f, i, w, fu, iu, wu] * (microbatches - 2 * ranks + 1 + rank) + [i, w, fu, iu, wu] * (ranks - 1 - rank)
    return passes + [i, iu] * rank + [i, w] * (ranks - rank) + [wu] * rank + [w] * rank


def _numbered(passes: Iterable[tuple[int, Pass]], microbatches: int) -> Order:
    seen: Counter[tuple[int, Pass]] = Counter()
    actions = []
    for stage, step in passes:
        actions.append(Action(stage, step, seen[stage, step]))
        seen[stage, step] += 1
    return tuple(action for action in actions if action.microbatch < microbatches)
