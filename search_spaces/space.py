"""The legal points of a search: the product of its axes, less what the rules refuse.

A layout is settled axis by axis. A setting without effect, given those before it, is written as the default, so that
equal layouts are equal values. A layout is refused as soon as the axes so far are illegal, and what would come after
is not told apart: spaces of millions of combinations are enumerated without looking at each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from search_spaces.layout import BUCKET_SIZE, Layout
from search_spaces.rules import RULES_BY_AXIS, refusal
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


def varying(layouts: Iterable[Layout]) -> dict[str, list[Any]]:
    """Axis -> its values among `layouts` in their order, a default of None first, of the axes on which they differ."""
    taken: dict[str, set[Any]] = {field.name: set() for field in fields(Layout)}
    for layout in layouts:
        for axis, values in taken.items():
            values.add(getattr(layout, axis))
    return {
        axis: sorted(values, key=lambda value: () if value is None else value)
        for axis, values in taken.items()
        if len(values) > 1
    }


def is_numeric(values: Iterable[Any]) -> bool:
    """Whether the values of an axis have an order: text, lists and their default have none."""
    return all(isinstance(value, int) for value in values)


def _pipeline_schedule(value: str, layout: Layout, work: Workload) -> str:
    return value if layout.pipeline_parallel_size > 1 else "1f1b"


def _virtual_pipeline_stages(value: int, layout: Layout, work: Workload) -> int:
    return value if layout.pipeline_parallel_size > 1 else 1


def _stage_layers(value: tuple[int, ...] | None, layout: Layout, work: Workload) -> tuple[int, ...] | None:
    stages, layers = layout.pipeline_stages, work.model.layers
    even = value == (layers // stages,) * stages and layers % stages == 0
    return None if even or layout.pipeline_parallel_size == 1 else value


def _zero_stage(value: int, layout: Layout, work: Workload) -> int:
    if layout.shard_ranks == 1:
        return 0
    # With a single microbatch, reducing gradients once a step is reducing them every microbatch.
    once = layout.gradient_accumulation_steps == 1 and layout.pipeline_parallel_size == 1
    return 2 if value == 1 and once and layout.engine == "megatron" else value


def _data_parallel_replicate_size(value: int, layout: Layout, work: Workload) -> int:
    return value if layout.zero_stage else 1


def _offload_optimizer(value: bool, layout: Layout, work: Workload) -> bool:
    return value and layout.engine == "deepspeed"


def _sequence_parallel(value: bool, layout: Layout, work: Workload) -> bool:
    return value and layout.tensor_parallel_size > 1 and layout.engine == "megatron"


def _async_tensor_parallel(value: bool, layout: Layout, work: Workload) -> bool:
    return value and layout.sequence_parallel and layout.compile  # the compiler makes it of the synchronous one


def _rank_order(value: tuple[int, ...] | None, layout: Layout, work: Workload) -> tuple[int, ...] | None:
    return None if value == tuple(range(layout.num_gpus)) else value


def _overlap_grad_reduce(value: bool, layout: Layout, work: Workload) -> bool:
    if layout.engine == "megatron":
        return value or layout.shard_ranks == 1
    # DeepSpeed reduces after the last backward pass without ZeRO, in pipelines, and where ZeRO-1 sums bf16 in fp32.
    sums_apart = layout.precision == "bf16" and layout.reduce_precision == "fp32" and not layout.offload_optimizer
    late = layout.zero_stage == 0 or layout.pipeline_parallel_size > 1 or (layout.zero_stage == 1 and sums_apart)
    return value or late


def _overlap_param_gather(value: bool, layout: Layout, work: Workload) -> bool:
    return value or layout.zero_stage < (1 if layout.engine == "megatron" else 3)


def _bucket_size(value: int, layout: Layout, work: Workload) -> int:
    return value if layout.engine == "deepspeed" and layout.zero_stage else BUCKET_SIZE


def _reduce_precision(value: str, layout: Layout, work: Workload) -> str:
    return "fp32" if layout.precision == "fp32" else value


_SETTLED: dict[str, Callable[[Any, Layout, Workload], Any]] = {
    "pipeline_schedule": _pipeline_schedule,
    "virtual_pipeline_stages": _virtual_pipeline_stages,
    "stage_layers": _stage_layers,
    "zero_stage": _zero_stage,
    "data_parallel_replicate_size": _data_parallel_replicate_size,
    "offload_optimizer": _offload_optimizer,
    "sequence_parallel": _sequence_parallel,
    "async_tensor_parallel": _async_tensor_parallel,
    "rank_order": _rank_order,
    "overlap_grad_reduce": _overlap_grad_reduce,
    "overlap_param_gather": _overlap_param_gather,
    "bucket_size": _bucket_size,
    "reduce_precision": _reduce_precision,
}
_DEFAULTS = {field.name: field.default for field in fields(Layout) if field.default is not MISSING}


def canonical(layout: Layout, work: Workload) -> Layout:
    """The same layout without settings that have no effect in it, so that equal layouts are equal values.

    Of an illegal one, the axes up to the one at which it is refused.
    """
    settled = Layout(layout.engine, layout.num_gpus, layout.global_batch_size)
    for axis, rules in RULES_BY_AXIS.items():
        (settled,) = _grow(settled, axis, [getattr(layout, axis)], work)
        if refusal(settled, work, rules):
            break
    return settled


def enumerate_space(axes: Mapping[str, Sequence[Any]], work: Workload) -> Space:
    """All legal points of `axes` (field of `Layout` -> values to try) for one workload."""
    refused: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    layouts = [Layout(axes["engine"][0], axes["num_gpus"][0], work.global_batch_size)]
    for axis, rules in RULES_BY_AXIS.items():
        values = axes[axis] if axis in axes else [_DEFAULTS[axis]]
        parents, layouts = layouts, []
        for parent in parents:
            for layout in _grow(parent, axis, values, work):
                if (why := refusal(layout, work, rules)) is None:
                    layouts.append(layout)
                else:
                    refused[why[0]] += 1
                    reasons.setdefault(*why)
    combinations = math.prod(map(len, axes.values()))
    return Space(tuple(layouts), combinations, len(layouts) + refused.total(), dict(refused), reasons)


def _grow(layout: Layout, axis: str, values: Sequence[Any], work: Workload) -> list[Layout]:
    """`point` with each of the values of `axis` that differ in effect."""
    settle = _SETTLED.get(axis)
    distinct = dict.fromkeys(values if settle is None else [settle(value, layout, work) for value in values])
    now = getattr(layout, axis)
    return [layout if value == now else replace(layout, **{axis: value}) for value in distinct]
