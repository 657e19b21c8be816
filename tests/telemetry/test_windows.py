from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from telemetry.counters import MAX_DEVICE_W
from telemetry.devices import DeviceInfo
from telemetry.samples import SCHEMA
from telemetry.windows.trial import WindowSummary, combine, summarise

SECOND = 1_000_000_000
ORIGIN = 5_000_000 * SECOND  # two months of uptime


def table(rows: Sequence[dict[str, Any]], device: str = "GPU-a", **constant: Any) -> pa.Table:
    common = {"node": "n", "device": device, "kind": "nvidia", "energy_method": "counter"} | constant
    known = {name for row in rows for name in row}
    return pa.Table.from_arrays(  # column by column: with these hundreds of times, rows take too long
        [
            pa.array([row.get(field.name) for row in rows], field.type)
            if field.name in known
            else pa.repeat(pa.scalar(common.get(field.name), field.type), len(rows))
            for field in SCHEMA
        ],
        schema=SCHEMA,
    )


def ticks(start_s: float, end_s: float, period_s: float = 0.1) -> list[float]:
    return [start_s + number * period_s for number in range(round((end_s - start_s) / period_s) + 1)]


def at(seconds: float) -> int:
    return ORIGIN + round(seconds * SECOND)


def ramp(device: str = "GPU-a", watts: float = 500.0, **columns: Any) -> pa.Table:
    """Ten seconds and one more on each side at a constant power."""
    return table(
        [
            {"time_ns": at(s), "energy_mj": round(7e9 + watts * 1000 * (s + 1)), "power_w": watts} | columns
            for s in ticks(-1, 11)
        ],
        device,
    )


def test_edges_between_ticks_of_a_ramp_are_exact() -> None:
    summary = summarise(ramp(), at(0.033), at(9.871), ["GPU-a"])
    assert summary.energy_j == pytest.approx(500 * (9.871 - 0.033), abs=1e-3)
    assert summary.mean_power_w == pytest.approx(500, rel=1e-6)
    assert (summary.energy_method, summary.problems) == ("counter", ())


@given(
    gaps=st.lists(st.floats(0.001, 0.9), min_size=30, max_size=60),
    watts=st.floats(1, 2000),
    edges=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
)
def test_a_ramp_is_exact_however_unevenly_it_is_sampled(
    gaps: list[float], watts: float, edges: tuple[float, float]
) -> None:
    times = np.cumsum(gaps)
    rows = table([{"time_ns": at(s), "energy_mj": round(1e9 + watts * 1000 * s)} for s in times])
    inner = (times[1], times[-1])  # the first reading's age is unknown
    start, end = (inner[0] + share * (inner[1] - inner[0]) for share in sorted(edges))
    if at(end) - at(start) < SECOND // 100:
        return
    energy = summarise(rows, at(start), at(end), ["GPU-a"]).energy_j
    assert energy == pytest.approx(watts * (end - start), abs=0.003 + watts * 1e-8)


