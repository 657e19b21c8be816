"""What happened to a trial's devices between two instants: energy, throttling, clocks, temperatures.

Pure arithmetic on samples. A value that cannot be trusted is None and says why in `problems`; it is never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.samples import THROTTLE_CAUSES

MAX_GAP_NS = 1_000_000_000
"""The longest stretch without a fresh reading across which a value is interpolated."""

MAX_DEVICE_W = 10_000
"""More than any one device draws: energy that grows faster was misread."""

RATIO_BOUNDS = (0.95, 1.05)
"""Integrated power over the counter's energy: outside, one of the two is wrong."""

MIN_RATIO_S = 2.0
"""Shorter windows are left alone: what an edge misses, a tick of the counter at most, may be over 5% of them."""

_METHODS_BY_TRUST = ("counter", "integrated", "estimated")


@dataclass(frozen=True)
class DeviceWindow:
    """One device over its node's window of `duration_s` seconds.

    `energy_method`: `counter` (hardware counter), `integrated` (from sampled power) or `estimated` (a model's power);
    None where there were no samples. `integrated_j` is the energy by sampled power beside a hardware counter's: it is
    compared with `energy_j` and never takes its place. `throttle_s` holds seconds by cause. `thermal_throttle_s` bounds
    the seconds lost to heat: software and hardware slowdown may coincide, so they lie between the larger one and the
    sum (at most the duration). None is unknown.
    """

    device: str
    duration_s: float
    energy_j: float | None
    energy_method: str | None
    integrated_j: float | None
    throttle_s: dict[str, float | None]
    thermal_throttle_s: tuple[float, float] | None
    mean_sm_clock_mhz: float | None
    mean_gpu_temp_c: float | None
    peak_gpu_temp_c: float | None
    peak_hbm_temp_c: float | None
    sample_count: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class WindowSummary:
    """The devices of a trial over its window, which may differ a little in length from node to node.

    `peak_power_w` is the highest sum over the devices; over several nodes the sum of their peaks, an upper bound, since
    their clocks are not compared. A total is None as soon as one device's share of it is.
    """

    devices: tuple[DeviceWindow, ...]
    peak_power_w: float | None

    @property
    def device_seconds(self) -> float:
        return math.fsum(window.duration_s for window in self.devices)

    @property
    def duration_s(self) -> float:
        """Length of the longest node's window."""
        return max((window.duration_s for window in self.devices), default=0.0)

    @property
    def energy_j(self) -> float | None:
        return _total(window.energy_j for window in self.devices)

    @property
    def energy_by_device_j(self) -> dict[str, float | None]:
        return {window.device: window.energy_j for window in self.devices}

    @property
    def energy_method(self) -> str | None:
        """The least trusted of the devices' methods; None if one of them has none."""
        methods = [window.energy_method for window in self.devices]
        known = [method for method in methods if method is not None]
        return max(known, key=_METHODS_BY_TRUST.index) if known and len(known) == len(methods) else None

    @property
    def energy_ratio(self) -> float | None:
        """Integrated power over the energy by the counters; None unless every device has both."""
        return _ratio(_total(window.integrated_j for window in self.devices), self.energy_j)

    @property
    def mean_power_w(self) -> float | None:
        """Sum over devices of energy by time."""
        return _total(
            None if window.energy_j is None else window.energy_j / window.duration_s for window in self.devices
        )

    @property
    def throttle_s(self) -> dict[str, float | None]:
        """Device-seconds by cause."""
        return {cause: _total(window.throttle_s[cause] for window in self.devices) for cause in THROTTLE_CAUSES}

    @property
    def thermal_throttle_s(self) -> tuple[float, float] | None:
        """Bounds of the device-seconds lost to heat."""
        low, high = (
            _total(window.thermal_throttle_s and window.thermal_throttle_s[bound] for window in self.devices)
            for bound in (0, 1)
        )
        return None if low is None or high is None else (low, high)

    @property
    def throttle_time_s(self) -> float | None:
        """Device-seconds lost to heat that the counters prove: the lower bound, max(SW, HW) of each device."""
        return self.thermal_throttle_s and self.thermal_throttle_s[0]

    @property
    def throttle_ratio(self) -> float | None:
        """`throttle_time_s` as share of the device-seconds."""
        return self._share(self.throttle_time_s)

    @property
    def power_cap_ratio(self) -> float | None:
        """Share of the device-seconds in which the power limit held the clock down."""
        return self._share(self.throttle_s["power_cap"])

    @property
    def mean_sm_clock_mhz(self) -> float | None:
        return self._share(
            _total(
                None if window.mean_sm_clock_mhz is None else window.mean_sm_clock_mhz * window.duration_s
                for window in self.devices
            )
        )

    @property
    def peak_gpu_temp_c(self) -> float | None:
        return _max(window.peak_gpu_temp_c for window in self.devices)

    @property
    def peak_hbm_temp_c(self) -> float | None:
        return _max(window.peak_hbm_temp_c for window in self.devices)

    @property
    def gpu_temp_spread_c(self) -> float | None:
        """Hottest device's mean temperature less the coolest one's."""
        temperatures = _all_known(window.mean_gpu_temp_c for window in self.devices)
        return None if temperatures is None else max(temperatures) - min(temperatures)

    @property
    def sample_count(self) -> int:
        return sum(window.sample_count for window in self.devices)

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(problem for window in self.devices for problem in window.problems)

    def metrics(self) -> dict[str, float | None]:
        """The figures under the names by which they are recorded."""
        names = (
            "mean_power_w",
            "peak_power_w",
            "energy_ratio",
            "throttle_ratio",
            "power_cap_ratio",
            "throttle_time_s",
            "mean_sm_clock_mhz",
            "peak_gpu_temp_c",
            "peak_hbm_temp_c",
            "gpu_temp_spread_c",
        )
        return {name: getattr(self, name) for name in names}

    def methods(self) -> dict[str, str]:
        """How the power and throttle figures that are known were got, by metric."""
        methods = {
            "mean_power_w": self.energy_method,
            "peak_power_w": "estimated" if self.energy_method == "estimated" else "sampled",
            "throttle_ratio": "counter",
            "power_cap_ratio": "counter",
            "throttle_time_s": "counter",
        }
        return {name: method for name, method in methods.items() if method and getattr(self, name) is not None}

    def to_dict(self) -> dict[str, Any]:
        """A value that JSON holds; `from_dict` is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> WindowSummary:
        devices = []
        for device in value["devices"]:
            bounds = device["thermal_throttle_s"]
            devices.append(
                DeviceWindow(
                    **device | {"thermal_throttle_s": bounds and tuple(bounds), "problems": tuple(device["problems"])}
                )
            )
        return cls(devices=tuple(devices), peak_power_w=value["peak_power_w"])

    def _share(self, device_seconds: float | None) -> float | None:
        return None if device_seconds is None else device_seconds / self.device_seconds


class Unusable(ValueError):
    """Readings that do not support the value asked of them."""


class WentBackwards(Unusable):
    """A counter lost its past, as when a device is reset."""


def summarise(table: pa.Table, start_ns: int, end_ns: int, devices: Iterable[str]) -> WindowSummary:
    """The window from `start_ns` to `end_ns` of one node's monotonic clock, for the given devices of that node.

    `table` has `telemetry.samples.SCHEMA`, and must reach some ticks past both edges: counters are interpolated
    linearly between the ticks around an edge. Raises ValueError if the window is empty.
    """
    if end_ns <= start_ns:
        raise ValueError(f"the window is empty: it starts at {start_ns} ns and ends at {end_ns} ns")
    samples = {
        device: table.filter(pc.field("device") == device).sort_by("time_ns") for device in dict.fromkeys(devices)
    }
    return WindowSummary(
        devices=tuple(_device_window(device, rows, start_ns, end_ns) for device, rows in samples.items()),
        peak_power_w=_peak_power_w(list(samples.values()), start_ns, end_ns),
    )


def combine(summaries: Sequence[WindowSummary]) -> WindowSummary:
    """One trial's windows on all its nodes as one."""
    return WindowSummary(
        devices=tuple(window for summary in summaries for window in summary.devices),
        peak_power_w=_total(summary.peak_power_w for summary in summaries),
    )


