"""All operators of which the layouts of a space consist, by how much of their time they take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from search_spaces.blocks import Cut, Used, parts_of, update_of
from search_spaces.coefficients import Coefficients
from search_spaces.cost import launch_s, predict, update_s
from search_spaces.doubt import may_wait
from search_spaces.engines import facts_of
from search_spaces.launches import ENDS, launch_of
from search_spaces.layout import Layout
from search_spaces.operators import Operator
from search_spaces.parameters import held
from search_spaces.roofline import priced
from search_spaces.workload import Workload


def operators_of(layouts: Iterable[Layout], work: Workload, c: Coefficients) -> list[Operator]:
    """Those of legal layouts, those first that take most seconds of a step of each layout together, as predicted; no
    launches of layouts whose GPUs have so much to do that no step is the CPU's."""
    seconds: defaultdict[Operator, float] = defaultdict(float)
    through: defaultdict[tuple[Cut, tuple[Used, ...]], int] = defaultdict(int)
    for layout in layouts:
        engine, cut, rounds = facts_of(layout, work), Cut.of(layout, work), layout.gradient_accumulation_steps
        parts = parts_of(cut, work.shape, work.sequence_length)
        first, last = layout.end_ranks
        layers = layout.layers_of(first, work.shape.layers)
        for part, times in ((parts.block, layers), (parts.embedding, 1), (parts.head, 1)):
            through[cut, part] += rounds * times
        if may_wait(layout, work, predict(layout, work, c)):
            seconds[launch_of(layout, work)] += rounds * (layers + ENDS) * launch_s(layout, work, c)
        if not layout.offload_optimizer:
            for rank in {first, last}:
                shard = held(layout, work.shape, rank, engine.splits_tables).sharded(layout)
                seconds[update_of(engine, shard)] += update_s(engine, shard, c)
    for (cut, part), times in through.items():
        for operator, count in part:
            forward, backward = priced(operator, cut, c)
            seconds[operator] += times * count * (forward.seconds + backward.seconds)
    return sorted(seconds, key=lambda operator: -seconds[operator])
