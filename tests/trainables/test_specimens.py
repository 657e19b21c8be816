"""Processes that take turns are waited for, but not for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from search_spaces.launches import ROUNDS, specimen_of
from search_spaces.layout import Layout
from search_spaces.network import Collective
from search_spaces.operators import Kind, Operator
from tests.trainables.conftest import RunRanks
from tests.trainables.test_parity import reports
from trainables import specimens
from trainables.measure import Procedure, Step
from trainables.operators import Operators
from trainables.platforms.cpu import PLATFORM as CPU
from trainables.program import Place, Progress, RankReport, TrialRequest
from trainables.slice import Slice
from trainables.training import Training

GATHERING = Operator(Kind.LAUNCH, (), "bf16", False, ("deepspeed", "gpt", "none", "gathers"))
LAUNCH = Operator(Kind.LAUNCH, (), "fp32", False, ("megatron", "llama", "none"))
REQUEST = TrialRequest(
    "turns", Layout("megatron", 1, 1), Operators((), (LAUNCH,), 0.0, 1.0), Procedure(1, 1.0, 1.0, 1.0, 1), 10.0
)


@dataclass(frozen=True)
class Tiny(Slice):
    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        return specimens.SpecimenRank(self, request, place, on_progress).report()


def test_blocks_are_gathered_anew_in_each_microbatch_though_they_are_tiny(run_ranks: RunRanks) -> None:
    """And some of them in its backward pass, too."""
    found = specimen_of(GATHERING)
    training = Training(found.model, "synthetic", found.sequence_length, seed=0)
    tiny = Tiny(training, rank=0, network=specimens.AT_NO_TIME)
    quick = Procedure(steady_steps=1, warmup_tolerance=1.0, warmup_max_s=0.1, window_s=0.0, window_min_steps=2)
    request = TrialRequest("tiny", found.layout, tiny, quick, 100.0, batches=found.batches)
    (report,) = reports(run_ranks(request))
    assert report.slice is not None
    few, many = (
        next(one for one in report.slice.traffic[batch] if one.kind is Collective.ALL_GATHER) for batch in found.batches
    )
    model = found.model
    assert (many.calls - few.calls) / ROUNDS > model.layers
    assert (many.size - few.size) / ROUNDS > 1.2 * 2 * model.layers * model.block_parameters


def started(monkeypatch: pytest.MonkeyPatch, life: Any) -> specimens.Specimen:
    """One whose process lives such a life."""

    def serve(messages: Any, *_: Any) -> None:
        try:
            life(messages)
        finally:
            os._exit(0)

    monkeypatch.setattr(specimens, "_serve", serve)
    return specimens.Specimen(LAUNCH, REQUEST, Place(0, 0, "", 0, CPU))


def answering(messages: Any) -> None:
    messages.send(None)
    for seconds in ((0.1, 0.3), (0.1, 0.2)):
        messages.recv()
        messages.send(seconds)


def test_each_turn_counts_and_an_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one = started(monkeypatch, answering)
    one.hear(time.monotonic() + 10)
    one.take_turn()
    one.take_turn()
    assert one.seconds == [pytest.approx(0.2 / 18), pytest.approx(0.1 / 18)]
    assert one.problem is None
    one.take_turn()
    assert one.problem == "its process has ended"
    one.fork.end()


def test_one_that_says_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one = started(monkeypatch, lambda messages: signal.pause())
    one.hear(time.monotonic() + 0.1)
    assert one.problem is not None
    assert one.problem.startswith("nothing came of it in ")
    one.fork.end()
    with pytest.raises(ProcessLookupError):
        os.kill(one.fork.pid, 0)


def test_one_that_is_ready_has_timed_steps_of_each_batch_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice goes on to have its device wait, which would be in the way of what others time there."""

    class Rank:
        def __init__(self, program: Slice, request: TrialRequest, *_: Any) -> None:
            self.batches, self.timed = request.batches, list[int]()

        def change_batch(self, global_batch_size: int) -> None:
            self.batch = global_batch_size

        def time_steps(self) -> None:
            self.timed.append(self.batch)

        def timed_step(self) -> Step:
            assert tuple(self.timed) == self.batches
            return Step(self.batch / 10, 0)

    monkeypatch.setattr(specimens, "SpecimenRank", Rank)
    one = specimens.Specimen(LAUNCH, REQUEST, Place(0, 0, "", 0, CPU))
    one.hear(time.monotonic() + 60)
    one.take_turn()
    assert (one.problem, one.seconds) == (None, [pytest.approx(0.2 / 18)])
    one.fork.end()
