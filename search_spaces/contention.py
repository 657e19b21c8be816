"""What messages between the stages of a pipeline cost the matrix products beside them.

NCCL's kernels keep some of the GPU's processors for as long as a message is under way, or awaited, so that the others
have more tiles of a product each. A channel has a processor: over NVLink, messages have two for each link; where stages
are on several nodes, all messages between them have one or two (`ncclTopoComputeP2pChannels` in NCCL's
`src/graph/paths.cc`), which is taken to cost nothing. That was not measured: within a node, links of 4
channels take 0.8% off a step, not all that is counted here (`benchmarks/results/links_2xh100.txt`).
"""

from __future__ import annotations

from search_spaces.blocks import Places
from search_spaces.layout import Layout
from search_spaces.roofline import spread
from search_spaces.workload import Workload

LEAST, MOST, LAST_TILES = 0.03, 0.45, 3.7e6
"""Of `contention`: for products of endless size, for those of experts and the smallest ones, and what a smaller one
adds, times its elements. Fitted to passes of 38 pipelines in gangs and alone, on two H100 and H200
(`benchmarks.judge.contention`). Of square products of 4096 it makes 0.25, where `benchmarks.measure.contention` finds
0.31 to 0.35: within a step, not all that is beside a message is products."""


def contention(layout: Layout, work: Workload) -> float:
    """By what share of the time in which a message is under way, or awaited, matrix products beside it take longer.

    A small product, of few tiles for all, feels it more: its last tiles wait until others are done. So do grouped
    products of experts.
    """
    stages = layout.pipeline_parallel_size
    if spread(stages, layout.num_gpus // stages, Places.of(layout, work)).nodes > 1:
        return 0.0
    if work.shape.num_experts:
        return MOST
    elements = layout.microbatch_tokens(work.sequence_length) * work.shape.hidden / layout.tensor_parallel_size
    return min(MOST, LEAST + LAST_TILES / elements)
