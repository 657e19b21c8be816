"""Values with which no layout survives, as the rules themselves say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.hardware import ACCELERATORS
from search_spaces.hopeless import hopeless
from search_spaces.layout import AXES
from search_spaces.models import PRESETS
from search_spaces.space import enumerate_space
from search_spaces.workload import Workload

WORK = Workload(PRESETS["tiny-llama"], 128, 16, ACCELERATORS["h200"])
PLAIN: dict[str, list[Any]] = {name: [axis.default] for name, axis in AXES.items()} | {"num_gpus": [8]}
VALUES: dict[str, list[Any]] = {
    "engine": ["megatron", "deepspeed"],
    "num_gpus": [4, 8, 12],
    "tensor_parallel_size": [1, 2, 3, 4],
    "context_parallel_size": [1, 2, 3],
    "pipeline_parallel_size": [2, 3, 4],
    "pipeline_schedule": list(AXES["pipeline_schedule"].allowed or ()),
    "virtual_pipeline_stages": [1, 2],
    "stage_layers": [None, (1, 3), (1, 1, 2), (1, 1, 1, 1)],
    "expert_parallel_size": [1, 2, 3],
    "precision": ["bf16", "fp8"],
    "rank_order": [None, (1, 0, 2, 3), (1, 0)],
    "expandable_segments": [False, True],
    "power_limit_w": [None, 400, 900],
    "micro_batch_size": [1, 2],
}
WORKS = [
    replace(WORK, model=PRESETS[model], accelerator=ACCELERATORS[device])
    for model in ("tiny-llama", "tiny-moe")
    for device in ("cpu", "h200")
]


@st.composite
def products(draw: st.DrawFn) -> dict[str, list[Any]]:
    axes = dict(PLAIN)
    for name in draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=6, unique=True)):
        axes[name] = draw(st.lists(st.sampled_from(VALUES[name]), min_size=1, max_size=3, unique=True))
    return axes


@settings(deadline=None, max_examples=200)
@given(products(), st.sampled_from(WORKS))
def test_no_legal_layout_has_a_hopeless_value(axes: dict[str, list[Any]], work: Workload) -> None:
    layouts = enumerate_space(axes, work).layouts
    for found in hopeless(axes, work):
        # A value that an axis without effect has in all layouts is written where there is no pipeline.
        effective = [layout for layout in layouts if AXES[found.axis].matters(layout)]
        assert all(getattr(layout, found.axis) != found.value for layout in effective)
        assert found.value not in found.allowed


@settings(deadline=None, max_examples=100)
@given(products(), st.sampled_from(WORKS))
def test_what_is_allowed_is_not_hopeless(axes: dict[str, list[Any]], work: Workload) -> None:
    for found in hopeless(axes, work):
        for value in found.allowed:
            again = [one for one in hopeless(axes | {found.axis: [value]}, work) if one.axis == found.axis]
            assert again == []


@pytest.mark.parametrize(
    ("axes", "work", "axis", "value", "allowed"),
    [
        ({"tensor_parallel_size": [1, 3]}, {}, "tensor_parallel_size", 3, (1, 2)),
        ({"context_parallel_size": [5]}, {}, "context_parallel_size", 5, (1, 2, 4, 8)),
        ({"expert_parallel_size": [1, 2]}, {}, "expert_parallel_size", 2, (1,)),
        ({"precision": ["fp8"]}, {"accelerator": ACCELERATORS["a100"]}, "precision", "fp8", ("bf16", "fp32")),
        ({"pipeline_parallel_size": [1, 3]}, {}, "pipeline_parallel_size", 3, (1, 2, 4)),
        (
            {"pipeline_parallel_size": [1, 2], "virtual_pipeline_stages": [2]},
            {},
            "pipeline_schedule",
            "1f1b",
            ("interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"),
        ),
        ({"pipeline_parallel_size": [2], "stage_layers": [(1, 1, 2)]}, {}, "stage_layers", (1, 1, 2), ()),
        ({"rank_order": [None, (0, 2, 1)]}, {}, "rank_order", (0, 2, 1), ()),
        ({"expandable_segments": [False, True]}, {"accelerator": ACCELERATORS["cpu"]}, "expandable_segments", True, ()),
        ({"power_limit_w": [None, 400]}, {"accelerator": ACCELERATORS["cpu"]}, "power_limit_w", 400, ()),
    ],
)
def test_hopeless(axes: dict[str, Any], work: dict[str, Any], axis: str, value: Any, allowed: tuple[Any, ...]) -> None:
    (found,) = hopeless(PLAIN | axes, replace(WORK, **work))
    assert (found.axis, found.value, found.allowed) == (axis, value, allowed)
    assert found.reason


@pytest.mark.parametrize(
    "axes",
    [
        {"micro_batch_size": [7]},  # dies of the batch
        {"num_gpus": [4], "tensor_parallel_size": [2], "pipeline_parallel_size": [4]},  # of the GPUs
        {"zero_stage": [3], "pipeline_parallel_size": [2]},  # of a combination
        {"pipeline_schedule": ["zbv_zero_bubble"]},  # without effect
        {"pipeline_parallel_size": [1, 4], "stage_layers": [None, (1, 1, 1, 1)], "virtual_pipeline_stages": [1, 2]},
    ],
)
def test_what_dies_of_something_else_is_not_hopeless(axes: dict[str, Any]) -> None:
    assert list(hopeless(PLAIN | axes, WORK)) == []


def test_too_big_is_not_hopeless() -> None:
    big = replace(WORK, model=PRESETS["llama3-70b"], accelerator=ACCELERATORS["h100"])
    assert enumerate_space(PLAIN, big).layouts == ()
    assert list(hopeless(PLAIN, big)) == []
