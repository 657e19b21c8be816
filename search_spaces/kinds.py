"""Which ranks of a layout are alike, so that one of them is measured for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from search_spaces.layout import Layout
from search_spaces.memory import estimate
from search_spaces.replay import fullest_rank, unlike
from search_spaces.workload import Workload


@dataclass(frozen=True)
class RankKind:
    """Ranks that do the same in a step, and the one of them to measure.

    `rank` is the one to run as, of the `num_gpus` of the layout, and `pipeline_rank` its place in the pipeline.
    `stands_for` are the pipeline ranks of this kind, `pipeline_rank` among them, in ascending order: they hold as many
    layers in each of their stages, and the same ends of the model. They differ in what they keep of how many passes,
    and `pipeline_rank` is the one that needs most by the memory model: its memory is its own, and a bound for theirs.
    """

    rank: int
    pipeline_rank: int
    stands_for: tuple[int, ...]


def kinds(layout: Layout, work: Workload) -> tuple[RankKind, ...]:
    """The kinds of ranks of a legal layout of the model of `work`, in the order of the pipeline.

    Data, context and tensor-parallel ranks do the same, whichever experts they hold: the first of each is measured, or
    the one that needs most memory where it is known which. Without a pipeline all ranks are alike, of whatever model.
    """
    if layout.pipeline_parallel_size == 1:
        return (RankKind(fullest_rank(layout, work), 0, (0,)),)
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for rank in range(layout.pipeline_parallel_size):
        alike[_content(layout, work, rank)].append(rank)
    found = []
    for ranks in alike.values():
        fullest = ranks[0]
        if len(ranks) > 1:
            memory = estimate(layout, work, ranks).ranks
            fullest = max(ranks, key=lambda rank: memory[rank].needed)
        found.append(RankKind(first_rank(layout, fullest), fullest, tuple(ranks)))
    return tuple(found)


def others_in_memory(layout: Layout, work: Workload) -> tuple[RankKind, ...]:
    """Ranks that do the same as the one that `kinds` has measured for all, and may yet need more memory."""
    if layout.pipeline_parallel_size > 1:
        return ()
    measured = fullest_rank(layout, work)
    return tuple(RankKind(rank, 0, (0,)) for rank in unlike(layout, work) if rank != measured)


def _content(layout: Layout, work: Workload, pipeline_rank: int) -> Hashable:
    """What a pipeline rank holds: layers by stage, and whether of the embedding and the head."""
    layers, stages = layout.layers_by_stage(work.shape.layers), layout.stages_of(pipeline_rank)
    ends = 0 in stages, layout.pipeline_stages - 1 in stages
    return tuple(len(layers[stage]) for stage in stages), ends


def first_rank(layout: Layout, pipeline_rank: int) -> int:
    """The global rank that is the first of its pipeline rank by all other coordinates."""
    return pipeline_rank * (layout.num_gpus // layout.pipeline_parallel_size)