@given(period_s=st.floats(0.013, 0.1), phase_s=st.floats(0.0, 0.1), start=st.floats(0.0, 0.5), end=st.floats(5.0, 5.5))
def test_repeated_counter_values_are_no_fresh_ticks(period_s: float, phase_s: float, start: float, end: float) -> None:
    """A counter that moves each 100 ms, polled faster: a tick is seen at most one poll late."""
    watts = 700.0
    rows = table(
        [
            {"time_ns": at(s), "energy_mj": round(watts * 100 * ((s + 1.5 + phase_s) // 0.1))}
            for s in ticks(-1, 6.5, period_s)
        ]
    )
    energy = summarise(rows, at(start), at(end), ["GPU-a"]).energy_j
    assert energy == pytest.approx(watts * (end - start), abs=watts * (period_s + 1e-6))


def test_taking_repeats_for_ticks_would_be_wrong() -> None:
    """An edge just before a refresh: the last repeat holds energy that is 90 ms old."""
    rows = table([{"time_ns": at(s), "energy_mj": 70_000 * (round(100 * (s + 1)) // 10)} for s in ticks(-1, 11, 0.01)])
    energy = summarise(rows, at(0.099), at(10.0), ["GPU-a"]).energy_j
    assert energy == pytest.approx(700 * 9.901, abs=700 * 0.011)


@given(
    where=st.integers(11, 110),
    rest=st.integers(0, 2**32 - 1),
    column=st.sampled_from(["energy_mj", "throttle_sw_thermal_ns", "throttle_power_cap_ns"]),
)
def test_a_counter_that_loses_its_past_gives_none_and_says_so(where: int, rest: int, column: str) -> None:
    """From tick `where` on the counter goes on from `rest`: 0 for a reset or a 32-bit wrap, more for other losses."""
    step = 10_000_000
    base = 2**32 - where * step
    rest = min(rest, 2**32 - step - 1)
    rows = [
        {"time_ns": at(s), column: base + number * step if number < where else rest + (number - where) * step}
        for number, s in enumerate(ticks(-1, 11))
    ]
    summary = summarise(table(rows), at(0), at(10), ["GPU-a"])
    metric = {
        "energy_mj": "mean_power_w",
        "throttle_sw_thermal_ns": "throttle_ratio",
        "throttle_power_cap_ns": "power_cap_ratio",
    }[column]
    assert summary.metrics()[metric] is None
    assert metric not in summary.methods()
    assert len(summary.problems) == 1
    assert summary.problems[0].startswith("GPU-a: ")
    assert summary.problems[0].endswith(f"{column} went backwards")


@pytest.mark.parametrize(
    ("start", "end", "complaint"),
    [(-1.5, 5, "before the window"), (0, 11.5, "after the window")],
)
def test_a_window_that_the_samples_do_not_span_has_no_energy(start: float, end: float, complaint: str) -> None:
    summary = summarise(ramp(), at(start), at(end), ["GPU-a"])
    assert summary.energy_j is None
    assert summary.mean_power_w is None
    assert complaint in summary.problems[0]


def test_a_gap_at_an_edge_is_refused_and_one_inside_is_not() -> None:
    def without(start: float, end: float) -> pa.Table:
        return table(
            [
                {"time_ns": at(s), "energy_mj": round(7e9 + 500_000 * (s + 1))}
                for s in ticks(-1, 11)
                if not start < s < end
            ]
        )

    assert summarise(without(3, 6), at(0), at(10), ["GPU-a"]).energy_j == pytest.approx(5000)
    summary = summarise(without(8.95, 10.55), at(0), at(10), ["GPU-a"])
    assert summary.energy_j is None
    assert summary.problems == ("GPU-a: energy_mj was read 1.7 s apart around an edge, without the power in between",)


def test_a_counter_that_stands_still_gives_no_energy() -> None:
    rows = table([{"time_ns": at(s), "energy_mj": 123_456} for s in ticks(-1, 11)])
    assert summarise(rows, at(0), at(10), ["GPU-a"]).energy_j is None


def test_power_is_integrated_where_there_is_no_counter() -> None:
    rows = table([{"time_ns": at(s), "power_w": 100 + 10 * s} for s in ticks(-1, 11)])
    summary = summarise(rows, at(0.05), at(9.95), ["GPU-a"])
    assert summary.energy_j == pytest.approx(100 * 9.9 + 5 * (9.95**2 - 0.05**2))
    assert summary.energy_method == "integrated"
    assert summary.methods()["mean_power_w"] == "integrated"
    assert summary.peak_power_w == pytest.approx(199)


def test_a_gap_in_power_is_refused() -> None:
    rows = table([{"time_ns": at(s), "power_w": 100.0} for s in ticks(-1, 11) if not 4 < s < 6])
    summary = summarise(rows, at(0), at(10), ["GPU-a"])
    assert summary.energy_j is None
    assert summary.problems == ("GPU-a: power_w was not read for 2.0 s in the window",)


def test_neither_counter_nor_power_is_none_without_a_complaint() -> None:
    summary = summarise(
        table([{"time_ns": at(s), "gpu_temp_c": 60.0} for s in ticks(-1, 11)]), at(0), at(10), ["GPU-a"]
    )
    assert (summary.energy_j, summary.problems, summary.peak_gpu_temp_c) == (None, (), 60.0)
    assert all(value is None for value in summary.throttle_s.values())
    assert summary.throttle_ratio is None


def test_estimates_stay_labelled() -> None:
    rows = table(
        [{"time_ns": at(s), "energy_mj": round(1e6 + 1000 * s), "power_w": 1.0} for s in ticks(-1, 11)],
        device="cpu:host",
        kind="cpu",
        energy_method="estimated",
    )
    summary = summarise(rows, at(0), at(10), ["cpu:host", "cpu:host"])
    assert summary.energy_j == pytest.approx(10.0, abs=2e-3)  # counted once
    assert summary.energy_method == "estimated"
    assert summary.methods() == dict.fromkeys(("mean_power_w", "peak_power_w", "power_spread_w"), "estimated")
    both = combine([summary, summarise(ramp(), at(0), at(10), ["GPU-a"])])
    assert both.energy_method == "estimated"


def test_throttle_seconds_bounds_and_ratios() -> None:
    def throttled(device: str, sw: float, hw: float, cap: float) -> pa.Table:
        return table(
            [
                {
                    "time_ns": at(s),
                    "throttle_sw_thermal_ns": round(SECOND * (9 + sw * s)),
                    "throttle_hw_thermal_ns": round(SECOND * (9 + hw * s)),
                    "throttle_power_cap_ns": round(SECOND * (9 + cap * s)),
                }
                for s in ticks(-1, 11)
            ],
            device,
        )

    rows = pa.concat_tables([throttled("GPU-a", 0.3, 0.1, 1.0), throttled("GPU-b", 0.9, 0.6, 0.0)])
    summary = summarise(rows, at(0.05), at(10.05), ["GPU-a", "GPU-b"])
    assert summary.throttle_s["sw_thermal"] == pytest.approx(12)
    assert summary.throttle_s["hw_thermal"] == pytest.approx(7)
    assert summary.throttle_s["hw_brake"] is None
    assert summary.thermal_throttle_s == pytest.approx((12, 14))  # GPU-b: 9 to min(15, 10)
    assert summary.throttle_time_s == pytest.approx(12)
    assert summary.throttle_ratio == pytest.approx(0.6)
    assert summary.power_cap_ratio == pytest.approx(0.5)
    assert summary.methods()["throttle_ratio"] == "counter"


def test_no_throttling_is_zero_and_not_unknown() -> None:
    rows = table([{"time_ns": at(s), "throttle_sw_thermal_ns": 42, "throttle_hw_thermal_ns": 0} for s in ticks(-1, 11)])
    assert summarise(rows, at(0), at(10), ["GPU-a"]).throttle_ratio == 0.0


def test_a_throttle_counter_faster_than_time_is_refused() -> None:
    rows = table([{"time_ns": at(s), "throttle_sw_thermal_ns": round((s + 1) * 2e9)} for s in ticks(-1, 11)])
    summary = summarise(rows, at(0), at(10), ["GPU-a"])
    assert summary.throttle_ratio is None
    assert "faster than time" in summary.problems[0]


def test_one_refused_thermal_counter_leaves_no_thermal_bounds() -> None:
    rows = table(
        [
            {"time_ns": at(s), "throttle_sw_thermal_ns": 0 if s > 5 else 10, "throttle_hw_thermal_ns": 0}
            for s in ticks(-1, 11)
        ]
    )
    summary = summarise(rows, at(0), at(10), ["GPU-a"])
    assert summary.throttle_s["hw_thermal"] == 0.0
    assert summary.throttle_ratio is None


def test_clocks_temperatures_and_peak_power_over_devices() -> None:
    """Devices are read one after the other; the peak is that of the sum, not the sum of the peaks."""
    rows = pa.concat_tables(
        [
            table(
                [
                    {
                        "time_ns": at(s + late),
                        "power_w": base + sign * 10 * s,
                        "sm_clock_mhz": clock,
                        "gpu_temp_c": temperature + (s > 9),
                        "hbm_temp_c": temperature + 20,
                    }
                    for s in ticks(-1, 11)
                ],
                device,
            )
            for device, late, base, sign, clock, temperature in [
                ("GPU-a", 0.0, 100, 1, 1400.0, 60.0),
                ("GPU-b", 0.004, 300, -1, 1600.0, 70.0),
            ]
        ]
    )
    summary = summarise(rows, at(0), at(8), ["GPU-a", "GPU-b"])
    assert summary.peak_power_w == pytest.approx(400, abs=0.1)
    assert summary.mean_sm_clock_mhz == pytest.approx(1500)
    assert summary.peak_gpu_temp_c == 70
    assert summary.peak_hbm_temp_c == 90
    assert summary.gpu_temp_spread_c == pytest.approx(10)
    assert summary.sample_count == 81 + 80


def test_a_device_without_samples_makes_the_totals_unknown() -> None:
    summary = summarise(ramp(), at(0), at(10), ["GPU-a", "GPU-gone"])
    assert summary.energy_by_device_j == {"GPU-a": pytest.approx(5000), "GPU-gone": None}
    assert summary.energy_j is None
    assert summary.energy_method is None
    assert summary.peak_power_w is None
    assert summary.problems == ("GPU-gone: has no readings in the window",)


def test_combined_nodes_add_energy_and_weigh_ratios_by_device_seconds() -> None:
    def node(device: str, seconds: float, cap: float) -> WindowSummary:
        rows = table(
            [
                {
                    "time_ns": at(s),
                    "energy_mj": round(1e6 + 600_000 * s),
                    "power_w": 600.0,
                    "throttle_power_cap_ns": round(SECOND * (5 + cap * s)),
                    "gpu_temp_c": 50.0 + seconds,
                }
                for s in ticks(-1, seconds + 1)
            ],
            device,
        )
        return summarise(rows, at(0), at(seconds), [device])

    both = combine([node("GPU-a", 10, 1.0), node("GPU-b", 5, 0.4)])
    assert both.energy_j == pytest.approx(600 * 15)
    assert both.mean_power_w == pytest.approx(1200)
    assert both.peak_power_w == pytest.approx(1200)
    assert both.power_cap_ratio == pytest.approx((10 + 2) / 15)
    assert both.duration_s == 10
    assert both.peak_gpu_temp_c == 60
    assert both.gpu_temp_spread_c == pytest.approx(5)


def test_summaries_survive_json() -> None:
    rows = pa.concat_tables([ramp("GPU-a", throttle_sw_thermal_ns=1), ramp("GPU-b")])
    summary = summarise(rows, at(0), at(10), ["GPU-a", "GPU-b", "GPU-gone"])
    assert WindowSummary.from_dict(json.loads(json.dumps(summary.to_dict()))) == summary
    assert json.loads(json.dumps(summary.metrics())) == summary.metrics()


def test_an_empty_window_is_an_error() -> None:
    with pytest.raises(ValueError, match="window is empty"):
        summarise(ramp(), at(5), at(5), ["GPU-a"])


@settings(max_examples=50)
@given(
    readings=st.lists(st.tuples(st.integers(1, 10**9), st.integers(0, 2**64 - 1) | st.none()), max_size=30),
    edges=st.tuples(st.integers(0, 2 * 10**10), st.integers(1, 2 * 10**10)),
)
def test_any_readings_end_in_energy_that_is_none_or_not_negative(
    readings: list[tuple[int, int | None]], edges: tuple[int, int]
) -> None:
    times = np.cumsum([gap for gap, _ in readings]).tolist()
    rows = table([{"time_ns": t, "energy_mj": value} for t, (_, value) in zip(times, readings, strict=True)])
    summary = summarise(rows, edges[0], edges[0] + edges[1], ["GPU-a"])
    values = [value for _, value in readings if value is not None]
    assert summary.energy_j is None or 0 <= summary.energy_j <= (max(values) - min(values)) / 1000
    if values and summary.energy_j is None:
        assert summary.problems


BEFORE_S = 60.0  # a whole number of turns


@dataclass(frozen=True)
class Driver:
    """An energy counter as a driver offers it: refreshed each `tick_s`, `bits` wide, back at 0 after a reset, and
    unreadable from `reset_s` or `gap_s` on for some seconds; the device draws `watts` all along, or turn and turn about
    with `idle_watts`, for `turn_s` each."""

    watts: float
    tick_s: float
    phase_s: float
    start_mj: int
    bits: int
    reset_s: float | None
    down_s: float
    gap_s: float | None
    missing_s: float
    idle_watts: float | None = None
    turn_s: float = 1.0

    def power_w(self, seconds: float) -> float:
        idle = self.idle_watts is not None and math.floor(seconds / self.turn_s) % 2
        return self.idle_watts if idle and self.idle_watts is not None else self.watts

    def busy_s(self, seconds: float) -> float:
        """The time at `watts` from some time before 0 on."""
        if self.idle_watts is None:
            return seconds + BEFORE_S
        pairs, rest = divmod(seconds + BEFORE_S, 2 * self.turn_s)
        return pairs * self.turn_s + min(rest, self.turn_s)

    def drawn_j(self, seconds: float) -> float:
        """The energy from some time before 0 on."""
        busy_s = self.busy_s(seconds)
        return self.watts * busy_s + (self.idle_watts or 0.0) * (seconds + BEFORE_S - busy_s)

    def refreshed_s(self, seconds: float) -> float:
        """The last tick."""
        return math.floor((seconds + self.phase_s) / self.tick_s) * self.tick_s - self.phase_s

    def spent_mj(self, seconds: float) -> int:
        """The energy up to the last tick."""
        return round(1000 * self.drawn_j(self.refreshed_s(seconds)))

    def read(self, seconds: float) -> int | None:
        spent = self.spent_mj(seconds)
        if self.gap_s is not None and self.gap_s <= seconds < self.gap_s + self.missing_s:
            return None
        if self.reset_s is not None and seconds >= self.reset_s:
            if seconds < self.reset_s + self.down_s:
                return None
            return spent - self.spent_mj(self.reset_s)
        return (self.start_mj + spent) % 2**self.bits

    def read_throttled_ns(self, seconds: float) -> int | None:
        """A counter of the time at `watts`, which began with the device or its reset and stops wherever energy does."""
        if self.read(seconds) is None:
            return None
        began = self.reset_s if self.reset_s is not None and seconds >= self.reset_s else -BEFORE_S
        return round(SECOND * (self.busy_s(seconds) - self.busy_s(began)))

    def lost_past(self, start: float, end: float) -> bool:
        """Whether the counter wrapped or was reset from `start` to `end`."""
        if self.reset_s is not None and self.reset_s < end:
            return self.reset_s > start
        first, last = (self.start_mj + self.spent_mj(edge) for edge in (start, end))
        return first // 2**self.bits != last // 2**self.bits

    def lost_twice(self, within_s: float) -> bool:
        """Whether a reset came so soon after a wrap that nobody can see a past lost twice between two readings."""
        if self.reset_s is None:
            return False
        counted_mj = self.start_mj + self.spent_mj(self.reset_s)
        return counted_mj >= 2**self.bits and counted_mj % 2**self.bits <= 1000 * within_s * self.watts


drivers = st.builds(
    Driver,
    watts=st.floats(30, 2000),
    tick_s=st.sampled_from([0.02, 0.1, 0.25]),
    phase_s=st.floats(0, 0.1),
    start_mj=st.integers(0, 10**10) | st.integers(2**32 - 10**7, 2**32) | st.integers(2**64 - 10**7, 2**64 - 1),
    bits=st.sampled_from([32, 64]),
    reset_s=st.none() | st.floats(-1, 11),
    down_s=st.floats(0, 4),
    gap_s=st.none() | st.floats(-1, 11),
    missing_s=st.floats(0, 4),
)


@settings(max_examples=150, deadline=None)
@given(
    driver=drivers,
    period_s=st.floats(0.03, 0.3),
    dropped=st.booleans(),
    window=st.tuples(st.floats(0, 4), st.floats(6, 10)),
)
# Reset when nearly new: after 3 seconds unread the counter is already past where it was.
@example(Driver(700.0, 0.1, 0.0, 2**64 - 58 * 700_000, 64, 0.8, 4.0, 0.7, 4.0), 0.1, False, (0.0, 9.0))
def test_wraps_resets_and_gaps_end_in_none_with_a_reason_and_never_in_a_wrong_energy(
    driver: Driver, period_s: float, dropped: bool, window: tuple[float, float]
) -> None:
    """Readings that fail are null, or without a row at all."""
    start, end = window
    assume(not driver.lost_twice(1.3))
    rows = [{"time_ns": at(s), "energy_mj": driver.read(s)} for s in ticks(-2, 12, period_s)]
    summary = summarise(
        table([r for r in rows if not dropped or r["energy_mj"] is not None]), at(start), at(end), ["GPU-a"]
    )
    if summary.energy_j is None:
        assert summary.problems
        assert "energy_mj" in summary.problems[0] or "no readings" in summary.problems[0]
        return
    assert not driver.lost_past(start, end)
    late_s = driver.tick_s + period_s
    assert summary.energy_j == pytest.approx(driver.watts * (end - start), abs=driver.watts * late_s + 0.01)


def sparse(
    driver: Driver, window: tuple[float, float], delay_s: float, phase_s: float, dark: bool, refreshed: bool = False
) -> pa.Table:
    """Readings of 100 ms; the counter's every 10 s, and `delay_s` after each edge. Unless `dark`, power is read on
    while the counter cannot be. With `refreshed` they say when the counter was."""
    due = sorted(
        [phase_s - 20, phase_s - 10, phase_s, phase_s + 10, phase_s + 20, *(edge + delay_s for edge in window)]
    )
    rows = []
    for seconds in ticks(-14, 26):
        row: dict[str, Any] = {"time_ns": at(seconds)}
        energy_mj = driver.read(seconds)
        if energy_mj is not None or not dark:
            row["power_w"] = driver.power_w(seconds)
        if due and seconds >= due[0]:
            row |= {"energy_mj": energy_mj, "throttle_sw_thermal_ns": driver.read_throttled_ns(seconds)}
            row |= {"energy_ns": at(driver.refreshed_s(seconds))} if refreshed else {}
            due = [s for s in due if s > seconds]
        rows.append(row)
    return table(rows)


sparse_drivers = st.builds(
    Driver,
    watts=st.floats(200, 2000),
    tick_s=st.just(0.1),
    phase_s=st.floats(0, 0.1),
    start_mj=st.integers(0, 10**10) | st.integers(2**32 - 4 * 10**7, 2**32) | st.integers(2**64 - 10**8, 2**64 - 1),
    bits=st.sampled_from([32, 64]),
    reset_s=st.none() | st.floats(-15, 25),
    down_s=st.floats(0, 8),
    gap_s=st.none() | st.floats(-12, 24),
    missing_s=st.floats(0, 12),
    idle_watts=st.none() | st.floats(50, 200),
    turn_s=st.sampled_from([1.0, 2.0, 3.0, 7.5]),
)


sparsely_read = given(
    driver=sparse_drivers,
    window=st.tuples(st.floats(0, 3), st.floats(5, 20)),
    delay_s=st.floats(0, 0.9),
    phase_s=st.floats(0, 10),
    dark=st.booleans(),
)


@pytest.mark.parametrize("refreshed", [False, True])
@settings(max_examples=150, deadline=None)
@sparsely_read
def test_a_counter_read_now_and_then_is_as_right_or_refused(
    refreshed: bool, driver: Driver, window: tuple[float, float], delay_s: float, phase_s: float, dark: bool
) -> None:
    """Right within what the device draws in a tick of the sampler at either edge, and in one of the counter if nobody
    says when that was."""
    assume(not driver.lost_twice(12))
    summary = summarise(
        sparse(driver, window, delay_s, phase_s, dark, refreshed), at(window[0]), at(window[1]), ["GPU-a"]
    )
    if summary.energy_j is None:
        assert any(problem.startswith("GPU-a: ") and "energy_mj" in problem for problem in summary.problems)
        return
    assert not driver.lost_past(*window)
    true_j = driver.drawn_j(window[1]) - driver.drawn_j(window[0])
    assert summary.energy_j == pytest.approx(true_j, abs=2 * (0.1 if refreshed else 0.2) * driver.watts + 0.01)


@settings(max_examples=100, deadline=None)
@sparsely_read
def test_throttled_time_read_now_and_then_is_right_within_its_distance_from_the_edges(
    driver: Driver, window: tuple[float, float], delay_s: float, phase_s: float, dark: bool
) -> None:
    assume(not driver.lost_twice(12))
    rows = sparse(driver, window, delay_s, phase_s, dark)
    summary = summarise(rows, at(window[0]), at(window[1]), ["GPU-a"])
    if summary.throttle_time_s is None:
        assert any(problem.startswith("GPU-a: ") and "throttle_sw_thermal" in problem for problem in summary.problems)
        return
    assert driver.reset_s is None or not window[0] < driver.reset_s < window[1]
    true_s = driver.busy_s(window[1]) - driver.busy_s(window[0])
    read_ns = rows.filter(pc.field("throttle_sw_thermal_ns").is_valid())["time_ns"].to_numpy()
    away_s = [np.min(np.abs(read_ns - at(edge))) / SECOND for edge in window]
    assert max(away_s) <= 1
    assert summary.throttle_time_s == pytest.approx(true_s, abs=sum(away_s) + 1e-6)


def test_the_sliver_between_an_edge_and_its_reading_counts_at_the_power_it_had() -> None:
    """Ten seconds idle, then a window at full power whose first reading comes 0.9 s late."""
    driver = Driver(700.0, 0.1, 0.0, 10**10, 64, None, 0.0, None, 0.0, idle_watts=100.0, turn_s=10.0)
    rows = sparse(driver, (0.0, 9.0), 0.9, 0.95, dark=False)
    summary = summarise(rows, at(0), at(9), ["GPU-a"])
    assert summary.energy_j == pytest.approx(6300, abs=70)
    assert summary.problems == ()
    without = rows.drop_columns("power_w").append_column("power_w", pa.nulls(len(rows), pa.float64()))
    summary = summarise(without, at(0), at(9), ["GPU-a"])
    assert summary.energy_j is None
    assert summary.problems[0].endswith("apart around an edge, without the power in between")


@pytest.mark.parametrize("delay_s", [0.0, 0.1])
@pytest.mark.parametrize("phase_s", [0.0, 0.031, 0.062, 0.099])
def test_a_counter_whose_refreshes_are_known_has_exact_edges(phase_s: float, delay_s: float) -> None:
    """Of a load that ends with the window. Not knowing the age of a reading after the end, one takes too little off."""
    driver = Driver(700.0, 0.1, phase_s, 10**10, 64, None, 0.0, None, 0.0, idle_watts=100.0, turn_s=3.0)

    def error(refreshed: bool) -> float:
        summary = summarise(sparse(driver, (1.0, 2.98), delay_s, 0.95, False, refreshed), at(1), at(2.98), ["GPU-a"])
        assert summary.problems == ()
        assert summary.energy_j is not None
        return summary.energy_j / (700 * 1.98) - 1

    assert abs(error(refreshed=True)) < 0.015
    if delay_s:
        assert error(refreshed=False) == pytest.approx((0.7 - 0.1) * phase_s / (0.7 * 1.98), abs=0.01)


def test_a_reading_that_waited_for_a_refresh_across_the_start_is_no_gap() -> None:
    """Its row is of 4 ms before the window, its energy of 8 ms into it."""
    refreshes = {-0.004: 0.008, 5.05: 5.01}
    rows = [{"time_ns": at(s), "power_w": 700.0} for s in ticks(-1.004, 6)]
    rows += [
        {"time_ns": at(s), "energy_mj": 10**10 + round(7e5 * new), "energy_ns": at(new)} for s, new in refreshes.items()
    ]
    summary = summarise(table(sorted(rows, key=lambda row: row["time_ns"])), at(0), at(5), ["GPU-a"])
    assert summary.problems == ()
    assert summary.energy_j == pytest.approx(3500, rel=0.02)


def test_a_window_soon_after_the_first_reading_of_all_has_its_energy() -> None:
    """That reading's refresh is from before the first power."""
    refreshes = {-2.05: -2.12, 0.05: 0.02, 4.05: 4.02}
    rows = [{"time_ns": at(s), "power_w": 700.0} for s in ticks(-2.05, 5)]
    for seconds, new in refreshes.items():
        (row,) = [row for row in rows if abs(row["time_ns"] - at(seconds)) < 1e6]
        row |= {"energy_mj": 10**10 + round(7e5 * new), "energy_ns": at(new)}
    summary = summarise(table(rows), at(0), at(4), ["GPU-a"])
    assert summary.problems == ()
    assert summary.energy_j == pytest.approx(2800, rel=0.002)


def test_a_sound_counter_is_not_refused() -> None:
    driver = Driver(700.0, 0.1, 0.03, 7 * 10**9, 64, None, 0.0, 4.0, 3.0)
    rows = [{"time_ns": at(s), "energy_mj": driver.read(s)} for s in ticks(-2, 12)]
    summary = summarise(table(rows), at(0.5), at(9.5), ["GPU-a"])
    assert summary.energy_j == pytest.approx(6300, abs=140)
    assert summary.problems == ()


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (lambda s: 7_000_000_000 + round(5e5 * (s if s < 3 else max(s - 2, 3))), "stood still for 2.0 s"),
        (lambda s: 7_000_000_000 + round(5e5 * (s + 2)) + 2**40 * (s > 5), f"grew faster than {MAX_DEVICE_W} W"),
        (
            lambda s: round(5e5 * (s - 2.5)) if s > 5.05 else round(5e4 * (s + 1)) if s < 3.05 else None,
            "may have been reset while it was not read for 2.1 s",
        ),
        (
            lambda s: 7_000_000_000 + round(5e5 * (s if s < 3.05 else s - 2)) if not 3.05 < s < 6.05 else None,
            "grew by 550 J in 3.1 s in which sampled power gives 1550 J",
        ),
    ],
)
def test_a_counter_in_which_a_fault_may_hide_is_refused(rows: Callable[[float], int | None], reason: str) -> None:
    read = table([{"time_ns": at(s), "energy_mj": rows(s), "power_average_w": 500.0} for s in ticks(-1, 11)])
    summary = summarise(read, at(0), at(10), ["GPU-a"])
    assert summary.problems == (f"GPU-a: energy_mj {reason}",)
    assert (summary.energy_j, summary.energy_ratio) == (None, None)
    assert summary.devices[0].integrated_j == pytest.approx(5000)  # beside it, but no substitute


def test_a_call_that_hangs_at_an_edge_gives_no_energy() -> None:
    """The reading asked for at 5.0 s came 3 s later, and the sampler dropped it."""
    times = [s for s in ticks(-1, 12) if s <= 5.01 or s > 8]
    rows = [
        {"time_ns": at(s)}
        | ({} if 4.99 < s < 5.01 else {"energy_mj": round(7e9 + 500_000 * s), "power_w": 500.0, "gpu_temp_c": 60.0})
        for s in times
    ]
    summary = summarise(table(rows), at(4.95), at(11), ["GPU-a"])
    assert (summary.energy_j, summary.peak_power_w, summary.peak_gpu_temp_c) == (None, None, None)
    assert summary.problems == (
        "GPU-a: power_w, gpu_temp_c was not read for 3.2 s in the window",
        "GPU-a: energy_mj was read 3.2 s apart around an edge, without the power in between",
    )
    assert summarise(table(rows), at(1), at(11), ["GPU-a"]).energy_j == pytest.approx(5000)


def test_a_reset_that_the_energy_counter_shows_makes_the_others_unknown() -> None:
    """A throttle counter that stands at 0 looks the same after a reset."""
    rows = [
        {"time_ns": at(s), "energy_mj": round(5e5 * (s + 9 if s < 5 else s - 4)), "throttle_sw_thermal_ns": 0}
        for s in ticks(-1, 11)
    ]
    summary = summarise(table(rows), at(0), at(10), ["GPU-a"])
    assert summary.throttle_s["sw_thermal"] is None
    assert summary.throttle_ratio is None
    assert summary.problems == (
        "GPU-a: energy_mj went backwards",
        "GPU-a: throttle_sw_thermal_ns may have been reset with energy_mj",
    )
    assert summarise(table(rows), at(5.5), at(10), ["GPU-a"]).throttle_ratio == 0.0


@pytest.mark.parametrize(
    ("share", "seconds", "flagged"), [(1.04, 10, False), (1.06, 10, True), (0.94, 10, True), (0.5, 1.5, False)]
)
def test_integrated_power_stands_beside_the_counter(share: float, seconds: float, flagged: bool) -> None:
    rows = [
        {
            "time_ns": at(s),
            "energy_mj": round(7e9 + 600_000 * s),
            "power_w": share * (600 + 100 * (-1) ** round(10 * s)),
        }
        for s in ticks(-1, 11)
    ]
    both = pa.concat_tables([table(rows, device) for device in ("GPU-a", "GPU-b")])
    summary = summarise(both, at(0), at(seconds), ["GPU-a", "GPU-b"])
    assert summary.energy_j == pytest.approx(1200 * seconds)
    assert (summary.energy_method, summary.methods()["mean_power_w"]) == ("counter", "counter")
    assert summary.metrics()["energy_ratio"] == pytest.approx(share, rel=1e-6)
    problem = f"power_w gives, integrated, {share:.3f} times the energy of energy_mj"
    assert summary.problems == ((f"GPU-a: {problem}", f"GPU-b: {problem}") if flagged else ())
    assert WindowSummary.from_dict(json.loads(json.dumps(summary.to_dict()))) == summary


@pytest.mark.parametrize(
    ("instant", "ratio", "said"),
    [
        (1.01, 1.01, ""),  # average power had not come up when the window began
        (0.9, 0.9, "power_w gives, integrated, 0.900"),
        (0.7, 0.85, "power_average_w gives, integrated, 0.850"),
        (None, 0.85, "power_average_w gives, integrated, 0.850"),
    ],
)
def test_the_sampled_power_that_is_nearer_stands_beside_the_counter(
    instant: float | None, ratio: float, said: str
) -> None:
    rows = [
        {
            "time_ns": at(s),
            "energy_mj": round(7e9 + 600_000 * s),
            "power_average_w": 0.85 * 600,
            "power_w": instant and instant * 600,
        }
        for s in ticks(-1, 11)
    ]
    summary = summarise(table(rows), at(0), at(10), ["GPU-a"])
    assert summary.energy_ratio == pytest.approx(ratio)
    assert summary.problems == ((f"GPU-a: {said} times the energy of energy_mj",) if said else ())


def test_the_ratio_needs_both_methods_on_every_device() -> None:
    bare = table([{"time_ns": at(s), "energy_mj": round(7e9 + 500_000 * s)} for s in ticks(-1, 11)], "GPU-b")
    summary = summarise(pa.concat_tables([ramp(), bare]), at(0), at(10), ["GPU-a", "GPU-b"])
    assert summary.devices[0].integrated_j == pytest.approx(5000)
    assert (summary.energy_ratio, summary.problems) == (None, ())
    still = table([{"time_ns": at(s), "power_w": 500.0} for s in ticks(-1, 11)])
    assert summarise(still, at(0), at(10), ["GPU-a"]).energy_ratio is None  # integrated power alone compares to nothing


def bits(kind: str, pattern: dict[float, int]) -> pa.Table:
    """Samples of reasons, those of `pattern` from the given seconds on."""

    def at_time(seconds: float) -> int:
        return [reasons for since, reasons in pattern.items() if since <= seconds + 1e-6][-1]

    return table([{"time_ns": at(s), "throttle_reasons": at_time(s)} for s in ticks(-1, 11)], kind=kind)


@pytest.mark.parametrize(
    ("kind", "heat", "cap", "other"),
    [
        ("nvidia", 0x20, 0x4, 0x8),
        ("nvidia", 0x40, 0x80, 0x1),
        ("amd", 1 << 32, 1, 1 << 16),
        ("amd", 1 << 47, 1 << 15, 0),
    ],
)
def test_without_counters_throttling_is_the_share_of_samples(kind: str, heat: int, cap: int, other: int) -> None:
    rows = bits(kind, {-1: other, 2: heat | other, 4: cap | other, 9: other})
    summary = summarise(rows, at(0), at(10), ["GPU-a"])
    assert summary.throttle_time_s == pytest.approx(2.0)
    assert summary.thermal_throttle_s == pytest.approx((1.9, 2.1))
    assert (summary.throttle_ratio, summary.power_cap_ratio) == (pytest.approx(0.2), pytest.approx(0.5))
    assert summary.throttle_s["sw_thermal"] is None  # bits of one cause may stand for several counters
    assert summary.methods() == dict.fromkeys(("throttle_ratio", "power_cap_ratio", "throttle_time_s"), "sampled")
    counted = combine([summary, summarise(ramp(throttle_sw_thermal_ns=5), at(0), at(10), ["GPU-a"])])
    assert counted.methods()["throttle_ratio"] == "sampled"


def test_bits_never_stand_in_for_counters_that_are_refused() -> None:
    rows = [
        {"time_ns": at(s), "throttle_power_cap_ns": 9 if s < 5 else 0, "throttle_hw_thermal_ns": 9 if s < 5 else 0}
        | {"throttle_reasons": 0x24}
        for s in ticks(-1, 11)
    ]
    summary = summarise(table(rows), at(0), at(10), ["GPU-a"])
    assert (summary.throttle_ratio, summary.power_cap_ratio, summary.methods()) == (None, None, {})
    assert summary.problems == ("GPU-a: throttle_power_cap_ns, throttle_hw_thermal_ns went backwards",)


def test_bits_that_nobody_knows_are_left_alone() -> None:
    summary = summarise(bits("cpu", {-1: 0xFF}), at(0), at(10), ["GPU-a"])
    assert (summary.throttle_ratio, summary.power_cap_ratio, summary.problems) == (None, None, ())


def test_average_power_makes_energy_and_instant_power_the_peak() -> None:
    average = [{"time_ns": at(s), "power_average_w": 300.0 + 10 * (s > 5)} for s in ticks(-1, 11)]
    instant = [{"time_ns": at(s), "power_w": 200.0} for s in ticks(-1, 11)]
    both = [one | other for one, other in zip(average, instant, strict=True)]
    for rows, joules, peak in ((average, 3050, 310), (instant, 2000, 200), (both, 3050, 200)):
        summary = summarise(table(rows), at(0), at(10), ["GPU-a"])
        assert summary.energy_j == pytest.approx(joules, abs=1)
        assert summary.peak_power_w == peak


@pytest.mark.parametrize("late_s", [0.05, 0.35, 0.75])
def test_the_energy_of_a_load_that_ends_with_its_window_stays_in_the_window(late_s: float) -> None:
    """600 W until the window's end and 100 W from then on, the counter read that much after either edge."""

    def joules(s: float) -> float:
        return 600 * min(s, 3) + 100 * max(s - 3, 0)

    def trailing(s: float) -> float:  # mean of the last second
        return joules(s) - joules(s - 1)

    read = {round(-5 + late_s, 2), round(late_s, 2), round(3 + late_s, 2)}
    rows = []
    for s in ticks(-6 + late_s % 0.1, 5):
        counted = {"energy_mj": round(1e9 + 1000 * joules(s))} if round(s, 2) in read else {}
        rows.append({"time_ns": at(s), "power_w": 600.0 if s <= 3 else 100.0, "power_average_w": trailing(s)} | counted)
    summary = summarise(table(rows), at(0), at(3), ["GPU-a"])
    assert summary.energy_j == pytest.approx(1800, rel=0.02)
    assert summary.energy_ratio == pytest.approx(1, abs=0.02)


def full_rows(*seconds: float, **columns: Callable[[float], float | int | None]) -> list[dict[str, Any]]:
    """Readings of 100 ms of temperature and, at the tick of each of `seconds`, of `columns` too."""
    rows: list[dict[str, Any]] = []
    for s in ticks(-11, 12):
        row: dict[str, Any] = {"time_ns": at(s), "gpu_temp_c": 50.0}
        if any(abs(s - full) < 0.01 for full in seconds):
            row |= {column: value(s) for column, value in columns.items()}
        rows.append(row)
    return rows


def info(uuid: str, **changes: Any) -> DeviceInfo:
    h200 = DeviceInfo(uuid, 0, "H200", "nvidia", "counter", pcie_peak_bytes_per_s=63e9, link_peak_bytes_per_s=450e9)
    return replace(h200, **changes)


def traffic(device: str, pcie: tuple[float, float], link: tuple[float, float]) -> pa.Table:
    """Of so many GB/s received and sent."""
    rates = dict(zip(("pcie_rx_bytes", "pcie_tx_bytes", "link_rx_bytes", "link_tx_bytes"), pcie + link, strict=True))
    columns = {name: lambda s, rate=rate: round(1e9 * rate * (s + 30)) for name, rate in rates.items()}
    return table(full_rows(-9.5, 0.3, 9.8, 10.4, **columns), device)


def test_traffic_is_per_fabric_and_a_saturated_one_is_named() -> None:
    rows = pa.concat_tables([traffic("GPU-a", (5, 10), (100, 420)), traffic("GPU-b", (1, 2), (410, 90))])
    devices = ["GPU-a", "GPU-b"]
    summary = summarise(rows, at(0), at(10), devices, {device: info(device) for device in devices})
    assert summary.problems == ()
    figures = summary.metrics()
    assert figures["pcie_bytes_per_s"] == pytest.approx(18e9)
    assert figures["link_bytes_per_s"] == pytest.approx(1020e9)
    assert figures["pcie_utilisation"] == pytest.approx(10 / 63)
    assert figures["link_utilisation"] == pytest.approx(420 / 450)
    assert summary.saturated == ("GPU-a: link is saturated, at 93% of its peak",)
    assert WindowSummary.from_dict(json.loads(json.dumps(summary.to_dict()))) == summary
    bare = summarise(rows, at(0), at(10), devices)
    assert (bare.pcie_bytes_per_s, bare.pcie_utilisation, bare.saturated) == (pytest.approx(18e9), None, ())


def test_more_than_a_fabric_carries_is_no_traffic() -> None:
    rows = traffic("GPU-a", (80, 10), (100, 100))
    summary = summarise(rows, at(0), at(10), ["GPU-a"], {"GPU-a": info("GPU-a")})
    assert (summary.pcie_bytes_per_s, summary.pcie_utilisation) == (None, None)
    assert summary.link_utilisation == pytest.approx(100 / 450)
    assert summary.problems == ("GPU-a: pcie_rx_bytes grew faster than the 63 GB/s of its fabric",)


def test_activities_are_means_over_the_window() -> None:
    rows = full_rows(
        -9.5,
        0.5,
        10.5,
        tensor_activity=lambda s: 0.1 if s < 1 else 0.6,
        dram_activity=lambda s: 0.4,
        gpu_temp_margin_c=lambda s: 20 + s,
    )
    summary = summarise(table(rows), at(0), at(10), ["GPU-a"])
    assert summary.tensor_activity == pytest.approx((0.5 * 0.1 + 9.5 * 0.6) / 10)
    assert summary.dram_activity == pytest.approx(0.4)
    assert summary.min_gpu_temp_margin_c == 20.5
    assert summary.problems == ()


def test_events_in_the_window_are_reported() -> None:
    rows = full_rows(-9.5, 0.5, 10.5, ecc_uncorrected=lambda s: 2 + 3 * (s > 1), energy_mj=lambda s: 10**10)
    for number, row in enumerate(rows):
        row |= {"xid_errors": int(number > 150), "xid": 79 if number > 150 else None}
    summary = summarise(table(rows), at(0), at(10), ["GPU-a"])
    assert summary.problems[1:] == (
        "GPU-a: ecc_uncorrected grew by 3: memory errors that were not corrected",
        "GPU-a: xid_errors grew by 1, the last XID 79",
    )
    quiet = summarise(table(rows), at(0), at(3), ["GPU-a"])
    assert not any("xid" in problem for problem in quiet.problems)


def test_energy_of_a_card_is_its_counter_s_if_all_of_it_took_part() -> None:
    rows = pa.concat_tables([ramp("GPU-a", 200.0), ramp("GPU-b", 200.0), ramp("GPU-c", 200.0)])
    column = pa.array(["shared"] * rows.num_rows)
    rows = rows.set_column(rows.schema.get_field_index("energy_method"), "energy_method", column)
    infos = {
        device: info(device, energy_method="shared", card=card)
        for device, card in (("GPU-a", "card-1"), ("GPU-b", "card-1"), ("GPU-c", None))
    }

    def method(*devices: str, known: dict[str, DeviceInfo] = infos) -> str | None:
        return summarise(rows, at(0), at(10), devices, known).energy_method

    assert method("GPU-a", "GPU-b") == "counter"
    assert method("GPU-a") == "estimated"
    assert method("GPU-a", "GPU-b", "GPU-c") == "estimated"
    assert method("GPU-a", "GPU-b", known={}) == "estimated"
    whole = summarise(rows, at(0), at(10), ["GPU-a", "GPU-b"], infos)
    assert (whole.energy_j, whole.energy_ratio) == (pytest.approx(4000), pytest.approx(1))


def test_spreads_and_extremes_over_devices() -> None:
    def device(name: str, watts: float, clock: float) -> pa.Table:
        return ramp(name, watts, sm_clock_mhz=clock, hbm_power_w=watts / 10)

    rows = pa.concat_tables([device("GPU-a", 500.0, 1400.0), device("GPU-b", 620.0, 1500.0)])
    summary = summarise(rows, at(0), at(10), ["GPU-a", "GPU-b"])
    assert summary.power_spread_w == pytest.approx(120)
    assert summary.sm_clock_spread_mhz == pytest.approx(100)
    assert summary.min_sm_clock_mhz == 1400
    assert summary.mean_hbm_power_w == pytest.approx(112)


def test_samples_without_any_reading_are_not_counted() -> None:
    rows = [{"time_ns": at(s)} | ({"gpu_temp_c": 50.0} if s < 5.05 else {}) for s in ticks(-1, 11)]
    summary = summarise(table(rows), at(0), at(10), ["GPU-a"])
    assert summary.sample_count == 51
    assert summary.peak_gpu_temp_c is None
    assert summary.problems == ("GPU-a: gpu_temp_c has no reading after the window",)
    dead = summarise(table([{"time_ns": at(s)} for s in ticks(-1, 11)]), at(0), at(10), ["GPU-a"])
    assert (dead.sample_count, dead.problems) == (0, ("GPU-a: has no readings in the window",))
