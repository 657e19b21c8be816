"""What DeepSpeed holds at most, in tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search_spaces.models import ModelShape
from tests.trainables.conftest import RunRanks
from tests.trainables.live_bytes import Counted, MomentsAtStart
from tests.trainables.test_parity import deepspeed, reports, request

MANY_SMALL_PARTS = ModelShape(
    "llama", layers=6, hidden=128, heads=2, kv_heads=2, ffn_hidden=384, vocab=64, max_sequence_length=32
)


@pytest.mark.parametrize("rounds", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_gradients_in_bf16_go_once_they_are_summed(rounds: int, run_ranks: RunRanks) -> None:
    """A parameter has 2 bytes of weights, 4 of master weights, of summed gradients and of either moment: 18."""
    layout = deepspeed(1, mbs=1, precision="bf16", recompute="full")
    trial = request(replace(layout, global_batch_size=rounds), MANY_SMALL_PARTS)
    (report,) = reports(run_ranks(replace(trial, program=Counted(trial.program))))
    assert report.peak_memory_gib is not None
    assert 18 <= report.peak_memory_gib * 2**30 / MANY_SMALL_PARTS.parameters < 19.5


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_moments_are_there_before_there_are_logits(zero: int, run_ranks: RunRanks) -> None:
    """Each of two ranks has 8 bytes for each of its half of the parameters."""
    trial = request(deepspeed(2, zero=zero, mbs=1, precision="bf16"), MANY_SMALL_PARTS)
    watched = replace(trial, program=MomentsAtStart(**vars(trial.program)))
    for report in reports(run_ranks(watched)):
        assert report.peak_memory_gib is not None
        assert report.peak_memory_gib * 2**30 / MANY_SMALL_PARTS.parameters == pytest.approx(8 / 2, rel=0.01)
