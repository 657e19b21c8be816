from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from telemetry.samples import SCHEMA
from telemetry.window import (
    MAX_DEVICE_W,
    Unusable,
    WindowSummary,
    combine,
    counter_difference,
    integral,
    summarise,
)

SECOND = 1_000_000_000
ORIGIN = 5_000_000 * SECOND  # two months of uptime


def table(rows: Sequence[dict[str, Any]], device: str = "GPU-a", **constant: Any) -> pa.Table:
    common = {"node": "n", "device": device, "kind": "nvidia", "energy_method": "counter"} | constant
    return pa.Table.from_pylist([common | row for row in rows], schema=SCHEMA)


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
    assert summary.problems[0].endswith("counter went backwards")


@given(value=st.integers(0, 2**64 - 1), growth=st.lists(st.integers(0, 10**12), min_size=3, max_size=30))
def test_a_counter_that_wraps_at_64_bits_is_refused_and_else_exact(value: int, growth: list[int]) -> None:
    values = [value + sum(growth[:n]) for n in range(len(growth) + 1)]
    times = np.arange(len(values), dtype=np.int64) * SECOND // 2
    read = np.array([v % 2**64 for v in values], dtype=np.uint64)
    if values[-1] < 2**64:
        assert counter_difference(times, read, 0, int(times[-1])) == pytest.approx(sum(growth), rel=1e-12)
    else:
        with pytest.raises(Unusable, match="backwards"):
            counter_difference(times, read, 0, int(times[-1]))


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
    assert "not refreshed for 1.7 s at the window's end" in summary.problems[0]


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


@given(st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0, 1000)), min_size=3, max_size=30))
def test_the_integral_is_that_of_the_drawn_line(points: list[tuple[float, float]]) -> None:
    times = np.cumsum([round(gap * SECOND) for gap, _ in points])
    values = np.array([value for _, value in points])
    middle = int(times[0] + times[-1]) // 2
    first, last = int(times[0]), int(times[-1])
    whole = integral(times, values, first, last)
    assert whole == pytest.approx(float(np.trapezoid(values, times)) / SECOND)
    assert whole == pytest.approx(integral(times, values, first, middle) + integral(times, values, middle, last))


def test_a_gap_in_power_is_refused() -> None:
    rows = table([{"time_ns": at(s), "power_w": 100.0} for s in ticks(-1, 11) if not 4 < s < 6])
    summary = summarise(rows, at(0), at(10), ["GPU-a"])
    assert summary.energy_j is None
    assert "power was not refreshed" in summary.problems[0]


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
    assert summary.methods() == {"mean_power_w": "estimated", "peak_power_w": "estimated"}
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
    assert summary.problems == ("GPU-gone: has no samples in the window",)


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


@dataclass(frozen=True)
class Driver:
    """An energy counter as a driver offers it: refreshed each `tick_s`, `bits` wide, back at 0 after a reset, and
    unreadable from `reset_s` or `gap_s` on for some seconds; the device draws `watts` all along."""

    watts: float
    tick_s: float
    phase_s: float
    start_mj: int
    bits: int
    reset_s: float | None
    down_s: float
    gap_s: float | None
    missing_s: float

    def spent_mj(self, seconds: float) -> int:
        """The energy up to the last tick, from 2 seconds before time 0 on."""
        tick = math.floor((seconds + self.phase_s) / self.tick_s) * self.tick_s - self.phase_s
        return round(self.watts * 1000 * (tick + 2))

    def read(self, seconds: float) -> int | None:
        spent = self.spent_mj(seconds)
        if self.gap_s is not None and self.gap_s <= seconds < self.gap_s + self.missing_s:
            return None
        if self.reset_s is not None and seconds >= self.reset_s:
            if seconds < self.reset_s + self.down_s:
                return None
            return spent - self.spent_mj(self.reset_s)
        return (self.start_mj + spent) % 2**self.bits

    def lost_past(self, start: float, end: float) -> bool:
        """Whether the counter wrapped or was reset from `start` to `end`."""
        if self.reset_s is not None and self.reset_s < end:
            return self.reset_s > start
        first, last = (self.start_mj + self.spent_mj(edge) for edge in (start, end))
        return first // 2**self.bits != last // 2**self.bits


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


