"""What the committed reads of an H200 say of its energy counter."""

from __future__ import annotations

import numpy as np

from benchmarks import DATA
from benchmarks.measure.refresh import read_recorded, refreshes, window_errors
from telemetry.devices.nvidia import REFRESH_NS

READS = read_recorded(DATA / "energy_refresh_1xh200.json.xz")


def test_the_counter_is_refreshed_on_a_grid() -> None:
    moments, first = refreshes(READS)
    energy_mj = READS.energy_mj[first]
    assert set(np.diff(moments)) == {REFRESH_NS}
    watts = np.diff(energy_mj) / 1000 / (REFRESH_NS / 1e9)
    assert 500 < watts.min() < watts.max() < 900


def test_windows_are_nearer_the_truth_where_refreshes_are_known() -> None:
    blind, known, instant, average = np.abs(window_errors(READS, 3.0, np.random.default_rng(1))).mean(axis=0)
    assert known < blind / 1.5
    assert known < 0.003
    assert known < average < instant
