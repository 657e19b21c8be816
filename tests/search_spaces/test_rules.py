"""Each rule refuses what it is there for, with its reason, and lets the nearest legal layout pass."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.models import PRESETS
from search_spaces.rules import RULES, Workload, refusal

BASE = TrialConfig("megatron", 4, 1, 1, 0, 1, 16, "none", False, False, "bf16")
WORK = Workload(PRESETS["tiny-llama"], 128, 16)


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
        return replace(work, model=replace(work.model, **self.model))


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
            {"tensor_parallel_size": 2, "sequence_parallel": True},
            {"tensor_parallel_size": 2},
            "sequence of 129",
            work={"sequence_length": 129},
        )
    ],
    "layers_divide": [
        Case({"pipeline_parallel_size": 2}, {}, "3 layers .* 2 stages", model={"layers": 3}),
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
    "zero_with_pipeline": [
        Case(
            {"pipeline_parallel_size": 2, "zero_stage": stage, "engine": engine},
            {"pipeline_parallel_size": 2, "zero_stage": 1, "engine": engine},
            f"ZeRO-{stage}",
        )
        for stage in (2, 3)
        for engine in ("megatron", "deepspeed")
    ],
    "tied_embeddings_in_one_stage": [
        Case({"pipeline_parallel_size": 2}, {}, "tied embeddings", model={"tie_embeddings": True}),
    ],
    "deepspeed_pipeline_alone": [
        Case(
            {"engine": "deepspeed", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            {"engine": engine, "tensor_parallel_size": 2, "pipeline_parallel_size": stages},
            "pipeline module",
        )
        for engine, stages in (("megatron", 2), ("deepspeed", 1))
    ],
    "states_fit": [
        Case(
            {"zero_stage": 0},
            {"zero_stage": 1},
            "need 120 GiB of 80 GiB",
            work={"model": PRESETS["llama3-8b"], "memory_gib": 80.0},
        )
    ],
}


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(("rule", "case"), [(rule, case) for rule, cases in CASES.items() for case in cases])
def test_rule(rule: str, case: Case) -> None:
    refused = refusal(replace(BASE, **case.refused), case.workload)
    assert refused is not None
    assert refused[0] == rule
    assert re.search(case.reason, refused[1])
    assert refusal(replace(BASE, **case.allowed), case.workload) is None


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_as_in_the_zero_paper(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: memory a GPU of a model of 7.5 billion parameters on 64 GPUs."""
    model = PRESETS["llama3-8b"]
    needed_gib = gigabytes * 1e9 / 2**30 * model.parameters / 7.5e9
    config = replace(BASE, num_gpus=64, zero_stage=stage, global_batch_size=64)
    work = Workload(model, 2048, 64)
    assert refusal(config, replace(work, memory_gib=needed_gib * 1.03)) is None
    refused = refusal(config, replace(work, memory_gib=needed_gib * 0.97))
    assert refused is not None
    assert refused[0] == "states_fit"


def test_model_states_are_split_by_tensor_and_pipeline_parallelism() -> None:
    """Llama-3-70B at 16 bytes a parameter: 80 GiB hold a sixteenth of it (66 GiB), not an eighth (131 GiB)."""
    work = Workload(PRESETS["llama3-70b"], 2048, 16, memory_gib=80.0)
    eight = replace(BASE, num_gpus=8, tensor_parallel_size=4, pipeline_parallel_size=2)
    sixteen = replace(BASE, num_gpus=16, tensor_parallel_size=8, pipeline_parallel_size=2)
    assert (refusal(eight, work) or ("",))[0] == "states_fit"
    assert refusal(sixteen, work) is None


def test_memory_is_not_bounded_where_none_is_known() -> None:
    assert refusal(BASE, Workload(PRESETS["gpt3-175b"], 2048, 16)) is None