def counter_difference(time_ns: np.ndarray, value: np.ndarray, start_ns: int, end_ns: int) -> float:
    """Growth of a cumulative counter over a window, read at `time_ns` [n] (int64, ascending) as `value` [n] (uint64).

    Raises Unusable if an edge is not between two readings at most MAX_GAP_NS apart, the second followed as soon by a
    third (a call that hangs returns a value much younger than its time), or if the counter decreased.
    """
    first, last = _bracket(time_ns, start_ns, end_ns)
    for edge, before in (("start", first), ("end", last - 1)):
        _require_no_gap(time_ns[before : before + 3], f"at the window's {edge}")
    time_ns, value = time_ns[first : last + 1], value[first : last + 1]
    if np.any(value[1:] < value[:-1]):
        raise WentBackwards("went backwards")
    growth = np.interp([0, end_ns - start_ns], time_ns - start_ns, value - value[0])
    return float(growth[1] - growth[0])


def integral(time_ns: np.ndarray, value: np.ndarray, start_ns: int, end_ns: int) -> float:
    """Trapezoidal integral over a window in value-seconds, of readings `value` [n] at `time_ns` [n] (ascending).

    Raises Unusable if the readings do not span the window or leave a gap over MAX_GAP_NS.
    """
    first, last = _bracket(time_ns, start_ns, end_ns)
    _require_no_gap(time_ns[first : last + 1], "in the window")
    inside = (time_ns > start_ns) & (time_ns < end_ns)
    times = np.concatenate([[0], time_ns[inside] - start_ns, [end_ns - start_ns]])
    return float(np.trapezoid(np.interp(times, time_ns - start_ns, value), times)) / 1e9


