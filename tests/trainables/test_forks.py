"""Processes that are halted do nothing, with what they started; how one ended is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from trainables.forks import Fork, halted

Started = Callable[[Callable[[Connection], None]], Fork]


@pytest.fixture
def started() -> Iterator[Started]:
    forks: list[Fork] = []

    def start(life: Callable[[Connection], None]) -> Fork:
        forks.append(Fork(life))
        return forks[-1]

    yield start
    for fork in forks:
        fork.end()


def counting(messages: Connection) -> None:
    while True:
        messages.recv()
        messages.send("here")


def test_one_that_is_halted_answers_once_it_goes_on(started: Started) -> None:
    forks = [started(counting), started(counting)]
    with halted(forks):
        for fork in forks:
            fork.tell(None)
        assert forks[0].hear(0.2) == "nothing came of it in 0 s"
        assert not forks[1].messages.poll()
    assert [fork.hear(10) for fork in forks] == ["here", "here"]


def test_what_it_started_is_halted_and_ends_with_it(started: Started) -> None:
    def life(messages: Connection) -> None:
        messages.send(subprocess.Popen(["sleep", "60"]).pid)
        signal.pause()

    fork = started(life)
    pid = fork.hear(10)
    with halted([fork]):
        assert comes_to(pid, "T")
    assert comes_to(pid, "S")
    fork.signal(signal.SIGKILL)
    assert comes_to(pid, None, "Z")


def comes_to(pid: int, *states: str | None) -> bool:
    """Whether a process is in one of these states before long; None if there is no such process any more."""
    until = time.monotonic() + 10
    while state(pid) not in states and time.monotonic() < until:
        time.sleep(0.01)
    return state(pid) in states


def state(pid: int) -> str | None:
    """As `proc(5)` has it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


def test_its_last_word_is_why_it_ended(started: Started) -> None:
    def failing(messages: Connection) -> None:
        raise ValueError("no such thing")

    assert started(failing).hear(10) == "measuring: ValueError: no such thing"
    assert started(lambda messages: os.kill(os.getpid(), signal.SIGKILL)).hear(10) == "its process has ended"
    gone = started(lambda messages: None)
    assert gone.hear(10) == "its process has ended"
    with halted([gone]):
        gone.tell(None)
