"""What one device's samples say of a window: its energy, throttling, states, activities, traffic and events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry import counters
from telemetry.devices import DeviceInfo, throttle_bits
from telemetry.samples import COUNTERS, GAUGES, MEANS, THROTTLE_CAUSES, TRAFFIC

STEADY_POWER = ("power_average_w", "power_w")
"""Sampled power for the energy of a window, of which a device may lack the first. Instant power, at 10 Hz, beats with
the steps, which average power does not; but this trails, so that of a window soon after the load's begin it lacks some.
Where they differ from the energy counter, the nearer one is held against that."""

INSTANT_POWER = ("power_w", "power_average_w")
"""Sampled power for peaks, and for the slivers between a window's edges and the counters' readings, likewise. Average
power trails by half a second: when the load ends with the window, it would have the sliver after it at full load."""

RATIO_BOUNDS = (0.95, 1.05)
"""Integrated power over the counter's energy: outside, one of the two is wrong."""

MIN_RATIO_S = 2.0
"""Shorter windows are left alone: what an edge misses, a tick of the counter at most, may be over 5% of them."""

FABRICS = ("pcie", "link")

THERMAL = ("sw_thermal", "hw_thermal")
POWER = ("power_cap", "hw_brake")
"""Causes of one kind: a device's bits may not tell them apart."""

_READINGS = (*GAUGES, *MEANS, *COUNTERS, "throttle_reasons")

T = TypeVar("T")
Figure = Callable[[np.ndarray, np.ndarray, int, int], T]
"""What the readings of a column, times and values, come to in a window, start and end; raises Unusable."""


@dataclass(frozen=True)
class DeviceWindow:
    """One device over its node's window of `duration_s` seconds. None is unknown.

    `energy_method`: `counter` (hardware counter), `integrated` (from sampled power) or `estimated` (a model's power);
    None where there were no samples. `integrated_j` is the energy by sampled power beside a hardware counter's: it is
    compared with `energy_j` and never takes its place.

    `throttle_s` holds seconds by cause, from counters; the power cap's of a device without that counter is the share of
    samples. `throttle_time_s` is the time lost to heat, within the bounds `thermal_throttle_s`. Counters prove the
    larger one of software and hardware slowdown, which may coincide: the bounds are that one and the sum (at most the
    duration). Without them it is the share of samples. `throttle_method` and `power_cap_method`: `counter`, `sampled`.

    `bytes_per_s` is by column of `telemetry.samples.TRAFFIC`, `utilisation` by fabric: the busier direction's share of
    its peak. `tensor_activity` and `dram_activity` are means over time. `sample_count` counts the samples that hold any
    reading. `problems` name the device, the columns, and why they give no figure or want looking at.
    """

    device: str
    duration_s: float
    energy_j: float | None
    energy_method: str | None
    integrated_j: float | None
    throttle_s: dict[str, float | None]
    throttle_time_s: float | None
    thermal_throttle_s: tuple[float, float] | None
    throttle_method: str | None
    power_cap_method: str | None
    mean_hbm_power_w: float | None
    mean_sm_clock_mhz: float | None
    min_sm_clock_mhz: float | None
    mean_gpu_temp_c: float | None
    peak_gpu_temp_c: float | None
    min_gpu_temp_margin_c: float | None
    peak_hbm_temp_c: float | None
    tensor_activity: float | None
    dram_activity: float | None
    bytes_per_s: dict[str, float | None]
    utilisation: dict[str, float | None]
    sample_count: int
    problems: tuple[str, ...]

    @property
    def mean_power_w(self) -> float | None:
        """Energy by time, in W."""
        return None if self.energy_j is None else self.energy_j / self.duration_s


