"""Processes that take turns are waited for, but not for ever."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from search_spaces.layout import Layout
from search_spaces.operators import Kind, Operator
from trainables import specimens
from trainables.measure import Procedure
from trainables.operators import Operators
from trainables.platforms.cpu import PLATFORM as CPU
from trainables.program import Place, TrialRequest
from trainables.slice import Slice

LAUNCH = Operator(Kind.LAUNCH, (), "fp32", False, ("megatron", "llama", "none"))
REQUEST = TrialRequest(
    "turns", Layout("megatron", 1, 1), Operators((), (LAUNCH,), 0.0, 1.0), Procedure(1, 1.0, 1.0, 1.0, 1), 10.0
)


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

        def timed_step(self) -> tuple[float, int]:
            assert tuple(self.timed) == self.batches
            return self.batch / 10, 0

    monkeypatch.setattr(specimens, "SliceRank", Rank)
    one = specimens.Specimen(LAUNCH, REQUEST, Place(0, 0, "", 0, CPU))
    one.hear(time.monotonic() + 60)
    one.take_turn()
    assert (one.problem, one.seconds) == (None, [pytest.approx(0.2 / 18)])
    one.fork.end()
