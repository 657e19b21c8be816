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