def _bracket(time_ns: np.ndarray, start_ns: int, end_ns: int) -> tuple[int, int]:
    """Positions of the last reading at or before the start and the first at or after the end."""
    first = int(np.searchsorted(time_ns, start_ns, side="right")) - 1
    last = int(np.searchsorted(time_ns, end_ns, side="left"))
    if first < 0:
        raise Unusable("has no reading before the window")
    if last == len(time_ns):
        raise Unusable("has no reading after the window")
    return first, last


def _require_no_gap(time_ns: np.ndarray, where: str) -> None:
    gap_ns = int(np.max(np.diff(time_ns)))
    if gap_ns > MAX_GAP_NS:
        raise Unusable(f"was not refreshed for {gap_ns / 1e9:.1f} s {where}")


def _device_window(device: str, rows: pa.Table, start_ns: int, end_ns: int) -> DeviceWindow:
    duration_s = (end_ns - start_ns) / 1e9
    inside = rows.filter((pc.field("time_ns") >= start_ns) & (pc.field("time_ns") <= end_ns))
    problems: list[str] = [] if inside.num_rows else ["has no samples in the window"]
    energy_method = _energy_method(rows)
    energy_j: float | None = None
    integrated_j: float | None = None
    reset = False
    try:
        energy_j = _energy_j(rows, start_ns, end_ns)
    except Unusable as problem:
        problems.append(str(problem))
        reset = isinstance(problem, WentBackwards)
    if energy_method == "counter":
        try:
            integrated_j = _integrated_j(rows, start_ns, end_ns)
        except Unusable as problem:
            problems.append(str(problem))
    ratio = _ratio(integrated_j, energy_j)
    if ratio is not None and duration_s >= MIN_RATIO_S and not RATIO_BOUNDS[0] <= ratio <= RATIO_BOUNDS[1]:
        problems.append(f"integrated power gives {ratio:.3f} times the energy counter's energy")
    throttle_s: dict[str, float | None] = dict.fromkeys(THROTTLE_CAUSES)
    refused: set[str] = set()
    for cause in THROTTLE_CAUSES:
        try:
            throttle_s[cause] = _throttle_s(rows, cause, start_ns, end_ns, reset)
        except Unusable as problem:
            problems.append(str(problem))
            refused.add(cause)
    thermal = [seconds for cause in ("sw_thermal", "hw_thermal") if (seconds := throttle_s[cause]) is not None]
    thermal_known = bool(thermal) and refused.isdisjoint(("sw_thermal", "hw_thermal"))
    return DeviceWindow(
        device=device,
        duration_s=duration_s,
        energy_j=energy_j,
        energy_method=energy_method,
        integrated_j=integrated_j,
        throttle_s=throttle_s,
        thermal_throttle_s=(max(thermal), min(sum(thermal), duration_s)) if thermal_known else None,
        mean_sm_clock_mhz=pc.mean(inside["sm_clock_mhz"]).as_py(),
        mean_gpu_temp_c=pc.mean(inside["gpu_temp_c"]).as_py(),
        peak_gpu_temp_c=pc.max(inside["gpu_temp_c"]).as_py(),
        peak_hbm_temp_c=pc.max(inside["hbm_temp_c"]).as_py(),
        sample_count=inside.num_rows,
        problems=tuple(f"{device}: {problem}" for problem in problems),
    )


def _energy_method(rows: pa.Table) -> str | None:
    declared = rows["energy_method"].drop_null()
    if not len(declared):
        return None
    method: str = declared[0].as_py()
    return "integrated" if method == "counter" and not len(rows["energy_mj"].drop_null()) else method


def _energy_j(rows: pa.Table, start_ns: int, end_ns: int) -> float | None:
    """Energy by the counter; by integrated power for a device that has none; None for one that has neither."""
    time_ns, energy_mj = _series(rows, "energy_mj")
    if not len(time_ns):
        return _integrated_j(rows, start_ns, end_ns)
    try:
        return _counted_mj(time_ns, energy_mj, start_ns, end_ns) / 1000
    except Unusable as problem:
        raise type(problem)(f"energy counter {problem}") from None


