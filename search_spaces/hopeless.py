"""Values of axes with which no layout survives: what the rules say of them whatever the other axes have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from search_spaces.engines.base import Rule
from search_spaces.layout import AXES, Layout
from search_spaces.rules import (
    heads_divide,
    layers_divide,
    power_limit_is_of_the_accelerator,
    rank_order_is_permutation,
    segments_expand_on_cuda,
    sequence_divides,
    there_are_experts,
    there_are_units_for_fp8,
    virtual_stages_fit_schedule,
)
from search_spaces.workload import Workload


@dataclass(frozen=True)
class Hopeless:
    """A value of an axis that a rule refuses whatever the other axes have. `allowed`: values of the axis that it would
    let pass, as far as they can be listed."""

    axis: str
    value: Any
    reason: str
    allowed: tuple[Any, ...]


def hopeless(axes: Mapping[str, Sequence[Any]], work: Workload) -> Iterator[Hopeless]:
    """The values of `axes` with which no layout survives, for what the rules say of the model and the accelerator.

    Values that die of the batch, of memory, or of what only some layouts lack are none of these.
    """
    plain = Layout.plain(axes["engine"][0], axes["num_gpus"][0], work.global_batch_size)
    for axis, judge in _judges(axes).items():
        for value in axes[axis]:
            if reason := judge.refuses(plain, axis, value, work):
                kind, words = AXES[axis].type, AXES[axis].allowed
                counts = kind is int and axis != "power_limit_w"
                listed = words if kind is str else range(1, max(axes["num_gpus"]) + 1) if counts else ()
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
        "expandable_segments": _Judge(segments_expand_on_cuda),
        "power_limit_w": _Judge(power_limit_is_of_the_accelerator),
    }
