"""Short trials: which numbers of microbatches stand for the whole global batch.

Time and energy of a step are linear in its microbatches from the first full pipeline on: in 1F1B and its interleaved
and zero-bubble forms a step takes (m + p - 1) times as long as one of m microbatches does on each of p ranks
(Narayanan et al. 2021, section 2.2), and everything else once.
"""

from __future__ import annotations

from search_spaces.layout import Layout

FILL = 2
"""The smaller number, in full pipelines: with one, interleaved schedules hold less in flight than with more, and ZeRO-1
without a pipeline is another layout at one microbatch."""

SPREAD = 3
"""The larger number by the smaller one. A noise of 1% in both steps' times becomes one of 1.6% in a step of many more
microbatches; with twice as many it would be 2.2%, with four times 1.4% at more steps' cost."""

SAVED = 3
"""The least by which the whole batch must exceed both together for short trials to be worth their error."""


def batches(layout: Layout) -> tuple[int, int] | None:
    """The two global batch sizes to time in place of the layout's own, larger first; None where that saves too little.

    GPipe keeps all microbatches of a step in memory, of which a smaller step would say too little.
    """
    if layout.pipeline_parallel_size > 1 and layout.pipeline_schedule == "gpipe":
        return None
    few = FILL * layout.pipeline_parallel_size
    many = SPREAD * few
    if SAVED * (few + many) > layout.gradient_accumulation_steps:
        return None
    microbatch = layout.global_batch_size // layout.gradient_accumulation_steps
    return many * microbatch, few * microbatch
