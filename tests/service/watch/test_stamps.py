"""What ranks tell of their steps, by the hook itself, and what is made of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest

from service.errors import InputError
from service.watch.stamps import Listener, Ranks, Stamp, parse
from tests.conftest import free_port
from trainables.foreign.steps import HOOK

PROGRAM = """
import sys, time, wattune_steps
for step in range(int(sys.argv[1])):
    time.sleep(0.01)
    wattune_steps.step(loss=1.0, tokens=4096)
"""
FIRST = Stamp(0, 2, "a", 7, None, 1, 10**9, None)


def program(address: str, steps: int = 20, **environment: str) -> subprocess.CompletedProcess[str]:
    """A training that tells a watcher."""
    left = {name: value for name, value in os.environ.items() if name != "WATTUNE_STEPS"}
    around = {"PYTHONPATH": str(HOOK), "WATTUNE_RUN": address, "RANK": "1", "WORLD_SIZE": "2"} | environment
    command = [sys.executable, "-c", PROGRAM, str(steps)]
    return subprocess.run(command, env=left | around, capture_output=True, text=True, check=True)


def heard(ranks: Ranks, *stamps: Stamp) -> list[bool]:
    return [ranks.hear(stamp) for stamp in stamps]


def at(rank: int, step: int, seconds: float, **changes: Any) -> Stamp:
    return replace(FIRST, rank=rank, step=step, ns=round(seconds * 1e9), **changes)


def test_the_hook_tells_who_listens_of_every_step() -> None:
    listener = Listener("127.0.0.1:0")
    program(listener.address)
    stamps = list(listener.until(time.monotonic()))
    listener.close()
    assert [stamp.step for stamp in stamps] == list(range(1, 21))
    assert {(stamp.rank, stamp.world, stamp.device, stamp.tokens) for stamp in stamps} == {(1, 2, None, 4096)}
    assert all(later.ns - earlier.ns >= 10_000_000 for earlier, later in pairwise(stamps))


def test_a_training_goes_on_whoever_listens() -> None:
    assert program(f"127.0.0.1:{free_port()}").stderr == "", "nobody"
    for address in ("nowhere.invalid:7171", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:x"):
        said = program(address, 2).stderr
        assert (said.count("\n"), f"WATTUNE_RUN={address}: no watcher can be told" in said) == (1, True), said
    assert "no watcher can be told" in program("127.0.0.1:7171", 2, RANK="first").stderr


def test_what_is_no_stamp_is_left_alone() -> None:
    good = asdict(FIRST)
    assert parse(json.dumps(good | {"more": 1}).encode()) == FIRST
    wrong: list[Any] = [[], 1, None, {}, good | {"rank": 2}, good | {"rank": -1}, good | {"step": "1"}]
    wrong += [good | {"ns": 1.5}, good | {"ns": True}, good | {"host": None}, good | {"tokens": 0}, good | {"step": 0}]
    wrong += [good | {"world": 10**9}]
    for value in wrong:
        assert parse(json.dumps(value).encode()) is None, value
    for datagram in (b"", b"\xff", b"[" * 4000, json.dumps(good)[:-1].encode()):
        assert parse(datagram) is None


def test_an_address_that_cannot_be_listened_at_is_refused_in_a_line() -> None:
    taken = Listener("127.0.0.1:0")
    for address in ("7171", ":7171", "127.0.0.1:x", "127.0.0.1:99999", taken.address):
        with pytest.raises(InputError, match=r"^listen: '.*' cannot be listened at: [^\n]+$"):
            Listener(address)
    taken.close()


def test_a_step_takes_what_it_takes_on_the_slowest_rank_though_stamps_are_lost() -> None:
    ranks = Ranks()
    assert heard(ranks, at(0, 1, 10.0), at(1, 3, 100.0)) == [True, True]
    assert ranks.pace(5) is None
    assert heard(ranks, at(0, 11, 15.0, tokens=300), at(1, 2, 99.0), at(1, 9, 103.6, tokens=100)) == [False] * 3
    pace = ranks.pace(5)
    assert pace is not None
    assert (pace.steps, pace.step_s, pace.tokens) == (6, pytest.approx(0.6), 200.0)
    assert pace.of_ranks == pytest.approx({0: 0.5, 1: 0.6})
    assert ranks.pace(1) is None, "no step since"


def test_processes_in_the_place_of_others_are_another_run() -> None:
    ranks = Ranks()
    heard(ranks, at(0, 100, 10.0), at(1, 100, 10.0))
    assert heard(ranks, at(0, 1, 50.0, pid=8)) == [True]
    assert [(stamp.rank, stamp.pid) for stamp in ranks.stamps] == [(0, 8)]
    heard(ranks, at(1, 1, 50.0, pid=9), at(0, 6, 51.0, pid=8), at(1, 6, 51.0, pid=9))
    pace = ranks.pace(5)
    assert pace is not None
    assert pace.step_s == pytest.approx(0.2)
    assert heard(ranks, at(2, 1, 60.0, pid=10, world=3)) == [True]
    assert [stamp.rank for stamp in ranks.stamps] == [2], "of more ranks than before"
