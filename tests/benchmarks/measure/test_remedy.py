"""Uneven stages recover what they can where a GPU is slow, and nothing is adopted where none is."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks import SPECS
from benchmarks.measure.remedy import read_windows, show, step_s, table, turns, while_training
from benchmarks.measure.slowing import Draws
from search_spaces.layout import Layout
from search_spaces.placement import layers_by_speed
from service.spec import load_spec

LAYOUT, LAYERS, LAYER_S = Layout("megatron", 2, 4, pipeline_parallel_size=2), 64, 0.0024
SLOW = (0.05, 0.1, 0.2)


def recorded(seed: int, noise: float) -> dict[str, Any]:
    """What a trial tells on two GPUs that are as slow as is asked, whose steps vary by a share."""
    chance = random.Random(seed)
    draws = Draws(0, 2, 0.05, 0.2, 10, 4, turns(SLOW, 4, 20))
    computing = LAYER_S * LAYERS / 2 * LAYOUT.gradient_accumulation_steps
    windows: list[dict[str, Any]] = []
    for number in range(draws.first + len(draws.listed)):
        slow, share = draws.drawn(number)
        times = [1 + (share if slow == rank else 0.0) for rank in (0, 1)]
        seen = [each * chance.gauss(1, noise) for each in times]
        window: dict[str, Any] = {"window": number, "compute_s": [computing * each for each in seen]}
        if number >= draws.first:
            cut = layers_by_speed(LAYERS, [each / min(seen) for each in seen])

            def taken(cut: tuple[int, ...], times: list[float] = times) -> list[float]:
                seconds = step_s(LAYOUT, cut, [LAYER_S * each for each in times])
                return [seconds * chance.gauss(1, noise) for _ in range(6)]

            window["cut"] = cut
            if cut != (32, 32):
                window |= {"plain_s": taken((32, 32)), "other_s": taken(cut)}
                spent = zip(times, cut, (1.0, 1.01), strict=True)
                window["other_compute_s"] = [computing * each * layers / 32 * more for each, layers, more in spent]
        windows.append(window)
    return {
        "environment": {},
        "layout": LAYOUT.to_dict(),
        "layers": LAYERS,
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
            assert one.longer == pytest.approx((1.0, 1.01), abs=0.008)
    show([record])
    assert table(windows) in capsys.readouterr().out


def test_a_step_of_the_schedule() -> None:
    """Two stages of 1F1B: each waits once for the other's share of a microbatch, m + 1 of the slower one's in all."""
    assert step_s(LAYOUT, (32, 32), [1.0, 1.0]) == pytest.approx(32 * (LAYOUT.gradient_accumulation_steps + 1))
    assert step_s(LAYOUT, (31, 33), [1.05, 1.0]) < step_s(LAYOUT, (32, 32), [1.05, 1.0])


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
