"""The legal layouts of a search: the product of its axes, less what the rules refuse.

A layout is settled axis by axis. A setting without effect, given those before it, is written as the default, so that
equal layouts are equal values. A layout is refused as soon as the axes so far are illegal, and what would come after
is not told apart: spaces of millions of combinations are enumerated without looking at each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from search_spaces.engines import engine_of
from search_spaces.engines.base import Rule
from search_spaces.layout import AXES, Layout
from search_spaces.rules import (
    heads_divide,
    layers_divide,
    rank_order_is_permutation,
    refusal,
    rules_at,
    sequence_divides,
    there_are_experts,
    there_are_units_for_fp8,
    virtual_stages_fit_schedule,
)
from search_spaces.workload import Workload


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


@dataclass(frozen=True)
class Hopeless:
    """A value of an axis that a rule refuses whatever the other axes have. `allowed`: values of the axis that it would
    let pass, as far as they can be listed."""

    axis: str
    value: Any
    reason: str
    allowed: tuple[Any, ...]


def varying(layouts: Iterable[Layout]) -> dict[str, list[Any]]:
    """Axis -> its values among `layouts` in their order, a default of None first, of the axes on which they differ."""
    taken: dict[str, set[Any]] = {field.name: set() for field in fields(Layout) if field.name in AXES}
    for layout in layouts:
        for axis, values in taken.items():
            values.add(getattr(layout, axis))
    return {
        axis: sorted(values, key=lambda value: () if value is None else value)
        for axis, values in taken.items()
        if len(values) > 1
    }


def _stage_layers(value: tuple[int, ...] | None, layout: Layout, work: Workload) -> tuple[int, ...] | None:
    stages, layers = layout.pipeline_stages, work.model.layers
    even = value == (layers // stages,) * stages and layers % stages == 0
    return None if even else value


def _rank_order(value: tuple[int, ...] | None, layout: Layout, work: Workload) -> tuple[int, ...] | None:
    return None if value == tuple(range(layout.num_gpus)) else value


_SAME: dict[str, Callable[[Any, Layout, Workload], Any]] = {"stage_layers": _stage_layers, "rank_order": _rank_order}
"""Axis -> the value as which one is written that has the same effect."""


def canonical(layout: Layout, work: Workload) -> Layout:
    """A layout without settings that have no effect in it, so that equal layouts are equal values.

    Of an illegal one, the axes up to the one at which it is refused.
    """
    settled, engine = _unsettled(layout.engine, layout.num_gpus, layout.global_batch_size), engine_of(layout)
    for axis in AXES:
        (settled,) = _grow(settled, axis, [getattr(layout, axis)], work)
        if refusal(settled, work, rules_at(axis, engine)):
            break
    return settled


def enumerate_space(axes: Mapping[str, Sequence[Any]], work: Workload) -> Space:
    """All legal layouts of `axes` (axis -> values to try, its default for others) for one workload.

    Raises `ValueError` for an engine that there is not.
    """
    refused: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    layouts = [_unsettled(axes["engine"][0], axes["num_gpus"][0], work.global_batch_size)]
    for axis, row in AXES.items():
        values = axes.get(axis, [row.default])
        parents, layouts = layouts, []
        for parent in parents:
            for layout in _grow(parent, axis, values, work):
                if (why := refusal(layout, work, rules_at(axis, engine_of(layout)))) is None:
                    layouts.append(layout)
                else:
                    refused[why[0]] += 1
                    reasons.setdefault(*why)
    combinations = math.prod(map(len, axes.values()))
    return Space(tuple(layouts), combinations, len(layouts) + refused.total(), dict(refused), reasons)


def hopeless(axes: Mapping[str, Sequence[Any]], work: Workload) -> Iterator[Hopeless]:
    """The values of `axes` with which no layout survives, for what the rules say of the model and the accelerator.

    Values that die of the batch, of memory, or of what only some layouts lack are none of these.
    """
    plain = _unsettled(axes["engine"][0], axes["num_gpus"][0], work.global_batch_size)
    for axis, judge in _judges(axes).items():
        for value in axes[axis]:
            if reason := judge.refuses(plain, axis, value, work):
                kind, words = AXES[axis].type, AXES[axis].allowed
                listed = words if kind is str else range(1, max(axes["num_gpus"]) + 1) if kind is int else ()
                allowed = tuple(other for other in listed or () if not judge.refuses(plain, axis, other, work))
                yield Hopeless(axis, value, reason, allowed)


class _Judge(NamedTuple):
    """A rule that judges the values of an axis, and, of a value, the settings of other axes that the rule looks at
    beside which it may pass; none for a value that is not judged."""

    rule: Rule
    besides: Callable[[Any], Sequence[dict[str, Any]]] = lambda value: [{}]

    def refuses(self, layout: Layout, axis: str, value: Any, work: Workload) -> str | None:
        """Why the rule refuses `layout` with a value whatever is beside it; None where it passes once."""
        reasons = [self.rule(replace(layout, **{axis: value}, **others), work) for others in self.besides(value)]
        return "; or ".join(dict.fromkeys(filter(None, reasons))) if reasons and all(reasons) else None


def _judges(axes: Mapping[str, Sequence[Any]]) -> dict[str, _Judge]:
    """By axis. Beside a size there may be any cut of the layers into equal stages, and those that are given."""
    sizes = [size for size in axes["pipeline_parallel_size"] if size > 1]
    virtual = [{"virtual_pipeline_stages": stages} for stages in axes["virtual_pipeline_stages"]]
    pipelines = [{"pipeline_parallel_size": size} | stages for size in sizes for stages in virtual]
    workers = [{"num_gpus": size} for size in axes["num_gpus"]]
    uneven = [layers for layers in axes["stage_layers"] if layers is not None]

    def cuts(size: int) -> list[dict[str, Any]]:
        fitting = [layers for layers in uneven if len(layers) % size == 0]
        return [{}, *({"stage_layers": cut, "virtual_pipeline_stages": len(cut) // size} for cut in fitting)]

    return {
        "tensor_parallel_size": _Judge(heads_divide),
        "context_parallel_size": _Judge(sequence_divides),
        "expert_parallel_size": _Judge(there_are_experts),
        "precision": _Judge(there_are_units_for_fp8),
        "pipeline_schedule": _Judge(virtual_stages_fit_schedule, lambda schedule: virtual if sizes else []),
        "pipeline_parallel_size": _Judge(layers_divide, cuts),
        "stage_layers": _Judge(layers_divide, lambda layers: (pipelines or [{}]) if layers else []),
        "rank_order": _Judge(rank_order_is_permutation, lambda order: workers),
    }


def _unsettled(engine: str, num_gpus: int, global_batch_size: int) -> Layout:
    """A layout before its axes are settled: all are idle."""
    return Layout.from_dict({"engine": engine, "num_gpus": num_gpus, "global_batch_size": global_batch_size})


def _grow(layout: Layout, axis: str, values: Sequence[Any], work: Workload) -> list[Layout]:
    """`layout` with each of the values of `axis` that differ in effect."""
    row, now = AXES[axis], getattr(layout, axis)
    if axis != "engine":  # before that, the engine is not the layout's own
        engine = engine_of(layout)
        if not (row.matters(layout) and engine.has_use(axis, layout)):
            values = [row.idle]
        else:
            if (same := _SAME.get(axis)) is not None:
                values = [same(value, layout, work) for value in values]
            if (settle := engine.settled.get(axis)) is not None:
                values = [settle(value, layout) for value in values]
    return [layout if value == now else replace(layout, **{axis: value}) for value in dict.fromkeys(values)]
