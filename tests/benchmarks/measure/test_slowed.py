"""A slow device is found, named and told why, and none where none is: by far where processors compute, by 2% of GPUs
that repeat as real ones do."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import DATA, SPECS
from benchmarks.measure.slowed import Judged, blames_device, curve, judge, nearest, read, show, while_training
from benchmarks.measure.slowing import Draws
from search_spaces.layout import Layout
from service.result import RankRecord, SlowCause, Straggler
from service.spec import load_spec
from tests.service.trials.test_straggler import BLANK

LAYOUT = Layout("megatron", 2, 2, zero_stage=2)
STEP_S, STEPS, APART, HOST = 0.07, 15, 0.02, 0.001
"""The second GPU is slower by nature by `APART`, and begins later by `HOST` of a step."""


def recorded(draws: Draws, windows: int, noise: float, seed: int = 1) -> dict[str, Any]:
    """What a trial of two GPUs tells whose own time varies by the share `noise` from step to step."""
    chance = random.Random(seed)
    told = []
    for number in range(windows):
        slow, share = draws.drawn(number)
        own: list[list[float]] = [[], []]
        for _ in range(STEPS):
            for rank in range(draws.ranks):
                usual = STEP_S * (1 + APART * rank) * (1 + (share if slow == rank else 0.0))
                own[rank].append(usual * chance.gauss(1, noise) + HOST * STEP_S * chance.gauss(1, 0.5) * rank)
        spans = [0.003 + max(own[rank][i] for rank in range(draws.ranks)) for i in range(STEPS)]
        ranks = []
        for rank in range(draws.ranks):
            own_s, span_s = sum(own[rank]) / STEPS, sum(spans) / STEPS
            times = replace(BLANK, span_s=span_s, compute_s=own_s, exposed_communication_s=span_s - own_s)
            interrupted = share * STEP_S if slow == rank else 0.0
            of_steps = dict.fromkeys(("own_s", "compute_alone_s"), own[rank])
            ranks.append({"breakdown": asdict(times), **of_steps, "interrupted_s": interrupted})
        told.append({"number": number, "seconds": 0.7, "ranks": ranks, "devices": []})
    of = [RankRecord(rank, rank, "node", f"GPU-{rank}", LAYOUT.coordinates(rank), None, None) for rank in (0, 1)]
    return {
        "environment": {},
        "layout": replace(LAYOUT, num_gpus=draws.ranks, global_batch_size=draws.ranks).to_dict(),
        "draws": asdict(draws),
        "ranks": [asdict(one) for one in of[: draws.ranks]],
        "windows": told,
    }


def written(record: dict[str, Any], path: Path) -> None:
    """As a run leaves it."""
    lines = [{name: value for name, value in record.items() if name != "windows"}, *record["windows"]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def shares(judged: list[Judged]) -> tuple[float, float, float]:
    """Of windows with a GPU that is 1.8% slow or more those in which it is named, and with its cause; false alarms."""
    slow = [one for one in judged if one.rank is not None and one.was >= 0.018]
    clean = [one for one in judged if one.rank is None]
    assert len(slow) > 200
    assert len(clean) > 200
    named = [one for one in slow if one.right(lambda each: each.found)]
    why = [one for one in named if one.found is not None and one.found.cause is SlowCause.SHARED]
    return len(named) / len(slow), len(why) / len(slow), sum(one.found is not None for one in clean) / len(clean)


@pytest.mark.parametrize("noise", [0.001, 0.005])
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_per_cent_are_found(ranks: int, noise: float) -> None:
    """Of GPUs that differ by as much by nature, or of one alone."""
    draws = Draws(3, ranks, 0.005, 0.2, 20, 4)
    named, why, alarms = shares(judge(recorded(draws, 700, noise)))
    assert named >= 0.99
    assert why >= 0.95
    assert alarms <= 0.01


@pytest.mark.parametrize(
    ("name", "slowness", "least"),
    [
        ("slowed_1xh200", 0.018, 0.99),
        ("slowed2_1xh200", 0.018, 0.99),
        ("slowed_2xh100", 0.018, 0.99),
        ("slowed2_2xh200", 0.018, 0.99),
        ("slowed_2xh200", 0.025, 0.98),
        ("slowed_2xh200", 0.018, 0.95),
    ],
)
def test_what_was_found_in_recordings_is_found(name: str, slowness: float, least: float) -> None:
    """The detector was made by all but the second and third: this holds what they taught, and what those confirmed.
    Windows of the last are a third as long as usual; 2.5% is what a rank's own time, two thirds of what its GPU loses,
    has as 1.8.
    """
    judged = judge(read(DATA / f"{name}.jsonl.xz"))
    clean = [one for one in judged if one.rank is None]
    assert sum(blames_device(one.found) for one in clean) <= 0.01 * len(clean)
    slow = [one for one in judged if one.rank is not None and one.was >= slowness]
    right = [one for one in slow if one.right(lambda each: each.found)]
    assert len(right) >= least * len(slow)
    assert sum(one.found is not None and one.found.cause is one.cause for one in right) >= 0.95 * len(right)


def test_without_a_history_a_gpu_that_is_slower_by_nature_is_named() -> None:
    judged = judge(recorded(Draws(3, 2, 0.005, 0.2, 20, 4), 200, 0.002))
    clean = [one for one in judged if one.rank is None]
    assert all(one.alone is not None and one.alone.rank == 1 for one in clean)
    assert [one.alone.cause for one in clean if one.alone] == [SlowCause.UNKNOWN] * len(clean)


def test_the_curve_counts_by_what_was_measured() -> None:
    assert [nearest(slowness) for slowness in (0.004, 0.012, 0.016, 0.07, 0.3)] == [None, 0.01, 0.02, 0.05, 0.2]
    judged = judge(recorded(Draws(3, 2, 0.005, 0.2, 20, 4), 300, 0.002))
    rows = curve(judged, lambda one: one.found).splitlines()
    assert len(rows) == 10
    clean = next(one for one in judged if one.rank is None)
    late = Straggler(0, "node", "GPU-0", 0.03, SlowCause.HOST, 0.999)
    blamed = [replace(clean, found=replace(late, cause=cause)) for cause in (SlowCause.HOST, SlowCause.SHARED)]
    assert curve(blamed, lambda one: one.found).splitlines()[2].split() == ["none", "2", "100.0%", "50.0%"]
    assert sum(int(row.split()[1]) for row in rows[2:3]) == sum(one.rank is None for one in judged)


def test_a_run_that_was_cut_off_is_judged_up_to_its_last_whole_line(tmp_path: Path) -> None:
    record, path = recorded(Draws(3, 2, 0.005, 0.2, 20, 4), 60, 0.002), tmp_path / "run.jsonl"
    written(record, path)
    assert judge(read(path)) == judge(record)
    text = path.read_text()
    path.write_text(text[: text.rindex('"seconds"')])
    assert judge(read(path)) == judge({**record, "windows": record["windows"][:-1]})
    written({**record, "windows": record["windows"][:28]}, path)
    with pytest.raises(SystemExit, match="it ends before"):
        read(path)


def test_draws_are_their_seeds_and_hidden_windows_have_clean_ones_among_them() -> None:
    draws = Draws(3, 2, 0.005, 0.2, 20, 4)
    assert draws.first == 28
    assert [draws.calibrated(window) for window in (19, 20, 24, 28)] == [None, 0, 1, None]
    drawn = [draws.drawn(window) for window in range(1000)]
    assert drawn == [draws.drawn(window) for window in range(1000)]
    assert all(one == (None, 0.0) for one in drawn[:28])
    assert 300 < sum(rank is None for rank, _ in drawn[28:]) < 450
    assert all(0.005 <= share <= 0.2 for rank, share in drawn if rank is not None)
    assert draws.drawn(100) != replace(draws, seed=4).drawn(100) or draws.drawn(101) != replace(draws, seed=4).drawn(
        101
    )


@pytest.mark.slow
def test_a_worker_that_is_halted_most_of_the_time_is_found(
    ray_session: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real trial on two workers of CPU, whatever else the machine does. Its windows come while it goes on."""
    draws, path = Draws(0, 2, 3.0, 4.0, 3, 0), tmp_path / "run.jsonl"
    with path.open("w", buffering=1) as file:
        for line in while_training(load_spec(SPECS / "slowed_cpu.yaml").located(), 0.0, draws):
            file.write(json.dumps(line) + "\n")
    record = read(path)
    judged = judge(record)
    slow = [one for one in judged if one.rank is not None]
    assert slow
    right = [one for one in slow if one.right(lambda each: each.alone)]
    assert len(right) >= len(slow) / 2
    assert all(one.alone is not None and one.alone.cause is SlowCause.HOST for one in right)
    show([record])
    assert f"{len(judged)} windows" in capsys.readouterr().out
