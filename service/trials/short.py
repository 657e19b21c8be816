"""Short trials: which numbers of microbatches stand for the whole global batch.

Of a whole gang (`batches`), time and energy of a step are linear in its microbatches from the first full pipeline on:
in 1F1B and its interleaved and zero-bubble forms a step takes (m + p - 1) times as long as one of m microbatches does
on each of p ranks (Narayanan et al. 2021, section 2.2), and everything else once.

Of ranks that run alone, each microbatch is timed, and with a pipeline each pass (`batch_alone`), and the whole step put
together from these (`search_spaces.stretching`). Where a step of fewer microbatches is timed as well, it tells what
these draw.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from search_spaces.layout import Layout
from search_spaces.stretching import overlap

FILL = 2
"""The smaller number, in full pipelines: with one, interleaved schedules hold less in flight than with more, and ZeRO-1
without a pipeline is another layout at one microbatch."""

SPREAD = 3
"""The larger number by the smaller one. A noise of 1% in both steps' times becomes one of 1.6% in a step of many more
microbatches; with twice as many it would be 2.2%, with four times 1.4% at more steps' cost."""

SPREAD_ALONE = 2
"""Likewise of ranks that run alone: of four microbatches, two are neither the first nor the last, as all others are."""

ALONE_S = 1.5
"""Enough of a rank alone, whose steps vary less than a gang's, if these are alike: energy takes no more to be read."""

SAVED = 3
"""The least by which the whole batch must exceed both together for short trials to be worth their error."""

SAVED_ALONE = 1
"""Likewise of ranks that run alone, whose microbatches vary less."""

STEADY = 4
"""The least of each kind of passes of a full pipeline by whose mean a rank alone stands for all others like them."""


def sizes(layout: Layout, alone: bool) -> tuple[int, ...]:
    """The global batch sizes to time in place of the layout's own, larger first, by a gang or by ranks that run alone;
    none where that saves too little."""
    if alone and layout.pipeline_parallel_size > 1:
        size = batch_alone(layout)
        return () if size is None else (size,)
    return (batches(layout, SPREAD_ALONE, SAVED_ALONE) if alone else batches(layout)) or ()


def batches(layout: Layout, spread: int = SPREAD, saved: int = SAVED) -> tuple[int, int] | None:
    """The two global batch sizes to time in place of the layout's own, the larger first, which is `spread` times the
    smaller; None where the layout's own is not `saved` times both together.

    GPipe keeps all microbatches of a step in memory, of which a smaller step would say too little.
    """
    if layout.pipeline_parallel_size > 1 and layout.pipeline_schedule == "gpipe":
        return None
    few = FILL * layout.pipeline_parallel_size
    many = spread * few
    if saved * (few + many) > layout.gradient_accumulation_steps:
        return None
    microbatch = layout.global_batch_size // layout.gradient_accumulation_steps
    return many * microbatch, few * microbatch


@lru_cache(maxsize=1024)
def batch_alone(layout: Layout) -> int | None:
    """The global batch size to time in place of the layout's own, where ranks of a pipeline run alone: the smallest
    that shows each of them every kind of pass. None where that saves nothing, and without a pipeline.

    Nor is GPipe cut short, which keeps all microbatches of a step in memory.
    """
    if layout.pipeline_parallel_size == 1 or layout.pipeline_schedule == "gpipe":
        return None
    microbatch = layout.global_batch_size // layout.gradient_accumulation_steps
    for count in range(layout.pipeline_parallel_size, layout.gradient_accumulation_steps):
        few = replace(layout, global_batch_size=count * microbatch)
        if all(_shows_all(few, layout, rank) for rank in range(layout.pipeline_parallel_size)):
            return few.global_batch_size
    return None


def _shows_all(few: Layout, many: Layout, pipeline_rank: int) -> bool:
    """Whether a rank goes through enough passes of each kind, with the pipeline full, in the shorter of two steps."""
    found = overlap(few, many, pipeline_rank)
    kinds = {(action.stage, action.step) for action in found.many}
    return all(len(found.steady.get(kind, ())) >= STEADY for kind in kinds)
