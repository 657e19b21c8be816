"""That DeepSpeed trains as it is told here is what `test_parity` shows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from search_spaces.layout import Layout
from trainables.engines.deepspeed.configuration import configuration, not_expressible

BASE = Layout("deepspeed", 4, 16, micro_batch_size=2)


def test_batch_is_cut_as_the_layout_says() -> None:
    settings = configuration(BASE)
    assert settings["train_micro_batch_size_per_gpu"] == 2
    assert settings["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize(
    ("changes", "zero"),
    [
        ({}, {"stage": 0}),
        ({"zero_stage": 1}, {"stage": 1, "overlap_comm": True, "allgather_bucket_size": 500_000_000}),
        ({"zero_stage": 2, "bucket_size": 7, "overlap_grad_reduce": False}, {"overlap_comm": False}),
        ({"zero_stage": 2, "bucket_size": 7}, {"reduce_bucket_size": 7, "allgather_bucket_size": 7}),
        ({"zero_stage": 3, "bucket_size": 7}, {"reduce_bucket_size": 7, "stage3_prefetch_bucket_size": 7}),
        ({"zero_stage": 3, "overlap_param_gather": False}, {"stage": 3, "stage3_prefetch_bucket_size": 0}),
        ({"zero_stage": 3, "offload_optimizer": True}, {"offload_optimizer": {"device": "cpu", "pin_memory": True}}),
        ({"zero_stage": 3}, {"memory_efficient_linear": True}),
        ({"zero_stage": 3, "compile": True}, {"memory_efficient_linear": False}),
        ({"num_gpus": 2, "tensor_parallel_size": 2}, {"stage": 1}),
        ({"num_gpus": 2, "tensor_parallel_size": 2, "precision": "fp32"}, {"stage": 0}),
    ],
)
def test_zero(changes: dict[str, Any], zero: dict[str, Any]) -> None:
    assert zero.items() <= configuration(replace(BASE, **changes))["zero_optimization"].items()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_summed_over_microbatches_and_ranks_alike(stage: int, precision: str) -> None:
    settings = configuration(replace(BASE, zero_stage=stage, reduce_precision=precision))
    assert settings["bf16"] == {"enabled": True, "immediate_grad_update": True}
    assert settings["data_types"] == {"grad_accum_dtype": precision}
    assert settings["communication_data_type"] == precision


def test_without_zero_weights_are_held_in_fp32() -> None:
    settings = configuration(BASE)
    assert settings["bf16"] == {"enabled": False}
    assert settings["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert "torch_autocast" not in configuration(replace(BASE, precision="fp32"))


def test_it_is_json() -> None:
    settings = configuration(replace(BASE, tensor_parallel_size=2, zero_stage=3, offload_optimizer=True))
    assert json.loads(json.dumps(settings)) == settings
    assert settings["tensor_parallel"] == {"autotp_size": 2}
    assert settings["zero_force_ds_cpu_optimizer"] is False


def test_what_the_program_must_say() -> None:
    assert not_expressible(replace(BASE, tensor_parallel_size=2, zero_stage=3, bucket_size=7)) == {}
    said = not_expressible(replace(BASE, pipeline_parallel_size=2, context_parallel_size=2, recompute="selective"))
    assert set(said) == {"pipeline_parallel_size", "context_parallel_size", "recompute"}
    assert "num_stages=2" in said["pipeline_parallel_size"]
