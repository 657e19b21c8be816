from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from search_spaces.layout import Layout
from service.answers.exports.megatron_lm import arguments, not_expressible

BASE = Layout("megatron", 16, 64, overlap_grad_reduce=False)
ALWAYS = (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1 "
    "--expert-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 64"
)


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({}, "--bf16"),
        ({"precision": "fp32"}, ""),
        ({"precision": "fp8"}, "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"),
        ({"reduce_precision": "bf16"}, "--bf16 --grad-reduce-in-bf16"),
        ({"virtual_pipeline_stages": 2}, "--num-virtual-stages-per-pipeline-rank 2 --bf16"),
        ({"stage_layers": (1, 3)}, "--pipeline-model-parallel-layout Et|t*3L --bf16"),
        ({"overlap_grad_reduce": True}, "--overlap-grad-reduce --bf16"),
        ({"zero_stage": 1}, "--use-distributed-optimizer --bf16"),
        (
            {"zero_stage": 1, "overlap_grad_reduce": True},
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16",
        ),
        (
            {"zero_stage": 2},
            "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads "
            "--ckpt-format fsdp_dtensor --bf16",
        ),
        (
            {"zero_stage": 3, "data_parallel_replicate_size": 2},
            "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
            "--ckpt-format fsdp_dtensor --num-distributed-optimizer-instances 2 --bf16",
        ),
        (
            {"recompute": "full"},
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --bf16",
        ),
        ({"recompute": "selective"}, "--recompute-granularity selective --recompute-modules layernorm --bf16"),
    ],
)
def test_arguments(changes: dict[str, Any], added: str) -> None:
    assert " ".join(arguments(replace(BASE, **changes))) == f"{ALWAYS} {added}".strip()


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"sequence_parallel": False}, ""),
        ({}, "--sequence-parallel "),
        ({"async_tensor_parallel": True}, "--sequence-parallel --tp-comm-overlap "),
    ],
)
def test_sizes(changes: dict[str, Any], added: str) -> None:
    layout = replace(
        BASE,
        tensor_parallel_size=2,
        context_parallel_size=4,
        expert_parallel_size=8,
        micro_batch_size=2,
        precision="fp32",
    )
    assert " ".join(arguments(replace(layout, **changes))) == (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --context-parallel-size 4 "
        f"--expert-model-parallel-size 8 --micro-batch-size 2 --global-batch-size 64 {added}--cp-comm-type all_gather "
        "--moe-token-dispatcher-type alltoall --moe-grouped-gemm"
    )


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, set()),
        ({"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_1f1b"}, set()),
        ({"pipeline_parallel_size": 2, "pipeline_schedule": "zbv_zero_bubble"}, {"pipeline_schedule"}),
        ({"recompute": "full"}, set()),
        ({"recompute": "selective", "compile": True}, {"recompute", "compile"}),
        ({"rank_order": (1, 0)}, {"rank_order"}),
        ({"expandable_segments": True}, {"expandable_segments"}),
        ({"power_limit_w": 400}, {"power_limit_w"}),
    ],
)
def test_what_megatron_lm_does_otherwise(changes: dict[str, Any], fields: set[str]) -> None:
    assert set(not_expressible(replace(BASE, **changes))) == fields
