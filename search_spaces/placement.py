"""Which GPU best takes which rank where GPUs differ in speed, and how many layers each stage best has, by that or by
how long its passes take.

Ranks of one stage end together, so that slow GPUs cost least where they share a stage, and that one has least to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from search_spaces.layout import Layout
from search_spaces.messages import scripts
from search_spaces.models import ModelShape
from search_spaces.playing import play_passes
from search_spaces.schedules import PassTime
from search_spaces.workload import Workload

PLACED = ("rank_order", "stage_layers")
"""The axes that say where a layout's work goes."""

ALIKE = 0.005
"""GPUs whose times differ by a smaller share count as alike: no more is known of a GPU in seconds."""


def placements(
    layout: Layout,
    work: Workload,
    slower: Mapping[int, float],
    axes: Sequence[str],
    passes: Sequence[PassTime] = (),
) -> list[Layout]:
    """The layout with other ranks' GPUs, other stages' layers, or both, that may be faster; none without a pipeline.

    `slower`: by worker, how many times as long as the fastest it takes; one that is left out, as long as that. `axes`
    of `rank_order` and `stage_layers` may differ from `layout`, which must have neither. `passes`: of each stage of
    `layout` as they were measured; where there are none, layers are cut by the speed of GPUs alone. Those that are not
    legal, or need more memory than there is, are among them.
    """
    if layout.pipeline_parallel_size == 1:
        return []
    times = [max(1.0, slower.get(worker, 1.0)) for worker in range(layout.num_gpus)]
    differ = max(times) >= (1 + ALIKE) * min(times)
    orders = differ and "rank_order" in axes
    ordered = replace(layout, rank_order=order_by_speed(layout, work, times)) if orders else layout
    found = [ordered]
    if "stage_layers" in axes:
        before = stage_times(layout, times)
        for one in (layout, ordered):
            after = stage_times(one, times)
            if passes:
                longer = [now / then for now, then in zip(after, before, strict=True)]
                cut = layers_by_passes(layout, work.shape, _longer(passes, longer))
            else:
                cut = layers_by_speed(work.shape.layers, after)
            found.append(replace(one, stage_layers=cut))
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


def layers_by_passes(layout: Layout, shape: ModelShape, passes: Sequence[PassTime]) -> tuple[int, ...]:
    """Of each stage, so that a step is as short as can be by its schedule; as in `layout` if that is as good.

    `passes`: of each stage as `layout` has it. From layers by the stages' speed on, one after the other is moved
    between the stage with most or with least to do and another, for as long as that helps.
    """
    step_s = step_by_cut(layout, shape, passes)
    before = _counts(layout, shape)
    busy = [sum(one.later_s for one in passes if one.stage == stage) for stage in range(len(before))]
    each = [seconds / count for seconds, count in zip(busy, before, strict=True)]
    best = layers_by_speed(shape.layers, [seconds / min(each) for seconds in each])
    best_s = step_s(best)
    while True:
        loads = [seconds * more for seconds, more in zip(busy, _more(shape, before, best), strict=True)]
        most, least = loads.index(max(loads)), loads.index(min(loads))
        pairs = itertools.permutations(range(len(best)), 2)
        ends = [pair for pair in pairs if not {most, least}.isdisjoint(pair)]
        moved = [cut for of, to in ends if min(cut := _moved(best, of, to)) > 0]
        shortest_s, shortest = min(((step_s(cut), cut) for cut in moved), default=(best_s, best))
        if shortest_s >= best_s:
            return best if best_s * (1 + ALIKE) <= step_s(before) else before
        best, best_s = shortest, shortest_s


def step_by_cut(layout: Layout, shape: ModelShape, passes: Sequence[PassTime]) -> Callable[[Sequence[int]], float]:
    """Seconds of a step by its schedule, without what comes before and after its passes, by the layers of each stage.

    `passes`: of each stage as `layout` has it. They take longer the more a stage has to do, in parameters that take
    part in matrix products.
    """
    before, rounds = _counts(layout, shape), scripts(layout)

    def step_s(cut: Sequence[int]) -> float:
        return play_passes(rounds, _longer(passes, _more(shape, before, cut))).seconds

    return step_s


def _counts(layout: Layout, shape: ModelShape) -> tuple[int, ...]:
    return tuple(len(layers) for layers in layout.layers_by_stage(shape.layers))


def _more(shape: ModelShape, before: Sequence[int], after: Sequence[int]) -> list[float]:
    """By stage, how many times as much there is to do after its layers became others."""
    last = len(before) - 1
    return [
        _work(shape, now, stage == last) / _work(shape, then, stage == last)
        for stage, (now, then) in enumerate(zip(after, before, strict=True))
    ]


def _work(shape: ModelShape, layers: int, head: bool) -> float:
    """What blocks, and perhaps the head, have to do, in parameters that take part in matrix products."""
    return float(layers * shape.block_parameters + (shape.vocab * shape.hidden if head else 0))


def _moved(cut: Sequence[int], one: int, other: int) -> tuple[int, ...]:
    """With a layer less on one stage and one more on another."""
    return tuple(count - (stage == one) + (stage == other) for stage, count in enumerate(cut))


def _longer(passes: Sequence[PassTime], times: Sequence[float]) -> list[PassTime]:
    """Passes that take so many times as long, by stage."""
    return [
        one._replace(first_s=one.first_s * times[one.stage], later_s=one.later_s * times[one.stage]) for one in passes
    ]


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
    """What a rank has to do, as `_work` has it."""
    pipeline_rank = layout.coordinates(rank)["pp"]
    return _work(work.shape, layout.layers_of(pipeline_rank, work.shape.layers), pipeline_rank == layout.end_ranks[1])


def _plain(layout: Layout, work: Workload) -> Layout:
    """Without what is the same as leaving it out."""
    if layout.rank_order == tuple(range(layout.num_gpus)):
        layout = replace(layout, rank_order=None)
    if layout.stage_layers is not None and len(set(layout.stage_layers)) == 1:
        layout = replace(layout, stage_layers=None)
    return layout
