"""What DeepSpeed's replicas hold, as `search_spaces.replay` has it and as the engine does, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from search_spaces.models import ModelShape
from search_spaces.replay import allocator, training
from search_spaces.replay.replicas import Replicas
from tests.trainables.conftest import RunRanks
from tests.trainables.live_bytes import Counted
from tests.trainables.test_parity import deepspeed, reports, request
from trainables.training import Training

LOGITS = ModelShape("llama", 2, 128, 4, 4, 256, 2048, 32)
"""Whose loss is the fullest moment."""

BLOCKS = ModelShape("llama", 3, 64, 4, 2, 1024, 64, 256)
"""Whose blocks are."""

WEIGHTS = ModelShape("llama", 4, 384, 4, 4, 1024, 64, 32)
"""Whose gradients are, as they are reduced."""

SEQUENCES = 4

FAST = (LOGITS, 1, "full", 2)


def held_in_replay(rank: Replicas) -> int:
    for _ in range(2):
        rank.step()
    return rank.allocator.most


@pytest.fixture
def pieces_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors alone are counted, not what is left of a piece beside them, nor what cuBLAS works in."""
    monkeypatch.setattr(allocator, "SMALL", 2**60)
    monkeypatch.setattr(allocator, "MIDDLE", 0)
    monkeypatch.setattr(training, "WORKSPACE", 0)


@pytest.mark.usefixtures("pieces_fit")
@pytest.mark.parametrize(
    ("model", "tensor", "recompute", "rounds"),
    [
        pytest.param(*case, marks=[] if case == FAST else [pytest.mark.slow])
        for case in product((LOGITS, BLOCKS, WEIGHTS), (1, 2), ("none", "full"), (1, 2))
    ],
)
def test_a_replica_holds_what_is_replayed(
    model: ModelShape, tensor: int, recompute: str, rounds: int, run_ranks: RunRanks
) -> None:
    layout = deepspeed(2 * tensor, tp=tensor, mbs=SEQUENCES, precision="bf16", recompute=recompute)
    layout = replace(layout, global_batch_size=2 * SEQUENCES * rounds)
    trial = request(layout, model)
    assert isinstance(trial.program, Training)
    program = Counted(replace(trial.program, sequence_length=model.max_sequence_length))
    held = held_in_replay(Replicas(model, SEQUENCES * model.max_sequence_length, rounds, layout))
    trial = replace(trial, trial_id=f"{trial.trial_id} {rounds}", program=program)
    for report in reports(run_ranks(trial)):
        assert report.peak_memory_gib is not None
        assert held == pytest.approx(report.peak_memory_gib * 2**30, rel=0.01)