def device_window(
    device: str,
    rows: pa.Table,
    start_ns: int,
    end_ns: int,
    infos: Mapping[str, DeviceInfo],
    together: Collection[str],
) -> DeviceWindow:
    """What happened to one device from `start_ns` to `end_ns` of its node's monotonic clock.

    `rows` are its samples by `telemetry.samples.SCHEMA`, in order of time; `infos` is by UUID, of all devices of the
    node, as far as they are known; `together` are the UUIDs of all devices of the window.
    """
    samples = _Samples(rows, start_ns, end_ns)
    power_column = _first_of(STEADY_POWER, rows)
    drawn_j = partial(_drawn_j, [_readings_of(rows, column) for column in INSTANT_POWER])
    method = _energy_method(device, rows, infos, together)
    integrated_j = samples.ask(power_column, counters.integral)
    energy_j = integrated_j
    if samples.has("energy_mj"):
        refreshed_ns = _refreshed_ns(rows)
        energy_j = samples.ask("energy_mj", partial(counters.energy_j, drawn_j=drawn_j, refreshed_ns=refreshed_ns))
        if integrated_j is not None and energy_j and not _is_near(integrated_j / energy_j):
            instant_j = samples.ask(instant := _first_of(INSTANT_POWER, rows), counters.integral)
            if instant_j is not None and abs(instant_j - energy_j) < abs(integrated_j - energy_j):
                power_column, integrated_j = instant, instant_j
    throttle_s = {cause: samples.count(f"throttle_{cause}_ns", counters.throttled_s) for cause in THROTTLE_CAUSES}
    power_cap_method = "counter"
    if not samples.has("throttle_power_cap_ns") and (capped := samples.flagged(POWER)):
        throttle_s["power_cap"], power_cap_method = capped[0], "sampled"
    throttle_time_s, thermal_throttle_s, throttle_method = _lost_to_heat(samples, throttle_s)
    hbm_power = samples.ask("hbm_power_w", counters.sampled)
    clock = samples.ask("sm_clock_mhz", counters.sampled)
    temperature = samples.ask("gpu_temp_c", counters.sampled)
    hbm_temperature = samples.ask("hbm_temp_c", counters.sampled)
    bytes_per_s, utilisation = _traffic_by_fabric(samples, infos.get(device))
    window = DeviceWindow(
        device=device,
        duration_s=samples.duration_s,
        energy_j=energy_j,
        energy_method=method,
        integrated_j=integrated_j if method == "counter" else None,
        throttle_s=throttle_s,
        throttle_time_s=throttle_time_s,
        thermal_throttle_s=thermal_throttle_s,
        throttle_method=throttle_method,
        power_cap_method=None if throttle_s["power_cap"] is None else power_cap_method,
        mean_hbm_power_w=hbm_power and hbm_power.mean,
        mean_sm_clock_mhz=clock and clock.mean,
        min_sm_clock_mhz=clock and clock.lowest,
        mean_gpu_temp_c=temperature and temperature.mean,
        peak_gpu_temp_c=temperature and temperature.highest,
        min_gpu_temp_margin_c=samples.ask("gpu_temp_margin_c", counters.lowest),
        peak_hbm_temp_c=hbm_temperature and hbm_temperature.highest,
        tensor_activity=samples.ask("tensor_activity", counters.mean_of_means),
        dram_activity=samples.ask("dram_activity", counters.mean_of_means),
        bytes_per_s=bytes_per_s,
        utilisation=utilisation,
        sample_count=samples.count_inside(),
        problems=(),
    )
    problems = [*samples.refusals, *_errors(samples), *_disagreement(window, power_column)]
    if not window.sample_count:
        problems.append("has no readings in the window")
    return replace(window, problems=tuple(f"{device}: {problem}" for problem in problems))


