"""Uneven stages recover what they can where a GPU is slow, and nothing is adopted where none is."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from benchmarks import SPECS
from benchmarks.measure.remedy import read_windows, show, table, turns, while_training
from benchmarks.measure.slowing import Draws
from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from search_spaces.placement import layers_by_passes, step_by_cut
from search_spaces.schedules import Pass, PassTime
from service.spec import load_spec

LAYOUT = Layout("megatron", 2, 4, pipeline_parallel_size=2)
SHAPE = replace(PRESETS["llama3-1b"], layers=64, vocab=1024)
FORWARD_S, BACKWARD_S, REST_S = 0.08, 0.25, 0.03
SLOW = (0.05, 0.1, 0.2)


def passes_of(times: Sequence[float], cut: tuple[int, int] = (32, 32)) -> list[list[PassTime]]:
    """Of two ranks, of which each takes so many times as long as usual."""
    return [
        [
            PassTime(rank, Pass.FORWARD, 1.05 * FORWARD_S * more, FORWARD_S * more),
            PassTime(rank, Pass.BACKWARD, 0.98 * BACKWARD_S * more, BACKWARD_S * more),
        ]
        for rank, (longer, layers) in enumerate(zip(times, cut, strict=True))
        for more in [longer * layers / 32]
    ]


def flat(passes: list[list[PassTime]]) -> list[PassTime]:
    return [one for of_rank in passes for one in of_rank]


def recorded(seed: int, noise: float) -> dict[str, Any]:
    """What a trial tells on two GPUs that are as slow as is asked, whose steps vary by a share."""
    chance = random.Random(seed)
    draws = Draws(0, 2, 0.05, 0.2, 10, 4, turns(SLOW, 4, 20))
    windows: list[dict[str, Any]] = []
    for number in range(draws.first + len(draws.listed)):
        slow, share = draws.drawn(number)
        times = [1 + (share if slow == rank else 0.0) for rank in (0, 1)]
        passes = passes_of([each * chance.gauss(1, noise) for each in times])
        window: dict[str, Any] = {"window": number, "passes": passes}
        if number >= draws.first:
            window["cut"] = cut = layers_by_passes(LAYOUT, SHAPE, flat(passes))
            step_s = step_by_cut(LAYOUT, SHAPE, flat(passes_of(times)))

            def taken(cut: tuple[int, ...], seconds: float) -> list[list[float]]:
                return [[seconds * chance.gauss(1, noise) for _ in range(2)] for _ in range(6)]

            if cut != (32, 32):
                window |= {
                    "plain_s": taken((32, 32), step_s((32, 32)) + REST_S),
                    "other_s": taken(cut, step_s(cut) + REST_S),
                }
                window["plain_passes"] = passes_of(times)
                window["other_passes"] = passes_of([times[0], 1.01 * times[1]], (cut[0], cut[1]))
        windows.append(window)
    return {
        "environment": {},
        "layout": LAYOUT.to_dict(),
        "shape": asdict(SHAPE),
        "draws": asdict(draws),
        "windows": windows,
    }


def test_what_can_be_recovered_is_and_nothing_is_adopted_without_need(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(json.dumps(recorded(1, 0.002)))
    windows = read_windows(record)
    assert len(windows) == 32
    for share in SLOW:
        those = [one for one in windows if one.meant == share]
        assert {one.rank for one in those} == {0, 1}
        kept = sum(one.saves for one in those if one.adopted)
        assert kept >= 0.8 * sum(one.theory for one in those) > 0
    calm = [one for one in windows if one.rank is None]
    assert len(calm) == 20
    assert sum(one.adopted for one in calm) <= 1
    assert all(one.foretold <= one.theory + 1e-9 for one in windows)
    for one in windows:
        if one.measured is not None:
            assert one.longer == pytest.approx((1.0, 1.01), abs=1e-9)
    show([record])
    assert table(windows) in capsys.readouterr().out


def test_calm_windows_lie_between_the_others() -> None:
    listed = turns(SLOW, 4, 20)
    assert sum(rank is None for rank, _ in listed) == 20
    assert [listed.count((rank, share)) for share in SLOW for rank in (0, 1)] == [2] * 6
    assert max(len(run) for run in "".join("." if rank is None else "x" for rank, _ in listed).split(".")) <= 2


@pytest.mark.slow
def test_a_worker_that_is_halted_half_of_the_time_gets_fewer_layers() -> None:
    """A real trial on two workers of CPU, whatever else the machine does."""
    draws = Draws(0, 2, 3.0, 3.0, 4, 0, turns([3.0], 4, 1))
    record = while_training(load_spec(SPECS / "remedy_cpu.yaml").located(), draws, 3, 600.0)
    slow = [one for one in read_windows(json.loads(json.dumps(record))) if one.rank is not None]
    assert len(slow) == 4
    right = [one for one in slow if one.rank is not None and one.cut[one.rank] < 6]
    assert len(right) >= 3
