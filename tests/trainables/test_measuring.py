"""Kernels are timed while tiny models get ready, which then have nothing to do; whatever fails costs only itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from search_spaces.layout import Layout
from search_spaces.operators import Kind, Operator, OperatorTiming
from trainables import kernels, measuring, specimens
from trainables.forks import Fork
from trainables.measure import Procedure
from trainables.operators import Operators
from trainables.platforms.cpu import PLATFORM as CPU
from trainables.program import Place, Progress, RankReport, TrialRequest

PLACE = Place(0, 0, "", 0, CPU)
SMALL, LARGE, OTHER = (Operator(Kind.PRODUCT, (8, 8, width), "fp32", False) for width in (8, 2**40, 16))
LAUNCH = Operator(Kind.LAUNCH, (), "fp32", False, ("megatron", "llama", "none"))


def report_of(program: Operators, told: list[Progress] | None = None) -> RankReport:
    request = TrialRequest("measuring", Layout("megatron", 1, 1), program, Procedure(1, 1.0, 1.0, 1.0, 1), 10.0)
    return measuring.measure(program, request, PLACE, (told if told is not None else []).append)


def both(*wanted: Operator) -> Operators:
    return Operators(wanted, (LAUNCH,), 60.0, 60.0)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that take no time to get ready."""

    def serve(messages: Connection, *_: Any) -> None:
        messages.send(None)
        while True:
            messages.recv()
            messages.send((0.1, 0.3))

    monkeypatch.setattr(specimens, "_serve", serve)


def test_models_get_ready_while_kernels_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(messages: Connection, *_: Any) -> None:
        time.sleep(2)
        messages.send(None)
        while True:
            messages.recv()
            messages.send((0.1, 0.3))

    def timing(operator: Operator, *_: Any) -> OperatorTiming:
        time.sleep(2)
        return OperatorTiming(operator, 1.0, 2.0)

    monkeypatch.setattr(specimens, "_serve", serve)
    monkeypatch.setattr(kernels, "_timing", timing)
    told: list[Progress] = []
    report = report_of(both(SMALL), told)
    assert [row.operator for row in report.operators] == [SMALL, LAUNCH]
    assert report.operators[1].forward_s == pytest.approx(0.2 / 18)
    assert report.spent_s["kernels"] >= 2
    assert sum(report.spent_s.values()) < 4, "one after the other"
    assert any(progress.report and len(progress.report.operators) == 1 for progress in told), "handed over as it came"


def test_models_do_nothing_while_a_kernel_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that counts gets no further between the first and the last look of what is timed."""

    def serve(messages: Connection, *_: Any) -> None:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            os.pwrite(counted, str(time.monotonic()).encode(), 0)
        messages.send("no more of it")

    def seconds(task: Any, platform: Any) -> float:
        looks = []
        for _ in range(2):
            looks.append(float(os.pread(counted, 40, 0)))
            time.sleep(0.1)
        return 1.0 + looks[1] - looks[0]

    counted = os.memfd_create("counted")
    os.pwrite(counted, b"0", 0)
    monkeypatch.setattr(specimens, "_serve", serve)
    monkeypatch.setattr(kernels, "_seconds", seconds)
    report = report_of(both(SMALL, OTHER))
    assert [(row.forward_s, row.backward_s) for row in report.operators] == [(1.0, 1.0)] * 2
    assert float(os.pread(counted, 40, 0)) > 0
    assert report.problems == (f"{LAUNCH.label}: no more of it",)


def test_what_memory_was_short_for_beside_models_is_measured_once_these_are_gone(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timing(operator: Operator, device: Any, platform: Any, beside: Sequence[Fork], *_: Any) -> OperatorTiming:
        if operator == LARGE and beside:
            raise MemoryError("out of memory")
        return OperatorTiming(operator, 1.0, 2.0)

    monkeypatch.setattr(kernels, "_timing", timing)
    report = report_of(both(LARGE, SMALL))
    assert [row.operator for row in report.operators] == [SMALL, LAUNCH, LARGE]
    assert report.problems == ()


def test_each_process_has_a_share_of_kernels_and_launches(tiny: None) -> None:
    context, gathers = (LAUNCH._replace(form=(*LAUNCH.form, mode)) for mode in ("context", "gathers"))
    first, second, third = Operators((SMALL, OTHER), (LAUNCH, context, gathers), 20.0, 60.0).shares(3)
    assert [row.operator for row in report_of(first).operators] == [SMALL, LAUNCH]
    assert [row.operator for row in report_of(second).operators] == [OTHER, context]
    assert [row.operator for row in report_of(third).operators] == [gathers]


def test_many_processes_have_few_models_get_ready_at_once(tiny: None) -> None:
    (share, *_) = Operators((), (LAUNCH,) * 20_000, 20.0, 1e-9).shares(10_000)
    assert [row.operator for row in report_of(share).operators] == [LAUNCH]


def test_what_is_too_large_for_all_memory_is_told_once(tiny: None) -> None:
    report = report_of(both(LARGE, SMALL))
    assert [row.operator for row in report.operators] == [SMALL, LAUNCH]
    (problem,) = report.problems
    assert problem.startswith(f"{LARGE.label}: measuring: ")


@pytest.mark.parametrize(
    ("what", "said"), [(lambda: os.kill(os.getpid(), signal.SIGKILL), "its process has ended"), (signal.pause, "0 s")]
)
def test_a_kernel_that_ends_or_stops_its_process_costs_no_launches(
    tiny: None, monkeypatch: pytest.MonkeyPatch, what: Any, said: str
) -> None:
    """Though the models were halted for it."""

    def seconds(task: Any, platform: Any) -> float:
        what()
        return 1.0

    monkeypatch.setattr(kernels, "_seconds", seconds)
    monkeypatch.setattr(measuring, "PATIENCE_S", 0.4 if said == "0 s" else 60.0)
    report = report_of(both(SMALL, OTHER))
    assert [row.operator for row in report.operators] == [LAUNCH]
    (problem,) = report.problems
    assert problem.startswith(f"{SMALL.label}: ")
    assert problem.endswith(said)


def test_more_launches_than_get_ready_at_once_come_after_the_others(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "AT_ONCE", 1)
    other = LAUNCH._replace(compiled=True)
    program = Operators((SMALL,), (LAUNCH, other), 60.0, 60.0)
    assert [row.operator for row in report_of(program).operators] == [SMALL, LAUNCH, other]
    late = replace(program, launches_s=1e-9)
    assert [row.operator for row in report_of(late).operators] == [SMALL, LAUNCH]