def power_readings(rows: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Times and watts of a device's sampled power, instant if it has it; empty where it has none."""
    return _readings_of(rows, _first_of(INSTANT_POWER, rows))


def energy_ratio(integrated_j: float | None, counted_j: float | None) -> float | None:
    """Integrated power over counted energy, near 1 where both are right; None unless both are known."""
    return integrated_j / counted_j if integrated_j is not None and counted_j else None


class _Samples:
    """One device's samples about a window, and why columns of them give no figure."""

    def __init__(self, rows: pa.Table, start_ns: int, end_ns: int) -> None:
        self._rows, self._start_ns, self._end_ns = rows, start_ns, end_ns
        self._refused: dict[str, dict[str, None]] = {}  # columns by reason
        self._reset = False

    @property
    def duration_s(self) -> float:
        return (self._end_ns - self._start_ns) / 1e9

    @property
    def refusals(self) -> list[str]:
        return [f"{', '.join(columns)} {reason}" for reason, columns in self._refused.items()]

    def has(self, column: str) -> bool:
        """Whether the device has ever said anything in this column."""
        return _has_values(self._rows, column)

    def ask(self, column: str, figure: Figure[T]) -> T | None:
        """None for a column that the device does not have, and with a refusal for readings that do not support it."""
        if not self.has(column):
            return None
        try:
            return figure(*_readings_of(self._rows, column), self._start_ns, self._end_ns)
        except counters.Unusable as reason:
            self._refused.setdefault(str(reason), {})[column] = None
            self._reset |= column == "energy_mj" and isinstance(reason, counters.Reset)
            return None

    def count(self, column: str, figure: Figure[T]) -> T | None:
        """`ask` of a counter that, standing near 0, may hide a reset which the energy counter shows."""
        if not self._reset:
            return self.ask(column, figure)

        def refuse(*_: object) -> T:
            raise counters.Reset("may have been reset with energy_mj")

        return self.ask(column, refuse)

    def flagged(self, causes: Collection[str]) -> tuple[float, float, float] | None:
        """Seconds in which any bit of these causes was set, by the share of samples, and their bounds."""
        bits = throttle_bits(self.latest("kind"))
        mask = reduce(or_, (bits.get(cause, 0) for cause in causes))

        def seconds(time_ns: np.ndarray, value: np.ndarray, start_ns: int, end_ns: int) -> tuple[float, float, float]:
            return counters.seconds_set(time_ns, (value & np.uint64(mask)) != 0, start_ns, end_ns)

        return self.ask("throttle_reasons", seconds) if mask else None

    def latest(self, column: str) -> Any:
        """The last value up to the window's end, None if there is none."""
        known = self._rows.select(["time_ns", column]).drop_null()
        count = int(np.searchsorted(known["time_ns"].to_numpy(), self._end_ns, side="right"))
        return known[column][count - 1].as_py() if count else None

    def count_inside(self) -> int:
        """Samples in the window that hold any reading."""
        held = [self._rows[column].is_valid().to_numpy() for column in _READINGS if self.has(column)]
        time_ns = self._rows["time_ns"].to_numpy()
        inside = (time_ns >= self._start_ns) & (time_ns <= self._end_ns)
        return int(np.count_nonzero(inside & np.any(held, axis=0))) if held else 0


def _energy_method(
    device: str, rows: pa.Table, infos: Mapping[str, DeviceInfo], together: Collection[str]
) -> str | None:
    declared = rows["energy_method"].drop_null()
    method: str | None = declared[0].as_py() if len(declared) else None
    if method == "shared":
        card = infos[device].card if device in infos else None
        whole = card is not None and all(uuid in together for uuid, info in infos.items() if info.card == card)
        method = "counter" if whole else "estimated"
    return "integrated" if method == "counter" and not _has_values(rows, "energy_mj") else method


def _lost_to_heat(
    samples: _Samples, throttle_s: Mapping[str, float | None]
) -> tuple[float | None, tuple[float, float] | None, str | None]:
    """Seconds, their bounds and how they were got."""
    counted = [cause for cause in THERMAL if samples.has(f"throttle_{cause}_ns")]
    if not counted:
        flagged = samples.flagged(THERMAL)
        return (None, None, None) if flagged is None else (flagged[0], flagged[1:], "sampled")
    seconds = [known for cause in counted if (known := throttle_s[cause]) is not None]
    if len(seconds) < len(counted):
        return None, None, None
    return max(seconds), (max(seconds), min(sum(seconds), samples.duration_s)), "counter"


def _traffic_by_fabric(
    samples: _Samples, info: DeviceInfo | None
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Bytes per second by column, and by fabric the share of its peak in the busier direction."""
    rates: dict[str, float | None] = {}
    shares: dict[str, float | None] = {}
    for fabric in FABRICS:
        peak = getattr(info, f"{fabric}_peak_bytes_per_s", None)
        rate = partial(counters.bytes_per_s, peak_bytes_per_s=peak)
        directions = {column: samples.count(column, rate) for column in TRAFFIC if column.startswith(fabric)}
        known = [value for value in directions.values() if value is not None]
        rates |= directions
        shares[fabric] = max(known) / peak if peak and len(known) == len(directions) else None
    return rates, shares


def _errors(samples: _Samples) -> list[str]:
    """The device's errors in the window, as problems."""
    problems = []
    if errors := samples.count("ecc_uncorrected", counters.events):
        problems.append(f"ecc_uncorrected grew by {errors}: memory errors that were not corrected")
    if errors := samples.ask("xid_errors", counters.events):
        problems.append(f"xid_errors grew by {errors}, the last XID {samples.latest('xid')}")
    return problems


def _disagreement(window: DeviceWindow, power_column: str) -> list[str]:
    """A problem if integrated power and the energy counter are farther apart than RATIO_BOUNDS."""
    ratio = energy_ratio(window.integrated_j, window.energy_j)
    if ratio is None or window.duration_s < MIN_RATIO_S or _is_near(ratio):
        return []
    return [f"{power_column} gives, integrated, {ratio:.3f} times the energy of energy_mj"]


def _is_near(ratio: float) -> bool:
    return RATIO_BOUNDS[0] <= ratio <= RATIO_BOUNDS[1]


def _first_of(columns: tuple[str, ...], rows: pa.Table) -> str:
    """The first of these columns that the device has; the very first where it has none."""
    return next((column for column in columns if _has_values(rows, column)), columns[0])


def _has_values(rows: pa.Table, column: str) -> bool:
    return bool(rows[column].null_count < rows.num_rows)


def _drawn_j(powers: Sequence[tuple[np.ndarray, np.ndarray]], start_ns: int, end_ns: int) -> float | None:
    """Energy by the first sampled power that was read all the time; None where none was."""
    for time_ns, power_w in powers:
        with suppress(counters.Unusable):
            return counters.integral(time_ns, power_w, start_ns, end_ns)
    return None


def _readings_of(rows: pa.Table, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Times (int64 ns) and values of a column's readings."""
    known = rows.select(["time_ns", column]).drop_null()
    return known["time_ns"].to_numpy(), known[column].to_numpy()


def _refreshed_ns(rows: pa.Table) -> np.ndarray:
    """When the value of each reading of the energy counter was new: where that is not known, when it was read."""
    known = rows.select(["energy_mj", "energy_ns", "time_ns"]).filter(rows["energy_mj"].is_valid())
    refreshed_ns: np.ndarray = pc.coalesce(known["energy_ns"], known["time_ns"]).to_numpy()
    return refreshed_ns
