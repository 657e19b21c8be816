"""The legal layouts of a search: the product of its axes, less what the rules refuse.

A layout is settled axis by axis. A setting without effect, given those before it, is written as the default, so that
equal layouts are equal values. A layout is refused as soon as the axes so far are illegal, and what would come after
is not told apart: spaces of millions of combinations are enumerated without looking at each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from search_spaces.axis import Axis
from search_spaces.engines import facts_of
from search_spaces.layout import AXES, SETTLING, Layout, axis_of
from search_spaces.rules import refusal, rules_at
from search_spaces.workload import Workload

MOST_LAYOUTS = 250_000
"""What is kept at a time: more would take a minute to find, and nobody tries a share of them that says anything."""


@dataclass(frozen=True)
class Space:
    """`layouts`: the legal layouts in a fixed order. `refused`: how many distinct layouts each rule refused, those that
    differ only in axes settled after its refusal counted as one.

    `reasons` gives one example of each rule's reason. `combinations` counts the product of the axes, of which
    `distinct` are different layouts: the legal and the refused ones.
    """

    layouts: tuple[Layout, ...]
    combinations: int
    distinct: int
    refused: dict[str, int]
    reasons: dict[str, str]


def varying(layouts: Iterable[Layout]) -> dict[str, list[Any]]:
    """Axis -> its values among `layouts` in their order, a default of None first, of the axes on which they differ."""
    taken: dict[str, set[Any]] = {axis: set() for axis in AXES}
    for layout in layouts:
        for axis in (*AXES, *dict(layout.own)):
            taken.setdefault(axis, set()).add(layout.setting(axis))
    return {
        axis: sorted(values, key=lambda value: (value is not None, value))
        for axis, values in taken.items()
        if len(values) > 1
    }


def _stage_layers(value: tuple[int, ...] | None, layout: Layout, work: Workload) -> tuple[int, ...] | None:
    if value is None:
        return None
    stages, layers = layout.pipeline_stages, work.shape.layers
    even = layers % stages == 0 and value == (layers // stages,) * stages
    return None if even else value


def _rank_order(value: tuple[int, ...] | None, layout: Layout, work: Workload) -> tuple[int, ...] | None:
    return None if value == tuple(range(layout.num_gpus)) else value


_SAME: dict[str, Callable[[Any, Layout, Workload], Any]] = {"stage_layers": _stage_layers, "rank_order": _rank_order}
"""Axis -> the value as which one is written that has the same effect."""


def canonical(layout: Layout, work: Workload) -> Layout:
    """A layout without settings that have no effect in it, so that equal layouts are equal values.

    Of an illegal one, the axes up to the one at which it is refused.
    """
    settled, engine = Layout.plain(layout.engine, layout.num_gpus, layout.global_batch_size), facts_of(layout, work)
    for axis in (*SETTLING, *(axis_of(name, [value]) for name, value in layout.own)):
        (settled,) = _grow(settled, axis, [layout.setting(axis.name)], work)
        if refusal(settled, work, rules_at(axis.name, engine)):
            break
    return settled


def enumerate_space(axes: Mapping[str, Sequence[Any]], work: Workload) -> Space:
    """All legal layouts of `axes` (axis -> values to try, its default for others) for one workload.

    Axes of the user's own are among `axes`, and settled after all others, in the order of their names.
    Raises `ValueError` for an engine that there is not, and for more than `MOST_LAYOUTS` layouts.
    """
    refused: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    layouts = [Layout.plain(axes["engine"][0], axes["num_gpus"][0], work.global_batch_size)]
    own = (axis_of(name, axes[name]) for name in sorted(axes) if name not in AXES)
    for axis in (*SETTLING, *own):
        values = axes.get(axis.name, [axis.default])
        parents, layouts = layouts, []
        for parent in parents:
            for layout in _grow(parent, axis, values, work):
                if (why := refusal(layout, work, rules_at(axis.name, facts_of(layout, work)))) is None:
                    layouts.append(layout)
                    if len(layouts) > MOST_LAYOUTS:
                        raise ValueError(
                            f"space: more than {MOST_LAYOUTS:,} layouts up to {axis.name}: name fewer values"
                        )
                else:
                    refused[why[0]] += 1
                    reasons.setdefault(*why)
    combinations = math.prod(map(len, axes.values()))
    return Space(tuple(layouts), combinations, len(layouts) + refused.total(), dict(refused), reasons)


def _grow(layout: Layout, axis: Axis, values: Sequence[Any], work: Workload) -> list[Layout]:
    """`layout` with each of the values of `axis` that differ in effect."""
    name, engine = axis.name, facts_of(layout, work)
    if not (axis.matters(layout) and engine.has_use(name, layout)):
        values = [axis.idle]
    else:
        if (same := _SAME.get(name)) is not None:
            values = [same(value, layout, work) for value in values]
        if (own := engine.same.get(name)) is not None:
            values = [own(value, layout) for value in values]
    now = getattr(layout, name, None)  # None of an axis of the user's own, which is not settled yet
    return [layout if value == now else layout.having(name, value) for value in dict.fromkeys(values)]
