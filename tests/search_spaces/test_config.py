"""A layout's derived sizes, its name for people and its round trip through JSON."""

from __future__ import annotations

import json

import pytest

from search_spaces.config import TrialConfig

CONFIG = TrialConfig("megatron", 8, 2, 2, 1, 4, 64, "none", True, False, "bf16")


def test_derived_sizes() -> None:
    assert CONFIG.data_parallel_size == 2  # 8 GPUs / (2 x 2)
    assert CONFIG.gradient_accumulation_steps == 8  # 64 sequences / (2 replicas x 4)


def test_round_trip_through_json() -> None:
    values = json.loads(json.dumps(CONFIG.to_dict()))
    assert values["data_parallel_size"] == 2
    assert values["gradient_accumulation_steps"] == 8
    assert TrialConfig.from_dict({**values, "foreign": 1}) == CONFIG


def test_from_dict_wants_every_field() -> None:
    values = CONFIG.to_dict()
    del values["zero_stage"]
    with pytest.raises(KeyError, match="zero_stage"):
        TrialConfig.from_dict(values)


def test_label() -> None:
    assert CONFIG.label == "megatron 8gpu dp2 tp2 pp2 zero1 mbs4 sp"
    other = TrialConfig("deepspeed", 2, 1, 1, 3, 1, 8, "full", False, True, "fp32")
    assert other.label == "deepspeed 2gpu dp2 tp1 pp1 zero3 mbs1 recompute compile"