def _integrated_j(rows: pa.Table, start_ns: int, end_ns: int) -> float | None:
    """Energy by sampled power; None where none was sampled."""
    time_ns, power_w = _series(rows, "power_w")
    if not len(time_ns):
        return None
    try:
        return integral(time_ns, power_w, start_ns, end_ns)
    except Unusable as problem:
        raise Unusable(f"power {problem}") from None


def _counted_mj(time_ns: np.ndarray, energy_mj: np.ndarray, start_ns: int, end_ns: int) -> float:
    """Growth of an energy counter over a window. Raises Unusable where a fault may hide in it.

    The counter moves only as often as the driver refreshes it (100 ms on Hopper), so a reading that repeats the one
    before is not a new tick: edges are interpolated between readings at which it had moved.
    """
    moved = np.flatnonzero(energy_mj[1:] != energy_mj[:-1]) + 1
    tick_ns, tick_mj = time_ns[moved], energy_mj[moved]
    grown_mj = counter_difference(tick_ns, tick_mj, start_ns, end_ns)
    first, last = _bracket(tick_ns, start_ns, end_ns)
    moved = moved[first : last + 1]
    still_ns = int(np.max(time_ns[moved[1:] - 1] - time_ns[moved[:-1]]))
    if still_ns > MAX_GAP_NS:
        raise Unusable(f"stood still for {still_ns / 1e9:.1f} s")
    mj_per_ns = MAX_DEVICE_W / 1e6
    if np.any(np.diff(energy_mj[moved]) > mj_per_ns * (np.diff(time_ns[moved]) + MAX_GAP_NS)):
        raise Unusable(f"grew faster than {MAX_DEVICE_W} W")
    time_ns, energy_mj = time_ns[moved[0] : moved[-1] + 1], energy_mj[moved[0] : moved[-1] + 1]
    gap_ns = np.diff(time_ns)
    hidden = (gap_ns > MAX_GAP_NS) & (energy_mj[1:] <= mj_per_ns * gap_ns)
    if np.any(hidden):
        raise Unusable(f"may have been reset while it was not read for {gap_ns[hidden][0] / 1e9:.1f} s")
    return grown_mj


def _throttle_s(rows: pa.Table, cause: str, start_ns: int, end_ns: int, reset: bool) -> float | None:
    """Seconds throttled for a cause. A counter that stands at 0 hides a reset: `reset` says that another one saw it."""
    time_ns, throttled_ns = _series(rows, f"throttle_{cause}_ns")
    if not len(time_ns):
        return None
    try:
        grown_ns = counter_difference(time_ns, throttled_ns, start_ns, end_ns)
        if reset:
            raise Unusable("may have been reset with the energy counter")
        duration_ns = end_ns - start_ns
        if grown_ns > 1.02 * duration_ns + 50e6:  # more than late readings explain
            raise Unusable("ran faster than time")
    except Unusable as problem:
        raise Unusable(f"{cause} throttle counter {problem}") from None
    return min(grown_ns, duration_ns) / 1e9


def _peak_power_w(samples: list[pa.Table], start_ns: int, end_ns: int) -> float | None:
    """Highest sum of the devices' power at the ticks of the first one, the others' interpolated."""
    series = [_series(rows, "power_w") for rows in samples]
    if not series or not all(len(time_ns) for time_ns, _ in series):
        return None
    ticks = series[0][0]
    ticks = ticks[(ticks >= start_ns) & (ticks <= end_ns)]
    if not len(ticks):
        return None
    return float(max(sum(np.interp(ticks - start_ns, time_ns - start_ns, power_w) for time_ns, power_w in series)))


def _series(rows: pa.Table, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Times (int64 ns) and values of a column's readings."""
    known = rows.select(["time_ns", column]).drop_null()
    return known["time_ns"].to_numpy(), known[column].to_numpy()


def _ratio(integrated_j: float | None, counted_j: float | None) -> float | None:
    return integrated_j / counted_j if integrated_j is not None and counted_j else None


def _all_known(values: Iterable[float | None]) -> list[float] | None:
    every = list(values)
    known = [value for value in every if value is not None]
    return known if known and len(known) == len(every) else None


def _max(values: Iterable[float | None]) -> float | None:
    known = _all_known(values)
    return None if known is None else max(known)


def _total(values: Iterable[float | None]) -> float | None:
    known = _all_known(values)
    return None if known is None else math.fsum(known)
