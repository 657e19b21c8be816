"""A device that works for others takes longer for products that it has done before, and is waited for."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from trainables import gauge
from trainables.gauge import LASTS_S, ROUNDS, Gauge
from trainables.platforms.base import AHEAD_S
from trainables.platforms.cpu import Cpu

ALONE_S, SHARED_S = 10e-3, 20e-3


class Told(Cpu):
    """A device that takes, for whatever it is given, the seconds that it is told, in turn."""

    def __init__(self, *seconds: float) -> None:
        self.seconds: Iterator[float] = iter(seconds)
        self.asked = 0

    def race(self, first: Callable[[], object], *tasks: Callable[[], object], ahead_s: float = AHEAD_S) -> list[float]:
        self.asked += 1
        return [next(self.seconds) for _ in tasks]


def made(*afterwards: float) -> tuple[Gauge, Told]:
    """A gauge of a device that is alone until then, and takes so many seconds afterwards."""
    device = Told(1.0, LASTS_S, *[ALONE_S] * ROUNDS, *afterwards)
    made = Gauge(device, torch.device("cpu"))
    device.asked = 0
    return made, device


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauge, "WIDTH", 8)


def test_a_device_that_is_alone_is_asked_once() -> None:
    alone, device = made(1.1 * ALONE_S)
    alone.wait()
    assert device.asked == 1


def test_one_that_works_for_others_is_asked_until_it_does_not() -> None:
    shared, device = made(SHARED_S, 3 * ALONE_S, SHARED_S, ALONE_S, ALONE_S)
    shared.wait()
    assert device.asked == 4


def test_one_that_has_become_slower_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauge, "PATIENCE_S", 0.1)
    slower, device = made()
    device.seconds = itertools.repeat(SHARED_S)
    slower.wait()
    assert device.asked > 1


def test_what_it_takes_alone_is_the_least_that_was_seen() -> None:
    """Others may have been there when it was measured first."""
    found, device = made(ALONE_S / 2, ALONE_S, ALONE_S / 2)
    found.wait()
    found.wait()
    assert device.asked == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_that_spins_for_a_process_that_is_halted_is_waited_for() -> None:
    """Seen by a process that has asked for no GPU, as only such a one may be forked."""
    program = [sys.executable, "-m", "tests.trainables.spinning_program"]
    done = subprocess.run(program, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True)
    spinning_s, waited_s = map(float, done.stdout.split())
    assert 0.5 * spinning_s < waited_s < 2 * spinning_s
