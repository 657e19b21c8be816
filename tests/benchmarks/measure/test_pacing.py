from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks import DATA, RESULTS
from benchmarks.measure.pacing import late_s, main, slowdowns
from telemetry.sampler import LATE_S

RECORDS = [DATA / f"pacing_2xh200{run}.json" for run in ("", "_earlier")]


def ticks(period_s: float, busy_s: list[float]) -> tuple[list[float], list[float]]:
    """Times of the sampler's ticks, each of which takes so long, and by how much each was late."""
    now_s, tick, times, late = 0.0, 0, [], []
    for seconds in busy_s:
        now_s = max(now_s, tick * period_s)
        times.append(now_s)
        late.append(now_s - tick * period_s)
        now_s += seconds
        tick = max(tick + 1, math.ceil((now_s - LATE_S) / period_s))
    return times, late


@given(
    busy_s=st.lists(st.sampled_from([0.001] * 20 + [0.012, 0.022, 0.15]), min_size=40, max_size=200),
    period_s=st.sampled_from([0.01, 0.02, 0.1, 1.0]),
    first=st.integers(0, 10),
)
def test_ticks_are_as_late_as_the_schedule_says(busy_s: list[float], period_s: float, first: int) -> None:
    times, late = ticks(period_s, busy_s)
    last = max(i for i in range(len(late)) if late[i] < 1e-4)  # one late by more than a period may be a later one
    times, late = times[first : last + 1], late[first : last + 1]
    assume(len(late) > 20 and np.median(late) < 1e-4)  # most ticks tell the schedule
    found = late_s(np.round(np.array(times) * 1e9).astype(np.int64) + 10**15, period_s)
    skipped = round((times[-1] - late[-1] - times[0] + late[0]) / period_s) + 1 - len(times)
    periods_off = (np.array(late) - found[: len(times)]) / period_s
    if period_s > LATE_S:
        assert periods_off == pytest.approx(0, abs=0.01)
        assert found[len(times) :].tolist() == [period_s] * skipped
    else:  # one so late that the next is skipped may be that one
        assert periods_off == pytest.approx(np.round(periods_off), abs=0.01)
        assert periods_off.min() > -0.01


def record(slower: float) -> dict[str, Any]:
    """Four stretches of ten steps of a second, those that are polled slower by this share."""
    rates = (10, 0, 0, 10)
    seconds = [1 + slower if hertz else 1.0 for hertz in rates for _ in range(10)]
    edges = np.round(np.concatenate([[0], np.cumsum(seconds)[9::10]]) * 1e9).astype(int).tolist()
    stretches = [[hertz, start - 1, end + 1] for hertz, start, end in zip(rates, edges[:-1], edges[1:], strict=True)]
    return {"window_start_ns": 0, "step_times_s": seconds, "stretches": stretches}


def test_slowdown_is_of_polled_steps_over_those_beside_them_in_all_runs() -> None:
    assert slowdowns([record(0.01)])[10] == pytest.approx({"slowdown": 0.01, "confidence": 0, "pairs": 2})
    both = slowdowns([record(0.01), record(0.03)])[10]
    assert both["slowdown"] == pytest.approx(0.02)
    assert both["confidence"] == pytest.approx(3.182 * 0.02 / math.sqrt(12), rel=1e-3)


def test_committed_runs_are_shown_again(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(path) for path in RECORDS])
    assert capsys.readouterr().out == (RESULTS / "pacing_2xh200.txt").read_text()


def test_another_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "other.json")])
    assert "other.json is no record of this benchmark" in capsys.readouterr().err
