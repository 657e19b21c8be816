"""A layout's derived sizes, its name for people and its round trip through JSON."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from search_spaces.layout import AXES, SETTLING, Layout, axis_of
from search_spaces.models import PRESETS
from search_spaces.space import canonical
from search_spaces.workload import Workload

WORK = Workload(PRESETS["tiny-llama"], 128, 16)
CONFIG = Layout(
    "megatron",
    8,
    64,
    micro_batch_size=4,
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    zero_stage=1,
    sequence_parallel=True,
)


def test_derived_sizes() -> None:
    assert CONFIG.data_parallel_size == 2  # 8 GPUs / (2 x 2)
    assert CONFIG.gradient_accumulation_steps == 8  # 64 sequences / (2 replicas x 4)


def test_round_trip_through_json() -> None:
    values = json.loads(json.dumps(CONFIG.to_dict()))
    assert values["data_parallel_size"] == 2
    assert values["gradient_accumulation_steps"] == 8
    assert Layout.from_dict({**values, "foreign": 1}) == CONFIG


def test_lists_survive_json() -> None:
    uneven = replace(CONFIG, stage_layers=(1, 3), rank_order=(7, 6, 5, 4, 3, 2, 1, 0))
    assert Layout.from_dict(json.loads(json.dumps(uneven.to_dict()))) == uneven


def test_an_older_record_without_a_field_has_its_default() -> None:
    values = CONFIG.to_dict()
    del values["zero_stage"], values["pipeline_schedule"]
    assert Layout.from_dict(values) == replace(CONFIG, zero_stage=0)


def test_a_record_wants_engine_size_and_batch() -> None:
    values = CONFIG.to_dict()
    del values["num_gpus"]
    with pytest.raises(TypeError, match="num_gpus"):
        Layout.from_dict(values)


def test_axes_of_the_user_s_own_are_settings_like_others() -> None:
    layout = CONFIG.having("nccl_algo", "Tree").having("buckets", 4).having("fused", True).having("dropout", 0.5)
    assert layout == CONFIG.having("fused", True).having("dropout", 0.5).having("buckets", 4).having(
        "nccl_algo", "Tree"
    )
    assert [layout.setting(axis) for axis in ("nccl_algo", "buckets", "fused", "tensor_parallel_size")] == [
        "Tree",
        4,
        True,
        2,
    ]
    assert layout.having("buckets", 8).setting("buckets") == 8 != layout.setting("buckets")
    assert layout.having("zero_stage", 3) == replace(layout, zero_stage=3)
    assert layout.label == f"{CONFIG.label} buckets=4 dropout=0.5 fused=true nccl_algo=Tree"
    with pytest.raises(KeyError, match="fused"):
        CONFIG.setting("fused")
    values = json.loads(json.dumps(layout.to_dict()))
    assert {"nccl_algo": "Tree", "buckets": 4, "fused": True, "dropout": 0.5}.items() <= values.items()
    assert Layout.from_dict(values | {"foreign": 1}) == layout
    assert "own" not in CONFIG.to_dict()


@pytest.mark.parametrize(
    ("values", "ordered", "places"),
    [
        (["Ring", "Tree"], False, None),
        ([1, 2, 8], True, [0, 1, 3]),
        ([0, 2, 8], True, [0, 2, 8]),
        ([0.5, 2.0], True, [-1, 1]),
        ([False, True], True, [0, 1]),
    ],
)
def test_where_values_of_the_user_s_own_lie_to_a_sampler(
    values: list[Any], ordered: bool, places: list[float] | None
) -> None:
    axis = axis_of("mine", values)
    assert (axis.name, axis.ordered) == ("mine", ordered)
    assert places is None or [axis.place(value) for value in values] == places


def test_label() -> None:
    assert CONFIG.label == "megatron 8gpu dp2 tp2 pp2 zero1 mbs4 sp"
    other = Layout("deepspeed", 2, 8, zero_stage=3, recompute="full", compile=True, precision="fp32")
    assert other.label == "deepspeed 2gpu dp2 zero3 mbs1 recompute compile fp32"


def test_every_field_but_the_batch_and_the_user_s_own_is_an_axis() -> None:
    names = [field.name for field in fields(Layout)]
    assert list(AXES) == [name for name in names if name not in ("global_batch_size", "own")]
    assert all(axis.name == name and axis.meaning for name, axis in AXES.items())
    assert len({axis.settled for axis in SETTLING}) == len(AXES) == len(SETTLING)


def test_each_axis_has_one_default() -> None:
    """A layout wants an engine and a number of GPUs; everything else is as the row says."""
    layout = Layout("megatron", 4, 16)
    for axis in list(AXES.values())[2:]:
        assert getattr(layout, axis.name) == axis.default
    assert (AXES["engine"].default, AXES["num_gpus"].default) == ("megatron", None)


def test_what_has_no_effect_is_idle() -> None:
    """It is the default, but for sequence parallelism, which is off where there are no tensor-parallel ranks."""
    assert [axis.name for axis in AXES.values() if axis.idle != axis.default] == ["sequence_parallel"]
    plain = Layout.plain("megatron", 4, 16)
    assert plain == replace(Layout("megatron", 4, 16), sequence_parallel=False)
    assert canonical(Layout("megatron", 4, 16), WORK) == plain


def test_a_record_that_lacks_an_axis_was_run_without() -> None:
    values = replace(CONFIG, sequence_parallel=False).to_dict()
    del values["sequence_parallel"], values["overlap_grad_reduce"]
    assert Layout.from_dict(values) == replace(CONFIG, sequence_parallel=False)


@pytest.mark.parametrize(
    ("axis", "values", "places"),
    [
        ("micro_batch_size", (1, 2, 8), (0.0, 1.0, 3.0)),
        ("zero_stage", (0, 1, 3), (0.0, 1.0, 3.0)),
        ("compile", (False, True), (0.0, 1.0)),
    ],
)
def test_where_values_lie_to_a_sampler(axis: str, values: tuple[int, ...], places: tuple[float, ...]) -> None:
    assert AXES[axis].ordered
    assert tuple(AXES[axis].place(value) for value in values) == places


def test_words_and_lists_have_no_order() -> None:
    unordered = {name for name, axis in AXES.items() if not axis.ordered}
    words = {"engine", "pipeline_schedule", "recompute", "precision", "reduce_precision"}
    assert unordered == words | {"stage_layers", "rank_order", "power_limit_w"}


LABELS: dict[str, tuple[Any, str | None]] = {
    "engine": ("deepspeed", "deepspeed"),
    "num_gpus": (16, "16gpu"),
    "micro_batch_size": (8, "mbs8"),
    "tensor_parallel_size": (4, "tp4"),
    "pipeline_parallel_size": (4, "pp4"),
    "context_parallel_size": (2, "cp2"),
    "expert_parallel_size": (2, "ep2"),
    "pipeline_schedule": ("gpipe", "gpipe"),
    "virtual_pipeline_stages": (2, "vpp2"),
    "stage_layers": ((7, 9), "layers7-9"),
    "zero_stage": (3, "zero3"),
    "data_parallel_replicate_size": (2, "x2"),
    "sequence_parallel": (False, None),
    "async_tensor_parallel": (True, "async-tp"),
    "recompute": ("full", "recompute"),
    "overlap_grad_reduce": (False, "no-grad-overlap"),
    "overlap_param_gather": (False, "no-param-overlap"),
    "bucket_size": (10_000_000, "bucket1e7"),
    "offload_optimizer": (True, "offload"),
    "compile": (True, "compile"),
    "precision": ("fp8", "fp8"),
    "reduce_precision": ("bf16", "reduce-bf16"),
    "expandable_segments": (True, "expandable"),
    "rank_order": ((1, 0), "order1-0"),
    "power_limit_w": (400, "400W"),
}


def test_every_axis_is_labelled() -> None:
    assert set(LABELS) == set(AXES)


@pytest.mark.parametrize("axis", LABELS)
def test_labels_of_axes(axis: str) -> None:
    value, word = LABELS[axis]
    before = replace(CONFIG, compile=axis == "async_tensor_parallel")
    after = replace(before, **{axis: value})
    new = set(after.label.split()) - set(before.label.split())
    assert {word} - {None} == {part for part in new if not part.startswith("dp")}
    assert (word is None) == (len(after.label) < len(before.label))


def test_stages_of_as_many_layers_are_counted() -> None:
    labels = {
        (7, 9, 9, 7): "layers7-9-9-7",
        (7, 8, 8, 8, 7): "layers7-8x3-7",
        (1, *[2] * 62, 1): "layers1-2x62-1",
        (8,) * 4: "layers8x4",
    }
    for layers, label in labels.items():
        layout = replace(CONFIG, num_gpus=64, pipeline_parallel_size=len(layers), stage_layers=layers)
        assert label in layout.label.split()


def test_the_largest_label() -> None:
    everything = replace(CONFIG, **{axis: value for axis, (value, word) in LABELS.items() if word})
    assert replace(everything, num_gpus=128).label == (
        "deepspeed 128gpu dp4 tp4 pp4 cp2 ep2 zero3 mbs8 gpipe vpp2 layers7-9 x2 sp async-tp recompute no-grad-overlap "
        "no-param-overlap bucket1e7 offload compile fp8 reduce-bf16 expandable order1-0 400W"
    )


def test_the_ends_of_a_pipeline() -> None:
    for schedule, virtual, expected in (
        ("1f1b", 1, (0, 1)),
        ("interleaved_1f1b", 3, (0, 1)),
        ("zbv_zero_bubble", 2, (0, 0)),
    ):
        layout = replace(CONFIG, pipeline_schedule=schedule, virtual_pipeline_stages=virtual)
        assert layout.end_ranks == expected
        for end, stage in zip(layout.end_ranks, (0, layout.pipeline_stages - 1), strict=True):
            assert stage in layout.stages_of(end)


@pytest.mark.parametrize(("cut", "expected"), [(None, [8, 8]), ((3, 5, 1, 7), [10, 6])])
def test_layers_of_pipeline_ranks(cut: tuple[int, ...] | None, expected: list[int]) -> None:
    """Ranks of the V schedule hold the first and the last stage, and those between."""
    layout = replace(
        CONFIG, pipeline_schedule="zbv_zero_bubble", virtual_pipeline_stages=2, stage_layers=cut, compile=False
    )
    assert [layout.layers_of(rank, 16) for rank in range(2)] == expected
    for rank in range(2):
        stages = layout.layers_by_stage(16)
        assert layout.layers_of(rank, 16) == sum(len(stages[stage]) for stage in layout.stages_of(rank))
