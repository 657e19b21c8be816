"""Each rule refuses what it is there for, with its reason, and lets the nearest legal layout pass."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from search_spaces.engines import ENGINES
from search_spaces.hardware import ACCELERATORS, Accelerator
from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from search_spaces.rules import all_rules, refusal
from search_spaces.workload import Workload

BASE = Layout("megatron", 4, 16)
WORK = Workload(PRESETS["tiny-llama"], 128, 16)
INTERLEAVED = {
    "pipeline_parallel_size": 2,
    "virtual_pipeline_stages": 2,
    "pipeline_schedule": "interleaved_1f1b",
}
ASYNC = {"tensor_parallel_size": 2, "sequence_parallel": True, "compile": True, "async_tensor_parallel": True}
EXPERTS = {"num_experts": 8}
H200 = {"accelerator": ACCELERATORS["h200"]}
PROXIES = {"model": PRESETS["llama3-70b"], "depths": (2, 6)}
BIG = {"model": PRESETS["llama3-8b"], "accelerator": Accelerator(80.0)}


@dataclass(frozen=True)
class Case:
    """`refused` and `allowed` are changes to `BASE`; `model` and `work` change what both are tried with."""

    refused: dict[str, Any]
    allowed: dict[str, Any]
    reason: str
    model: dict[str, Any] = field(default_factory=dict)
    work: dict[str, Any] = field(default_factory=dict)

    @property
    def workload(self) -> Workload:
        work = replace(WORK, **self.work)
        return replace(work, model=replace(work.shape, **self.model))


CASES: dict[str, list[Case]] = {
    "gpus_divide": [
        Case({"num_gpus": 3, "tensor_parallel_size": 2}, {"tensor_parallel_size": 2}, "3 GPUs are no multiple of .* 2"),
        Case(
            {"num_gpus": 1, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            {"num_gpus": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "1 GPUs are no multiple of .* 4",
        ),
    ],
    "heads_divide": [
        Case({"tensor_parallel_size": 4}, {"tensor_parallel_size": 2}, "4 heads and 2 key-value heads"),
        Case(
            {"tensor_parallel_size": 4},
            {"tensor_parallel_size": 2},
            "6 heads and 6 key-value heads .* 4 GPUs",
            model={"hidden": 96, "heads": 6, "kv_heads": 6},
        ),
    ],
    "width_divides": [
        Case({"tensor_parallel_size": 2}, {}, "ffn_hidden 177", model={"ffn_hidden": 177}),
        Case({"tensor_parallel_size": 2}, {}, "vocab 50257", model={"vocab": 50_257}),
    ],
    "sequence_divides": [
        Case(
            {"tensor_parallel_size": 2},
            {"tensor_parallel_size": 2, "sequence_parallel": False},
            "sequence of 129",
            work={"sequence_length": 129},
        ),
        Case({"context_parallel_size": 2}, {}, "sequence of 130 .* 4 pieces", work={"sequence_length": 130}),
        Case(
            {"num_gpus": 8, "tensor_parallel_size": 4, "context_parallel_size": 2},
            {"num_gpus": 8, "tensor_parallel_size": 4, "context_parallel_size": 2, "sequence_parallel": False},
            "sequence of 36 cannot be split over 4 GPUs",
            model={"heads": 8, "kv_heads": 4},
            work={"sequence_length": 36},
        ),
    ],
    "layers_divide": [
        Case({"pipeline_parallel_size": 2}, {}, "3 layers .* 2 stages", model={"layers": 3}),
        Case(
            {"pipeline_parallel_size": 4},
            {"pipeline_parallel_size": 2},
            "2 layers .* 4 stages",
            model={"layers": 8},
            work={"depths": (2, 4)},
        ),
        Case(INTERLEAVED, {"pipeline_parallel_size": 2}, "6 layers .* 4 stages", model={"layers": 6}),
        *(
            Case(
                {"pipeline_parallel_size": 2, "stage_layers": wrong},
                {"pipeline_parallel_size": 2, "stage_layers": (1, 3)},
                "2 numbers above 0 that sum to 4",
            )
            for wrong in ((1, 2), (0, 4), (4,), (1, 1, 2))
        ),
    ],
    "batch_divides": [
        Case({"micro_batch_size": 3}, {"micro_batch_size": 2}, "global batch 16 is no multiple of .* 12"),
        Case({"micro_batch_size": 8}, {"micro_batch_size": 4}, "global batch 16 is no multiple of .* 32"),
    ],
    "pipeline_fills": [
        Case(
            {"pipeline_parallel_size": 4, "micro_batch_size": 8},
            {"pipeline_parallel_size": 4, "micro_batch_size": 4},
            "2 microbatches do not fill 4",
        )
    ],
    "virtual_stages_fit_schedule": [
        Case(
            {"pipeline_parallel_size": 2, "virtual_pipeline_stages": 2, "pipeline_schedule": schedule},
            {"pipeline_parallel_size": 2, "pipeline_schedule": schedule},
            f"{schedule} has one stage a rank, not 2",
        )
        for schedule in ("gpipe", "1f1b")
    ]
    + [
        Case(
            {"pipeline_parallel_size": 2, "virtual_pipeline_stages": wrong, "pipeline_schedule": schedule},
            {"pipeline_parallel_size": 2, "virtual_pipeline_stages": 2, "pipeline_schedule": schedule},
            f"{schedule} has two .*stages a rank, not {wrong}",
            model={"layers": 12},
        )
        for schedule, wrong in (
            ("zbv_zero_bubble", 1),
            ("zbv_zero_bubble", 3),
            ("interleaved_1f1b", 1),
            ("interleaved_zero_bubble", 1),
        )
    ],
    "interleaving_rounds_divide": [
        Case(
            {"num_gpus": 2, **INTERLEAVED, "pipeline_schedule": schedule, "global_batch_size": wrong},
            {"num_gpus": 2, **INTERLEAVED, "pipeline_schedule": schedule, "global_batch_size": right},
            f"{wrong} microbatches are no whole number of rounds of 2",
        )
        for schedule in ("interleaved_1f1b", "interleaved_zero_bubble")
        for wrong, right in ((5, 4), (7, 6))
    ],
    "zero_bubble_is_not_compiled": [
        Case(
            {"pipeline_parallel_size": 2, "pipeline_schedule": schedule, "virtual_pipeline_stages": 2, "compile": True},
            {
                "pipeline_parallel_size": 2,
                "pipeline_schedule": allowed,
                "virtual_pipeline_stages": 2,
                "compile": compiled,
            },
            "splits the backward pass",
        )
        for schedule in ("interleaved_zero_bubble", "zbv_zero_bubble")
        for allowed, compiled in ((schedule, False), ("interleaved_1f1b", True))
    ],
    "zero_bubble_keeps_no_selection": [
        Case(
            INTERLEAVED | {"pipeline_schedule": schedule, "recompute": "selective"},
            INTERLEAVED | {"pipeline_schedule": allowed, "recompute": recompute},
            f"{schedule} needs twice",
        )
        for schedule in ("interleaved_zero_bubble", "zbv_zero_bubble")
        for allowed, recompute in ((schedule, "full"), ("interleaved_1f1b", "selective"))
    ],
    "experts_compile_no_selection": [
        Case(
            {"engine": engine, "compile": True, "recompute": "selective"},
            {"engine": engine, "compile": compiled, "recompute": recompute},
            "compiled without recomputation or with full, not with selective",
            model={"num_experts": 8},
        )
        for engine in ("megatron", "deepspeed")
        for compiled, recompute in ((True, "full"), (True, "none"), (False, "selective"))
    ],
    "zero_with_pipeline": [
        Case(
            {"pipeline_parallel_size": 2, "zero_stage": stage, "engine": engine},
            {"pipeline_parallel_size": 2, "zero_stage": 1, "engine": engine},
            f"ZeRO-{stage}",
        )
        for stage in (2, 3)
        for engine in ("megatron", "deepspeed")
    ],
    "tied_embeddings_meet": [
        Case(
            INTERLEAVED | {"pipeline_schedule": "zbv_zero_bubble"},
            INTERLEAVED,
            "tied embeddings",
            model={"tie_embeddings": True},
        ),
    ],
    "replicas_divide": [
        Case(
            {"zero_stage": 3, "data_parallel_replicate_size": 3},
            {"zero_stage": 3, "data_parallel_replicate_size": 2},
            "4 data-parallel ranks cannot hold 3 copies",
        ),
        Case(
            {"zero_stage": 3, "data_parallel_replicate_size": 4},
            {"zero_stage": 0},
            "4 copies on 4 ranks leave ZeRO nothing to shard",
        ),
    ],
    "experts_divide": [
        Case({"expert_parallel_size": 2}, {}, "dense model"),
        Case(
            {"expert_parallel_size": 4},
            {"expert_parallel_size": 2},
            "6 experts cannot be spread over 4",
            model=EXPERTS | {"num_experts": 6},
        ),
        Case(
            {"expert_parallel_size": 4, "tensor_parallel_size": 2},
            {"expert_parallel_size": 4, "context_parallel_size": 2},
            "does not divide the 2 ranks",
            model=EXPERTS,
        ),
        Case(
            {"expert_parallel_size": 4, "zero_stage": 3, "data_parallel_replicate_size": 2},
            {"expert_parallel_size": 2, "zero_stage": 3, "data_parallel_replicate_size": 2},
            "does not divide the 2 ranks",
            model=EXPERTS,
        ),
    ],
    "fp8_is_supported": [
        Case({"precision": "fp8"}, {"precision": "bf16"}, "no matrix units"),
        Case({"precision": "fp8", "engine": "deepspeed"}, {"precision": "fp8"}, "megatron engine alone", work=H200),
        Case(
            {"precision": "fp8", "tensor_parallel_size": 2},
            {"precision": "fp8", "context_parallel_size": 2},
            "widths on a GPU",
            work=H200,
        ),
        Case({"precision": "fp8"}, {}, "experts", model=EXPERTS, work=H200),
        Case({"precision": "fp8"}, {}, "multiples of 16", model={"ffn_hidden": 184}, work=H200),
        Case({"precision": "fp8"}, {}, "multiples of 16", model={"head_dim": 20}, work=H200),
        Case(
            {"precision": "fp8", "context_parallel_size": 2},
            {"precision": "fp8", "context_parallel_size": 2, "micro_batch_size": 2},
            "tokens on a GPU",
            work=H200 | {"sequence_length": 16},
        ),
    ],
    "async_tensor_parallel_is_supported": [
        Case(ASYNC, ASYNC | {"async_tensor_parallel": False}, "each other's memory")
    ],
    "megatron_overlaps_no_casts": [
        Case(ASYNC | {"precision": "fp8"}, ASYNC | allowed, "never tried", model={"ffn_hidden": 192}, work=H200)
        for allowed in ({"precision": "bf16"}, {"precision": "fp8", "async_tensor_parallel": False})
    ],
    "segments_expand_on_cuda": [
        Case({"expandable_segments": True}, {}, "NVIDIA's GPUs", work={"accelerator": ACCELERATORS["mi250"]})
    ],
    "power_limit_is_of_the_accelerator": [
        Case({"power_limit_w": 400}, {}, "NVIDIA's GPUs", work={"accelerator": ACCELERATORS["mi250"]}),
        Case(
            {"power_limit_w": 701},
            {"power_limit_w": 700},
            "701 W are more than the 700 W of the accelerator's data sheet",
            work={"accelerator": ACCELERATORS["h200"]},
        ),
    ],
    "rank_order_is_permutation": [
        Case({"rank_order": order}, {"rank_order": (3, 1, 0, 2)}, "each of the 4 workers once")
        for order in ((0, 1, 2, 2), (0, 1, 2), (1, 2, 3, 4))
    ],
    "deepspeed_has_no_such_axis": [
        Case(
            {"engine": "deepspeed", "pipeline_parallel_size": 2, "zero_stage": 1, "pipeline_schedule": "gpipe"},
            {"engine": "deepspeed", "pipeline_parallel_size": 2, "zero_stage": 1},
            "1F1B alone",
        ),
        Case(
            {"engine": "deepspeed", "pipeline_parallel_size": 2, "zero_stage": 1, "stage_layers": (1, 3)},
            {"engine": "deepspeed", "pipeline_parallel_size": 2, "zero_stage": 1},
            "cuts its stages itself",
        ),
        Case(
            {"engine": "deepspeed", "zero_stage": 3, "data_parallel_replicate_size": 2},
            {"engine": "megatron", "zero_stage": 3, "data_parallel_replicate_size": 2},
            "hybrid sharding",
        ),
    ],
    "deepspeed_pipeline_alone": [
        Case(
            {"engine": "deepspeed", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            {"engine": engine, "pipeline_parallel_size": 2} | other,
            "automatic tensor parallelism",
        )
        for engine, other in (
            ("megatron", {"tensor_parallel_size": 2}),
            ("deepspeed", {"context_parallel_size": 2, "zero_stage": 1}),
        )
    ],
    "deepspeed_pipeline_shards_states": [
        Case(
            {"engine": "deepspeed", "pipeline_parallel_size": 2},
            {"engine": "deepspeed", "pipeline_parallel_size": 2} | right,
            "which is ZeRO-1",
        )
        for right in ({"zero_stage": 1}, {"precision": "fp32"}, {"num_gpus": 2})
    ],
    "deepspeed_tensor_parallel_sums_in_place": [
        Case(
            {"engine": "deepspeed", "tensor_parallel_size": 2, "recompute": "selective"},
            {"engine": "deepspeed", "tensor_parallel_size": 2, "recompute": "full"},
            "selective recomputation",
        )
    ],
    "deepspeed_ulysses_heads_divide": [
        Case(
            {"engine": "deepspeed", "context_parallel_size": 4},
            {"engine": engine, "context_parallel_size": size},
            "2 key-value heads out to 4 GPUs",
        )
        for engine, size in (("megatron", 4), ("deepspeed", 2))
    ],
    "deepspeed_experts_alone": [
        Case({"engine": "deepspeed"} | wrong, {"engine": "deepspeed"} | right, reason, model=EXPERTS)
        for wrong, right, reason in (
            ({"zero_stage": 3}, {"zero_stage": 2}, "ZeRO-3"),
            ({"tensor_parallel_size": 2}, {"context_parallel_size": 2}, "neither tensor nor pipeline"),
            ({"pipeline_parallel_size": 2, "zero_stage": 1}, {"zero_stage": 1}, "neither tensor nor pipeline"),
        )
    ]
    + [
        Case(
            {"engine": "deepspeed"},
            {"engine": "megatron"},
            "single expert by its probability",
            model=EXPERTS | {"experts_per_token": 1},
        )
    ],
    "offload_is_supported": [
        Case(
            {"engine": "deepspeed", "offload_optimizer": True, "zero_stage": 0},
            {"engine": "deepspeed", "offload_optimizer": True, "zero_stage": 1},
            "not at stage 0",
        )
    ],
    "memory_fits": [
        Case({"zero_stage": 0}, {"zero_stage": 2}, "needs 143 GiB of 78 GiB: 60 optimizer, 45 parameters", work=BIG),
        Case({}, {"tensor_parallel_size": 2}, "needs .* of 78 GiB", work=BIG | PROXIES),
        Case(
            {"zero_stage": 2, "micro_batch_size": 2, "compile": True},
            {"zero_stage": 2, "micro_batch_size": 2, "compile": True, "recompute": "full"},
            "needs 128 GiB of 78 GiB: 68 activations",
            work=BIG | {"sequence_length": 8192},
        ),
        Case(
            {"engine": "deepspeed", "num_gpus": 1, "zero_stage": 0},
            {"engine": "deepspeed", "num_gpus": 2, "zero_stage": 2, "offload_optimizer": True},
            "needs .* of 78 GiB",
            work=BIG,
        ),
    ],
    "memory_surely_fits": [
        Case(
            {"zero_stage": 2, "compile": True, "micro_batch_size": 2, "recompute": "full"},
            {"zero_stage": 2, "compile": True, "recompute": "full"},
            "borderline: needs 66 GiB of 78 GiB",
            work=BIG | {"sequence_length": 8192, "refuse_borderline": True},
        ),
    ],
}


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == {rule.__name__ for rule in all_rules(ENGINES.values())}


@pytest.mark.parametrize(("rule", "case"), [(rule, case) for rule, cases in CASES.items() for case in cases])
def test_rule(rule: str, case: Case) -> None:
    refused = refusal(replace(BASE, **case.refused), case.workload)
    assert refused is not None
    assert refused[0] == rule
    assert re.search(case.reason, refused[1])
    assert refusal(replace(BASE, **case.allowed), case.workload) is None


def test_memory_is_not_bounded_where_none_is_known() -> None:
    assert refusal(BASE, Workload(PRESETS["gpt3-175b"], 2048, 16)) is None
