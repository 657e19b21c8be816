"""A layout's derived sizes, its name for people and its round trip through JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from search_spaces.layout import Layout

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


def test_label() -> None:
    assert CONFIG.label == "megatron 8gpu dp2 tp2 pp2 zero1 mbs4 sp"
    other = Layout("deepspeed", 2, 8, zero_stage=3, recompute="full", compile=True, precision="fp32")
    assert other.label == "deepspeed 2gpu dp2 zero3 mbs1 recompute compile fp32"