@settings(max_examples=300, deadline=None)
@given(
    driver=drivers,
    period_s=st.floats(0.03, 0.3),
    dropped=st.booleans(),
    window=st.tuples(st.floats(0, 4), st.floats(6, 10)),
)
# Reset when nearly new: after 3 seconds unread the counter is already past where it was.
@example(Driver(700.0, 0.1, 0.0, 0, 64, 0.8, 4.0, 0.7, 4.0), 0.1, False, (0.0, 9.0))
def test_wraps_resets_and_gaps_end_in_none_with_a_reason_and_never_in_a_wrong_energy(
    driver: Driver, period_s: float, dropped: bool, window: tuple[float, float]
) -> None:
    """Readings that fail are null, or without a row at all."""
    start, end = window
    if driver.reset_s is not None:  # but not right after a wrap: nobody can see a past lost twice between two readings
        counted_mj = (driver.start_mj + driver.spent_mj(driver.reset_s)) % 2**driver.bits
        assume(counted_mj == driver.spent_mj(driver.reset_s) or counted_mj > 1300 * driver.watts)
    rows = [{"time_ns": at(s), "energy_mj": driver.read(s)} for s in ticks(-2, 12, period_s)]
    summary = summarise(
        table([r for r in rows if not dropped or r["energy_mj"] is not None]), at(start), at(end), ["GPU-a"]
    )
    if summary.energy_j is None:
        assert summary.problems
        assert "energy counter" in summary.problems[0] or "no samples" in summary.problems[0]
        return
    assert not driver.lost_past(start, end)
    late_s = driver.tick_s + period_s
    assert summary.energy_j == pytest.approx(driver.watts * (end - start), abs=driver.watts * late_s + 0.01)


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
            lambda s: round(5e5 * (s + 2)) if not 3 < s < 5 else None,
            "may have been reset while it was not read for 2.0 s",
        ),
    ],
)
def test_a_counter_in_which_a_fault_may_hide_is_refused(rows: Callable[[float], int | None], reason: str) -> None:
    read = table([{"time_ns": at(s), "energy_mj": rows(s), "power_w": 500.0} for s in ticks(-1, 11)])
    summary = summarise(read, at(0), at(10), ["GPU-a"])
    assert summary.problems == (f"GPU-a: energy counter {reason}",)
    assert (summary.energy_j, summary.energy_ratio) == (None, None)
    assert summary.devices[0].integrated_j == pytest.approx(5000)  # told, but no substitute


def test_a_call_that_hangs_at_an_edge_gives_no_energy() -> None:
    """The reading asked for at 5.0 s came 3 s later, with the energy of then."""
    times = [s for s in ticks(-1, 12) if s <= 5.01 or s > 8]
    rows = [{"time_ns": at(s), "energy_mj": round(7e9 + 500_000 * (8 if 4.99 < s < 5.01 else s))} for s in times]
    summary = summarise(table(rows), at(4.95), at(11), ["GPU-a"])
    assert summary.energy_j is None
    assert "not refreshed for 3.1 s at the window's start" in summary.problems[0]
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
        "GPU-a: energy counter went backwards",
        "GPU-a: sw_thermal throttle counter may have been reset with the energy counter",
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
    told = f"integrated power gives {share:.3f} times the energy counter's energy"
    assert summary.problems == ((f"GPU-a: {told}", f"GPU-b: {told}") if flagged else ())
    assert WindowSummary.from_dict(json.loads(json.dumps(summary.to_dict()))) == summary


def test_the_ratio_needs_both_methods_on_every_device() -> None:
    bare = table([{"time_ns": at(s), "energy_mj": round(7e9 + 500_000 * s)} for s in ticks(-1, 11)], "GPU-b")
    summary = summarise(pa.concat_tables([ramp(), bare]), at(0), at(10), ["GPU-a", "GPU-b"])
    assert summary.devices[0].integrated_j == pytest.approx(5000)
    assert (summary.energy_ratio, summary.problems) == (None, ())
    still = table([{"time_ns": at(s), "power_w": 500.0} for s in ticks(-1, 11)])
    assert summarise(still, at(0), at(10), ["GPU-a"]).energy_ratio is None  # integrated power alone compares to nothing
