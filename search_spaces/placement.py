"""Which GPU best takes which rank where GPUs differ in speed, and how many layers each stage then takes.

Ranks of one stage end together, so that slow GPUs cost least where they share a stage, and that one has least to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from search_spaces.layout import Layout
from search_spaces.workload import Workload

PLACED = ("rank_order", "stage_layers")
"""The axes that say where a layout's work goes."""

ALIKE = 0.005
"""GPUs whose times differ by a smaller share count as alike: no more is known of a GPU in seconds."""


def placements(layout: Layout, work: Workload, slower: Mapping[int, float], axes: Sequence[str]) -> list[Layout]:
    """The layout with other ranks' GPUs, other stages' layers, or both, that may be faster; none without a pipeline.

    `slower`: by worker, how many times as long as the fastest it takes; one that is left out, as long as that. `axes`
    of `rank_order` and `stage_layers` may differ from `layout`, which must have neither. Those that are not legal, or
    need more memory than there is, are among them.
    """
    if layout.pipeline_parallel_size == 1:
        return []
    times = [max(1.0, slower.get(worker, 1.0)) for worker in range(layout.num_gpus)]
    if max(times) < (1 + ALIKE) * min(times):
        return []
    ordered = replace(layout, rank_order=order_by_speed(layout, work, times)) if "rank_order" in axes else layout
    found = [ordered]
    if "stage_layers" in axes:
        for one in (layout, ordered):
            found.append(replace(one, stage_layers=layers_by_speed(work.shape.layers, stage_times(one, times))))
    return [one for one in dict.fromkeys(_plain(one, work) for one in found) if one != layout]


def plain(layout: Layout) -> Layout:
    """The layout of which another is a placement."""
    return replace(layout, rank_order=None, stage_layers=None)


def stage_times(layout: Layout, times: Sequence[float]) -> list[float]:
    """By stage, how many times as long the slowest GPU of those that hold it takes; `times` are by worker."""
    order = layout.rank_order or range(layout.num_gpus)
    block = layout.num_gpus // layout.pipeline_parallel_size
    by_rank = [times[worker] for worker in order]
    of_pipeline = [max(by_rank[first : first + block]) for first in range(0, layout.num_gpus, block)]
    slowest = [1.0] * layout.pipeline_stages
    for pipeline_rank, seconds in enumerate(of_pipeline):
        for stage in layout.stages_of(pipeline_rank):
            slowest[stage] = seconds
    return slowest


def layers_by_speed(layers: int, times: Sequence[float]) -> tuple[int, ...]:
    """Of each stage, so that the one which takes longest takes as short as can be; equal ones if these are as good.

    `times`: by stage, how many times as long it takes for a layer. Each layer goes to the stage that is through with
    one more of them first, of several that are to that with fewer, which no other division beats.
    """
    stages = len(times)
    counts = [1] * stages
    for _ in range(layers - stages):
        stage = min(range(stages), key=lambda each: (round((counts[each] + 1) * times[each], 9), counts[each]))
        counts[stage] += 1

    def longest(divided: Sequence[int]) -> float:
        return max(count * seconds for count, seconds in zip(divided, times, strict=True))

    even = [layers // stages] * stages
    good_enough = layers % stages == 0 and longest(even) <= (1 + ALIKE) * longest(counts)
    return tuple(even if good_enough else counts)


def order_by_speed(layout: Layout, work: Workload, times: Sequence[float]) -> tuple[int, ...]:
    """By rank, the worker that takes it: slower ones the stages with less to do, of those with as much the first.

    Nodes are kept whole: each has the ranks that another had, or its own, in an order of their own.
    """
    loads = [_load(layout, work, rank) for rank in range(layout.num_gpus)]
    size = min(work.gpus_per_node, layout.num_gpus)
    slots = [range(first, min(first + size, layout.num_gpus)) for first in range(0, layout.num_gpus, size)]
    whole = [slot for slot in slots if len(slot) == size]
    slowest_first = sorted(whole, key=lambda node: sorted(-times[worker] for worker in node))
    least_first = sorted(whole, key=lambda slot: sum(loads[rank] for rank in slot))
    nodes = dict(zip(least_first, slowest_first, strict=True))
    order = [0] * layout.num_gpus
    for slot in slots:
        workers = sorted(nodes.get(slot, slot), key=lambda worker: (-times[worker], worker))
        for rank, worker in zip(sorted(slot, key=lambda rank: (loads[rank], rank)), workers, strict=True):
            order[rank] = worker
    return tuple(order)


def _load(layout: Layout, work: Workload, rank: int) -> float:
    """What a rank has to do, in parameters that take part in matrix products."""
    stage = layout.coordinates(rank)["pp"]
    head = work.shape.vocab * work.shape.hidden if stage == layout.end_ranks[1] else 0
    return float(layout.layers_of(stage, work.shape.layers) * work.shape.block_parameters + head)


def _plain(layout: Layout, work: Workload) -> Layout:
    """Without what is the same as leaving it out."""
    if layout.rank_order == tuple(range(layout.num_gpus)):
        layout = replace(layout, rank_order=None)
    if layout.stage_layers is not None and len(set(layout.stage_layers)) == 1:
        layout = replace(layout, stage_layers=None)
    return layout
