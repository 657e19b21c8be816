"""Every layout trains the same model: its losses and gradient norms are those of one process in plain torch.

The ranks run as in a search, each in a child of a nursery, with gloo between them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from search_spaces.config import TrialConfig
from search_spaces.models import ModelShape
from tests.trainables.conftest import RunRanks
from trainables.child import Outcome
from trainables.data import SYNTHETIC, open_tokens
from trainables.engines.base import BETAS, GRADIENT_CLIP, WEIGHT_DECAY, learning_rate
from trainables.measure import Protocol
from trainables.model import Parts, Stage, language_model_loss
from trainables.trial import RankReport, TrialRequest

LLAMA = ModelShape("llama", 2, 64, 4, 2, 176, 512, 64)  # four heads share two key-value heads
GPT = ModelShape("gpt", 2, 64, 4, 4, 256, 512, 64, tie_embeddings=True)
SEQUENCE_LENGTH = 32
GLOBAL_BATCH_SIZE = 8
STEPS = 4


def layout(
    engine: str,
    gpus: int,
    *,
    tp: int = 1,
    pp: int = 1,
    zero: int = 0,
    mbs: int = 2,
    sp: bool = False,
    recompute: str = "none",
    precision: str = "fp32",
) -> TrialConfig:
    return TrialConfig(engine, gpus, tp, pp, zero, mbs, GLOBAL_BATCH_SIZE, recompute, sp, False, precision)


@cache
def reference(model: ModelShape) -> tuple[list[float], list[float]]:
    """Losses and gradient norms before clipping of `STEPS` optimizer steps on whole batches."""
    parts = Parts(model, SEQUENCE_LENGTH, seed=0, device=torch.device("cpu"))
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
    name = f"{config.label} {config.precision} {model.family}"
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
DEEPSPEED_2 = [
    *(layout("deepspeed", 2, zero=zero) for zero in range(4)),
    layout("deepspeed", 2, zero=3, mbs=1, recompute="full"),
    layout("deepspeed", 2, tp=2),
    layout("deepspeed", 2, pp=2),
    layout("deepspeed", 2, pp=2, mbs=1, recompute="full"),
]
FOUR = [
    layout("megatron", 4, tp=2, sp=True, zero=3),
    layout("megatron", 4, pp=2, zero=1),
    layout("deepspeed", 4, pp=2, zero=1),
]
FOUR_MORE = [
    layout("megatron", 4, tp=2),
    layout("megatron", 4, tp=2, zero=2, recompute="full"),
    layout("megatron", 4, pp=2),
    layout("megatron", 4, pp=2, tp=2, sp=True),
    *(layout("deepspeed", 4, tp=2, zero=zero) for zero in range(4)),
]
TIED = [
    layout("megatron", 2, zero=3),
    layout("megatron", 2, tp=2, sp=True),
    layout("deepspeed", 2, zero=2),
    layout("deepspeed", 2, tp=2),
]
CASES = [
    *(pytest.param(LLAMA, config, id=f"llama {config.label}") for config in (*MEGATRON_2, *DEEPSPEED_2, *FOUR)),
    *(pytest.param(GPT, config, id=f"gpt {config.label}") for config in TIED),
    *(pytest.param(LLAMA, config, id=f"llama {config.label}", marks=pytest.mark.slow) for config in FOUR_MORE),
]


@pytest.mark.parametrize(("model", "config"), CASES)
def test_layout_trains_as_one_process(model: ModelShape, config: TrialConfig, run_ranks: RunRanks) -> None:
    losses, norms = reference(model)
    for report in reports(run_ranks(request(config, model))):
        assert report.losses == pytest.approx(losses, rel=1e-4)
        if gives_norms(config):
            assert report.grad_norms == pytest.approx(norms, rel=1e-3)
        else:
            assert all(math.isnan(norm) for norm in report.grad_norms)


def gives_norms(config: TrialConfig) -> bool:
    """DeepSpeed clips plain fp32 training with torch's own function and keeps no norm."""
    return config.engine == "megatron" or config.zero_stage > 0


BF16 = [
    layout("megatron", 2, zero=3, precision="bf16"),
    layout("megatron", 2, tp=2, sp=True, precision="bf16"),
    layout("megatron", 2, pp=2, precision="bf16"),
    layout("deepspeed", 2, zero=2, precision="bf16"),
    layout("deepspeed", 2, pp=2, precision="bf16"),
]


@pytest.mark.parametrize("config", BF16, ids=lambda config: config.label)
def test_bf16_trains_nearly_as_fp32(config: TrialConfig, run_ranks: RunRanks) -> None:
    losses, _ = reference(LLAMA)
    for report in reports(run_ranks(request(config, LLAMA))):
        assert report.losses == pytest.approx(losses, rel=5e-3)
        assert report.losses[-1] < report.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_compiled_blocks_train_the_same(engine: str, run_ranks: RunRanks) -> None:
    config = replace(layout(engine, 2, zero=1), compile=True)
    for report in reports(run_ranks(request(config, LLAMA))):
        assert report.losses == pytest.approx(reference(LLAMA)[0], rel=1e-4)
        assert report.timing.compile_s > 0
