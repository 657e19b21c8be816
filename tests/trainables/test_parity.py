"""Every layout trains the same model: its losses and gradient norms are those of one process in plain torch.

The ranks run as in a search, each in a child of a nursery, with gloo between them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from search_spaces.config import BUCKET_SIZE, TrialConfig
from search_spaces.models import ModelShape
from search_spaces.rules import Workload, refusal
from search_spaces.space import enumerate_space
from tests.trainables.conftest import RunRanks
from trainables.child import Outcome
from trainables.data import SYNTHETIC, open_tokens
from trainables.engines.base import BETAS, GRADIENT_CLIP, WEIGHT_DECAY, learning_rate
from trainables.measure import Protocol
from trainables.model import Parts, Stage, language_model_loss
from trainables.trial import RankReport, TrialRequest

LLAMA = ModelShape("llama", 2, 64, 4, 2, 176, 512, 64)  # four heads share two key-value heads
GPT = ModelShape("gpt", 2, 64, 4, 4, 256, 512, 64, tie_embeddings=True)
DEEP = replace(LLAMA, layers=4)
MIXTURE = ModelShape("llama", 4, 64, 4, 2, 96, 512, 64, num_experts=4)
SEQUENCE_LENGTH = 32
GLOBAL_BATCH_SIZE = 8
STEPS = 5


def layout(
    engine: str, gpus: int, *, tp: int = 1, pp: int = 1, zero: int = 0, mbs: int = 2, sp: bool = False, **more: Any
) -> TrialConfig:
    """A layout in fp32 unless said otherwise; `more` are fields of `TrialConfig` by name."""
    return TrialConfig(
        engine,
        gpus,
        GLOBAL_BATCH_SIZE,
        micro_batch_size=mbs,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        zero_stage=zero,
        sequence_parallel=sp,
        **{"precision": "fp32"} | more,
    )


@cache
def reference(model: ModelShape) -> tuple[list[float], list[float]]:
    """Losses and gradient norms before clipping of `STEPS` optimizer steps on whole batches."""
    parts = Parts(model, torch.arange(SEQUENCE_LENGTH), seed=0)
    stage = Stage(parts.embedding(), [parts.block(layer) for layer in range(model.layers)], parts.head())
    if model.tie_embeddings:
        stage.head.output.weight = stage.embedding.tokens.weight  # type: ignore[union-attr]
    rate = learning_rate(model)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    stream = open_tokens(SYNTHETIC, model.vocab)
    losses, norms = [], []
    for step in range(STEPS):
        samples = range(step * GLOBAL_BATCH_SIZE, (step + 1) * GLOBAL_BATCH_SIZE)
        tokens = torch.from_numpy(np.stack([stream.sequence(i, SEQUENCE_LENGTH) for i in samples]))
        optimizer.zero_grad()
        loss = language_model_loss(stage(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(stage.parameters(), GRADIENT_CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def request(config: TrialConfig, model: ModelShape) -> TrialRequest:
    """A trial of `STEPS` optimizer steps: two of warm-up, however they vary, and the rest in the window."""
    protocol = Protocol(
        steady_steps=1, warmup_tolerance=0.5, warmup_max_s=1e-9, window_s=1e-9, window_min_steps=STEPS - 2
    )
    name = f"{config.label} {model}"
    return TrialRequest(name, config, model, SYNTHETIC, SEQUENCE_LENGTH, protocol, deadline_s=200, seed=0)


def reports(outcomes: list[Outcome]) -> list[RankReport]:
    assert [(outcome.status, outcome.cause) for outcome in outcomes] == [("ok", None)] * len(outcomes)
    return [outcome.report for outcome in outcomes if outcome.report is not None]


MEGATRON_2 = [
    *(layout("megatron", 2, zero=zero) for zero in range(4)),
    layout("megatron", 2, zero=3, mbs=1, recompute="full"),
    layout("megatron", 2, tp=2),
    layout("megatron", 2, tp=2, sp=True),
    layout("megatron", 2, pp=2),
    layout("megatron", 2, pp=2, mbs=1, recompute="full"),
]
MEGATRON_4 = [
    layout("megatron", 4, zero=2, data_parallel_replicate_size=2),
    layout("megatron", 4, zero=3, data_parallel_replicate_size=2, mbs=1),
    layout("megatron", 2, context_parallel_size=2, zero=1),
    layout("megatron", 4, context_parallel_size=2, tp=2, sp=True, zero=3, recompute="selective"),
    layout("megatron", 4, context_parallel_size=4, zero=0, recompute="full"),
    layout("megatron", 2, zero=2, mbs=1, overlap_grad_reduce=False, overlap_param_gather=False, recompute="selective"),
]
PIPELINES = [
    layout("megatron", 2, pp=2, pipeline_schedule="gpipe", stage_layers=(3, 1)),
    layout("megatron", 2, pp=2, pipeline_schedule="interleaved_1f1b", virtual_pipeline_stages=2, mbs=1),
    layout("megatron", 2, pp=2, pipeline_schedule="interleaved_zero_bubble", virtual_pipeline_stages=2, mbs=1),
    layout("megatron", 2, pp=2, pipeline_schedule="zbv_zero_bubble", virtual_pipeline_stages=2, mbs=1),
    layout("megatron", 4, pp=2, context_parallel_size=2, zero=1, stage_layers=(1, 3)),
    layout("megatron", 4, pp=4, mbs=1, recompute="selective"),
    layout("megatron", 4, pp=2, tp=2, sp=True, pipeline_schedule="zbv_zero_bubble", virtual_pipeline_stages=2, mbs=1),
    layout(
        "megatron",
        4,
        pp=2,
        zero=1,
        pipeline_schedule="interleaved_zero_bubble",
        virtual_pipeline_stages=2,
        mbs=1,
        recompute="full",
    ),
]
EXPERTS = [
    layout("megatron", 1),
    layout("megatron", 2, zero=1),
    layout("megatron", 2, expert_parallel_size=2),
    layout("megatron", 4, expert_parallel_size=4, zero=2, mbs=1),
    layout("megatron", 4, expert_parallel_size=2, zero=3, recompute="full"),
    layout("megatron", 4, expert_parallel_size=2, zero=2, data_parallel_replicate_size=2, recompute="selective"),
    layout("megatron", 4, expert_parallel_size=2, tp=2, sp=True, zero=1),
    layout("megatron", 4, expert_parallel_size=2, tp=2),
    layout("megatron", 4, expert_parallel_size=2, context_parallel_size=2, zero=3),
    layout("megatron", 4, expert_parallel_size=2, pp=2, zero=1),
    layout("megatron", 4, context_parallel_size=2, tp=2, sp=True),
    layout(
        "megatron",
        4,
        expert_parallel_size=2,
        pp=2,
        pipeline_schedule="zbv_zero_bubble",
        virtual_pipeline_stages=2,
        mbs=1,
    ),
]
NO_OVERLAP: dict[str, Any] = {"overlap_grad_reduce": False, "overlap_param_gather": False}
DEEPSPEED = [
    layout("deepspeed", 1),
    *(layout("deepspeed", 2, zero=zero) for zero in range(4)),
    *(layout("deepspeed", 2, zero=zero, mbs=1, bucket_size=4096, overlap_grad_reduce=False) for zero in (1, 2)),
    layout("deepspeed", 2, zero=3, mbs=1, bucket_size=4096, **NO_OVERLAP),
    *(layout("deepspeed", 2, zero=zero, offload_optimizer=True) for zero in (1, 2, 3)),
    layout("deepspeed", 2, zero=0, recompute="selective"),
    layout("deepspeed", 2, zero=1, recompute="full"),
    layout("deepspeed", 2, zero=2, recompute="selective", mbs=1),
    layout("deepspeed", 2, zero=3, recompute="selective", **NO_OVERLAP),
    layout("deepspeed", 2, zero=3, recompute="full", mbs=1, overlap_grad_reduce=False),
    layout("deepspeed", 2, tp=2),
    layout("deepspeed", 2, tp=2, recompute="full"),
    layout("deepspeed", 2, context_parallel_size=2, recompute="selective"),
    layout("deepspeed", 2, context_parallel_size=2, zero=1),
    layout("deepspeed", 2, context_parallel_size=2, zero=3, recompute="full", overlap_param_gather=False),
    layout("deepspeed", 2, pp=2),
    layout("deepspeed", 2, pp=2, mbs=1, recompute="full"),
    *(layout("deepspeed", 4, tp=2, zero=zero) for zero in range(4)),
    layout("deepspeed", 4, tp=2, zero=2, offload_optimizer=True),
    layout("deepspeed", 4, pp=2),
    layout("deepspeed", 4, pp=2, zero=1, recompute="selective"),
    layout("deepspeed", 4, pp=2, zero=1, offload_optimizer=True),
    layout("deepspeed", 4, pp=2, context_parallel_size=2, zero=1),
    layout("deepspeed", 4, context_parallel_size=2, zero=2),
]
DEEPSPEED_MORE = [
    layout("deepspeed", 2, context_parallel_size=2, zero=3, offload_optimizer=True),
    layout("deepspeed", 4, tp=2, zero=1, recompute="full"),
    layout("deepspeed", 4, tp=2, zero=3, recompute="full"),
    layout("deepspeed", 4, tp=2, zero=3, offload_optimizer=True, bucket_size=4096, **NO_OVERLAP),
    layout("deepspeed", 4, pp=2, context_parallel_size=2),
    layout("deepspeed", 4, context_parallel_size=2, zero=3),
]
DEEPSPEED_TIED = [
    layout("deepspeed", 2, zero=2),
    layout("deepspeed", 2, zero=3),
    layout("deepspeed", 2, tp=2),
    layout("deepspeed", 2, pp=2),
    layout("deepspeed", 4, pp=2, zero=1),
    layout("deepspeed", 4, context_parallel_size=4, zero=2),
    layout("deepspeed", 4, tp=2, context_parallel_size=2, zero=1),
    layout("deepspeed", 4, tp=2, context_parallel_size=2, zero=3),
]
DEEPSPEED_TIED_MORE = [
    layout("deepspeed", 4, tp=2, context_parallel_size=2),
    layout("deepspeed", 4, tp=2, context_parallel_size=2, zero=2, recompute="full"),
    layout("deepspeed", 4, pp=2, context_parallel_size=2, zero=1, offload_optimizer=True),
]
DEEPSPEED_DEEP = layout("deepspeed", 4, pp=4, mbs=1)
DEEPSPEED_EXPERTS = [
    layout("deepspeed", 1),
    *(layout("deepspeed", 2, zero=zero, expert_parallel_size=2) for zero in range(3)),
    layout("deepspeed", 2, zero=1, mbs=1),
    layout("deepspeed", 4, expert_parallel_size=2, mbs=1),
    layout("deepspeed", 4, zero=1, expert_parallel_size=2, mbs=1, recompute="selective"),
    layout("deepspeed", 4, zero=2, expert_parallel_size=2, offload_optimizer=True, recompute="full"),
    layout("deepspeed", 4, zero=2, expert_parallel_size=4, bucket_size=4096, overlap_grad_reduce=False),
    layout("deepspeed", 4, zero=2, expert_parallel_size=2, context_parallel_size=2, recompute="full"),
    layout("deepspeed", 2, expert_parallel_size=2, context_parallel_size=2),
]
FOUR = [
    layout("megatron", 4, tp=2, sp=True, zero=3),
    layout("megatron", 4, pp=2, zero=1),
]
FOUR_MORE = [
    layout("megatron", 4, tp=2),
    layout("megatron", 4, tp=2, zero=2, recompute="full"),
    layout("megatron", 4, pp=2),
    layout("megatron", 4, pp=2, tp=2, sp=True),
]
TIED = [
    layout("megatron", 2, zero=3),
    layout("megatron", 2, tp=2, sp=True),
    layout("megatron", 2, pp=2),
    layout("megatron", 4, pp=2, zero=1),
    layout("megatron", 2, context_parallel_size=2),
]
CASES = [
    *(pytest.param(LLAMA, config, id=f"llama {config.label}") for config in (*MEGATRON_2, *DEEPSPEED, *FOUR)),
    *(pytest.param(LLAMA, config, id=f"llama {config.label}") for config in MEGATRON_4),
    *(pytest.param(DEEP, config, id=f"deep {config.label}") for config in (*PIPELINES, DEEPSPEED_DEEP)),
    *(pytest.param(MIXTURE, config, id=f"mixture {config.label}") for config in EXPERTS),
    *(pytest.param(GPT, config, id=f"gpt {config.label}") for config in (*TIED, *DEEPSPEED_TIED)),
    *(pytest.param(MIXTURE, config, id=f"mixture {config.label}") for config in DEEPSPEED_EXPERTS),
    *(pytest.param(LLAMA, config, id=f"llama {config.label}", marks=pytest.mark.slow) for config in DEEPSPEED_MORE),
    *(pytest.param(GPT, config, id=f"gpt {config.label}", marks=pytest.mark.slow) for config in DEEPSPEED_TIED_MORE),
    *(pytest.param(LLAMA, config, id=f"llama {config.label}", marks=pytest.mark.slow) for config in FOUR_MORE),
]


@pytest.mark.parametrize(("model", "config"), CASES)
def test_layout_trains_as_one_process(model: ModelShape, config: TrialConfig, run_ranks: RunRanks) -> None:
    losses, norms = reference(model)
    for report in reports(run_ranks(request(config, model))):
        assert report.losses == pytest.approx(losses, rel=1e-4)
        assert report.grad_norms == pytest.approx(norms, rel=1e-3)


BF16 = [
    layout("megatron", 2, zero=3, precision="bf16"),
    layout("megatron", 2, tp=2, sp=True, precision="bf16"),
    layout("megatron", 2, pp=2, precision="bf16"),
]
CROWDED = layout(
    "deepspeed", 4, tp=2, context_parallel_size=2, zero=3, recompute="full", bucket_size=4096, **NO_OVERLAP
)
DEEPSPEED_BF16 = [
    (model, replace(config, precision="bf16"))
    for model, config in (
        (LLAMA, layout("deepspeed", 1)),
        (LLAMA, layout("deepspeed", 2, recompute="selective")),
        *((LLAMA, layout("deepspeed", 2, zero=zero, mbs=1)) for zero in (1, 2, 3)),
        *((LLAMA, layout("deepspeed", 2, zero=zero, mbs=1, reduce_precision="bf16")) for zero in range(4)),
        (LLAMA, layout("deepspeed", 2, zero=1, offload_optimizer=True)),
        (LLAMA, layout("deepspeed", 2, zero=2, offload_optimizer=True, recompute="selective", reduce_precision="bf16")),
        (LLAMA, layout("deepspeed", 2, zero=3, offload_optimizer=True)),
        (GPT, layout("deepspeed", 2, tp=2)),
        (LLAMA, layout("deepspeed", 4, tp=2)),
        (LLAMA, layout("deepspeed", 4, tp=2, zero=1)),
        (GPT, replace(CROWDED, reduce_precision="bf16")),
        (GPT, layout("deepspeed", 2, pp=2)),
        (LLAMA, layout("deepspeed", 4, pp=2, zero=1)),
        (GPT, layout("deepspeed", 4, pp=2, zero=1, recompute="selective", bucket_size=4096, reduce_precision="bf16")),
        (LLAMA, layout("deepspeed", 2, context_parallel_size=2, zero=1)),
        *((MIXTURE, layout("deepspeed", 2, expert_parallel_size=2, zero=zero)) for zero in range(3)),
        (MIXTURE, layout("deepspeed", 4, expert_parallel_size=2, zero=1, reduce_precision="bf16")),
    )
]


@pytest.mark.parametrize("config", BF16, ids=lambda config: config.label)
def test_bf16_trains_nearly_as_fp32(config: TrialConfig, run_ranks: RunRanks) -> None:
    losses, _ = reference(LLAMA)
    for report in reports(run_ranks(request(config, LLAMA))):
        assert report.losses == pytest.approx(losses, rel=5e-3)
        assert report.losses[-1] < report.losses[0]


@pytest.mark.parametrize(
    ("model", "config"), [pytest.param(*case, id=f"{case[0].family} {case[1].label}") for case in DEEPSPEED_BF16]
)
def test_bf16_with_fp32_weights_follows_fp32(model: ModelShape, config: TrialConfig, run_ranks: RunRanks) -> None:
    """With optimizer states and weights in fp32, and the very start of fp32 training, only the activations differ."""
    losses, norms = reference(model)
    for report in reports(run_ranks(request(config, model))):
        assert report.losses == pytest.approx(losses, rel=2e-4)
        assert report.grad_norms == pytest.approx(norms, rel=1e-2)


DEEPSPEED_COMPILED = [
    (LLAMA, layout("deepspeed", 2, recompute="selective", precision="bf16", reduce_precision="bf16")),
    (LLAMA, layout("deepspeed", 2, zero=1, recompute="full")),
    (LLAMA, layout("deepspeed", 2, zero=2, offload_optimizer=True, mbs=1)),
    (LLAMA, layout("deepspeed", 2, zero=3)),
    (LLAMA, layout("deepspeed", 2, zero=3, recompute="full", bucket_size=4096, **NO_OVERLAP)),
    (LLAMA, layout("deepspeed", 2, tp=2)),
    (GPT, layout("deepspeed", 2, pp=2, recompute="full")),
    (LLAMA, layout("deepspeed", 2, context_parallel_size=2, zero=1, recompute="selective")),
    (MIXTURE, layout("deepspeed", 2, expert_parallel_size=2, zero=2, recompute="full")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "config"),
    [
        pytest.param(model, replace(config, compile=True), id=f"{model.num_experts} {config.label}")
        for model, config in ((LLAMA, layout("megatron", 2, zero=1)), *DEEPSPEED_COMPILED)
    ],
)
def test_compiled_blocks_train_the_same(model: ModelShape, config: TrialConfig, run_ranks: RunRanks) -> None:
    for report in reports(run_ranks(request(config, model))):
        assert report.losses == pytest.approx(reference(model)[0], rel=1e-4)
        assert report.timing.compile_s > 0


SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size")
AXES: dict[str, list[Any]] = {
    "num_gpus": [1, 2, 4],
    **{size: [1, 2] for size in SIZES},
    "zero_stage": [0, 1, 2, 3],
    "recompute": ["none", "selective", "full"],
    "overlap_grad_reduce": [True, False],
    "overlap_param_gather": [True, False],
    "bucket_size": [BUCKET_SIZE, 4096],
    "offload_optimizer": [False, True],
    "compile": [False, True],
    "precision": ["fp32", "bf16"],
    "reduce_precision": ["fp32", "bf16"],
}


def pairs(model: ModelShape, config: TrialConfig) -> set[tuple[tuple[str, Any], ...]]:
    """What the layout has of each two axes, the kind of model one of them; of sizes, whether there is one to split."""
    shown = {axis: getattr(config, axis) for axis in AXES if axis != "num_gpus"}
    shown |= {size: shown[size] > 1 for size in SIZES} | {"data_parallel": config.data_parallel_size > 1}
    shown["model"] = (model.family, model.num_experts > 0)
    return set(itertools.combinations(sorted(shown.items()), 2))


def test_every_pair_of_values_that_rules_allow_is_covered() -> None:
    """Of what DeepSpeed can do; three models, up to four GPUs."""
    covered: set[tuple[tuple[str, Any], ...]] = set()
    plain: list[Any] = [case.values for case in CASES]
    compiled = [(model, replace(config, compile=True)) for model, config in DEEPSPEED_COMPILED]
    for model, config in (*plain, *DEEPSPEED_BF16, *compiled):
        if config.engine == "deepspeed":
            assert refusal(config, Workload(model, SEQUENCE_LENGTH, GLOBAL_BATCH_SIZE)) is None
            covered |= pairs(model, config)
    allowed: set[tuple[tuple[str, Any], ...]] = set()
    for model in (GPT, replace(LLAMA, kv_heads=4), MIXTURE):
        space = enumerate_space({"engine": ["deepspeed"]} | AXES, Workload(model, SEQUENCE_LENGTH, GLOBAL_BATCH_SIZE))
        for point in space.points:
            allowed |= pairs(model, point)
    assert allowed - covered == set()
