"""What DeepSpeed holds at most, in tensors, and what its ZeRO-3 gathers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from search_spaces.models import ModelShape
from search_spaces.replay import gathering
from search_spaces.replay.gathering import Gathering, Module
from search_spaces.replay.shards import GatheredWhole
from tests.trainables.conftest import RunRanks
from tests.trainables.gathers import Gathers
from tests.trainables.live_bytes import Counted, Left, MomentsAtStart
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


def test_experts_leave_nothing_of_what_is_computed_again(run_ranks: RunRanks) -> None:
    """Between two steps there are 18 bytes for each parameter, as above."""
    model = replace(MANY_SMALL_PARTS, hidden=32, ffn_hidden=64, num_experts=4)
    trial = request(deepspeed(1, mbs=4, precision="bf16", recompute="full"), model)
    (report,) = reports(run_ranks(replace(trial, program=Left(trial.program))))
    assert report.peak_memory_gib is not None
    assert 18 <= report.peak_memory_gib * 2**30 / model.parameters < 19


@pytest.mark.slow
def test_the_loss_that_balances_experts_keeps_no_hidden_states(run_ranks: RunRanks) -> None:
    """It has the router's scores, of hidden states in fp32 that the router keeps."""
    model, layout = replace(MANY_SMALL_PARTS, num_experts=4), deepspeed(1, mbs=4, precision="bf16")
    peaks = []
    for weight in (0.02, 0.0):
        trial = request(layout, replace(model, router_aux_loss=weight))
        (report,) = reports(run_ranks(replace(trial, trial_id=f"weight {weight}", program=Counted(trial.program))))
        assert report.peak_memory_gib is not None
        peaks.append(report.peak_memory_gib * 2**30)
    balanced, unbalanced = peaks
    tokens = layout.micro_batch_size * model.max_sequence_length
    assert balanced - unbalanced < 0.5 * 4 * tokens * model.hidden * model.layers


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_moments_are_there_before_there_are_logits(zero: int, run_ranks: RunRanks) -> None:
    """Each of two ranks has 8 bytes for each of its half of the parameters."""
    trial = request(deepspeed(2, zero=zero, mbs=1, precision="bf16"), MANY_SMALL_PARTS)
    watched = replace(trial, program=MomentsAtStart(**vars(trial.program)))
    for report in reports(run_ranks(watched)):
        assert report.peak_memory_gib is not None
        assert report.peak_memory_gib * 2**30 / MANY_SMALL_PARTS.parameters == pytest.approx(8 / 2, rel=0.01)


LLAMA = ModelShape("llama", 6, hidden=384, heads=4, kv_heads=4, ffn_hidden=1024, vocab=512, max_sequence_length=32)
GPT = replace(LLAMA, family="gpt", max_sequence_length=512)
MOST_LIVE, NEAR, AHEAD = 6_000_000, 5_000_000, 2_500_000


class Telling(Gathering):
    """Notes what it gathers together, and lets go of."""

    told: list[list[tuple[str, int]]]

    def _begin(self) -> None:
        super()._begin()
        self.told = [*getattr(self, "told", []), []]

    def _send_for(self, names: Sequence[str]) -> None:
        before = self.live
        super()._send_for(names)
        if self.live > before:
            self.told[-1].append(("gather", self.live - before))

    def let_go(self, module: Module) -> None:
        there = set(self.there)
        super().let_go(module)
        self.told[-1] += [("let go", self.sizes[name]) for name in there - set(self.there)]


def in_short(told: Sequence[Sequence[tuple[str, int]]]) -> list[list[tuple[int, int]]]:
    """Of each microbatch what is gathered each time, with the sum of what is let go of before the next."""
    found: list[list[tuple[int, int]]] = []
    for microbatch in told:
        found.append([(0, 0)])
        for what, count in microbatch:
            gathered, gone = found[-1][-1]
            if what == "gather":
                found[-1].append((count, 0))
            else:
                found[-1][-1] = (gathered, gone + count)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("model", "recompute"), itertools.product((GPT, LLAMA), ("full", "none")))
def test_zero_3_gathers_as_is_replayed(
    model: ModelShape, recompute: str, run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first microbatch module by module, then ahead; in the second with what is small, in later ones without."""
    layout = deepspeed(2, zero=3, mbs=1, precision="bf16", recompute=recompute)
    layout = replace(layout, bucket_size=AHEAD, global_batch_size=2 * 3)
    trial = request(layout, model)
    program = Gathers(**vars(trial.program), folder=str(tmp_path), most_live=MOST_LIVE, near=NEAR)
    reports(run_ranks(replace(trial, program=program)))
    rounds = layout.gradient_accumulation_steps
    told = in_short(json.loads((tmp_path / "0.json").read_text())[: rounds + 2])

    monkeypatch.setattr(gathering, "MOST_LIVE", MOST_LIVE)
    monkeypatch.setattr(gathering, "NEAR", NEAR)
    monkeypatch.setattr("search_spaces.replay.shards.Gathering", Telling)
    training = GatheredWhole(model, 32, rounds, layout)
    for _ in range(2):
        training.step()
    assert isinstance(training.gathered, Telling)
    replayed = in_short(training.gathered.told[: rounds + 2])
    assert len(told) == rounds + 2
    # What is let go of for the next step, DeepSpeed does after its last microbatch.
    assert [one[:-1] for one in replayed] == [one[:-1] for one in told]
