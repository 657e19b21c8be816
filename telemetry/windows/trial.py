"""What happened to a trial's devices between two instants: energy, throttling, clocks, temperatures, traffic.

A value that cannot be trusted is None and says why in `problems`; it is never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.counters import MAX_GAP_NS, Unusable, integral
from telemetry.devices import DeviceInfo
from telemetry.sampler import FULL_PERIOD_S
from telemetry.samples import THROTTLE_CAUSES, TRAFFIC
from telemetry.windows.device import FABRICS, DeviceWindow, device_window, energy_ratio, power_readings

MARGIN_BEFORE_NS = round(FULL_PERIOD_S * 1e9) + 2 * MAX_GAP_NS
MARGIN_AFTER_NS = 2 * MAX_GAP_NS
"""How far beyond a window's edges samples must reach: to the counters' readings before it and after it."""

SATURATED = 0.9
"""Share of its peak, as mean over the window, above which a fabric holds a trial up."""

_METHODS_BY_TRUST = ("counter", "integrated", "sampled", "estimated")

T = TypeVar("T")


@dataclass(frozen=True)
class WindowSummary:
    """The devices of a trial over its window, which may differ a little in length from node to node.

    `peak_power_w` is the highest sum over the devices; over several nodes the sum of their peaks, an upper bound, since
    their clocks are not compared. A total is None as soon as one device's share of it is. Means are over device-seconds
    but for power, which is summed over devices; a spread is the highest device's mean less the lowest one's.
    """

    devices: tuple[DeviceWindow, ...]
    peak_power_w: float | None

    @property
    def device_seconds(self) -> float:
        """Sum of the devices' windows."""
        return math.fsum(window.duration_s for window in self.devices)

    @property
    def duration_s(self) -> float:
        """Length of the longest node's window."""
        return max((window.duration_s for window in self.devices), default=0.0)

    @property
    def energy_j(self) -> float | None:
        """Sum over devices, in J."""
        return _total(window.energy_j for window in self.devices)

    @property
    def energy_by_device_j(self) -> dict[str, float | None]:
        """J by the device's UUID."""
        return {window.device: window.energy_j for window in self.devices}

    @property
    def energy_method(self) -> str | None:
        """The least trusted of the devices' methods; None if one of them has none."""
        return _least_trusted(window.energy_method for window in self.devices)

    @property
    def energy_ratio(self) -> float | None:
        """Integrated power over the energy by the counters; None unless every device has both."""
        return energy_ratio(_total(window.integrated_j for window in self.devices), self.energy_j)

    @property
    def mean_power_w(self) -> float | None:
        """Sum over devices of energy by time."""
        return _total(window.mean_power_w for window in self.devices)

    @property
    def power_spread_w(self) -> float | None:
        """The highest device's mean power less the lowest one's."""
        return _spread(window.mean_power_w for window in self.devices)

    @property
    def mean_hbm_power_w(self) -> float | None:
        """Sum over devices of their memory's power."""
        return _total(window.mean_hbm_power_w for window in self.devices)

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
        """Device-seconds lost to heat."""
        return _total(window.throttle_time_s for window in self.devices)

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
        """Mean over device-seconds."""
        return self._mean(lambda window: window.mean_sm_clock_mhz)

    @property
    def min_sm_clock_mhz(self) -> float | None:
        """The lowest sample of any device."""
        return _min(window.min_sm_clock_mhz for window in self.devices)

    @property
    def sm_clock_spread_mhz(self) -> float | None:
        """The fastest device's mean clock less the slowest one's."""
        return _spread(window.mean_sm_clock_mhz for window in self.devices)

    @property
    def mean_gpu_temp_c(self) -> float | None:
        """Mean over device-seconds."""
        return self._mean(lambda window: window.mean_gpu_temp_c)

    @property
    def peak_gpu_temp_c(self) -> float | None:
        """The hottest sample of any device."""
        return _max(window.peak_gpu_temp_c for window in self.devices)

    @property
    def gpu_temp_spread_c(self) -> float | None:
        """The hottest device's mean temperature less the coolest one's."""
        return _spread(window.mean_gpu_temp_c for window in self.devices)

    @property
    def min_gpu_temp_margin_c(self) -> float | None:
        """The least distance of any device to the temperature at which it slows down."""
        return _min(window.min_gpu_temp_margin_c for window in self.devices)

    @property
    def peak_hbm_temp_c(self) -> float | None:
        """The hottest sample of any device's memory."""
        return _max(window.peak_hbm_temp_c for window in self.devices)

    @property
    def tensor_activity(self) -> float | None:
        """Share of cycles in which tensor cores were busy, mean over device-seconds."""
        return self._mean(lambda window: window.tensor_activity)

    @property
    def dram_activity(self) -> float | None:
        """Share of cycles in which memory was busy, mean over device-seconds."""
        return self._mean(lambda window: window.dram_activity)

    @property
    def pcie_bytes_per_s(self) -> float | None:
        """Received and sent, over all devices."""
        return self._bytes_per_s("pcie")

    @property
    def link_bytes_per_s(self) -> float | None:
        """Received and sent, over all devices."""
        return self._bytes_per_s("link")

    @property
    def pcie_utilisation(self) -> float | None:
        """Share of its peak that the busiest direction of the busiest device reached."""
        return _max(window.utilisation["pcie"] for window in self.devices)

    @property
    def link_utilisation(self) -> float | None:
        """Share of its peak that the busiest direction of the busiest device reached."""
        return _max(window.utilisation["link"] for window in self.devices)

    @property
    def saturated(self) -> tuple[str, ...]:
        """A line for each fabric that was at over 90% of its peak on average: its busiest device, and how busy."""
        lines = []
        for fabric in FABRICS:
            shares = {window.device: share for window in self.devices if (share := window.utilisation[fabric])}
            busiest = max(shares, key=shares.__getitem__, default=None)
            if busiest is not None and shares[busiest] > SATURATED:
                lines.append(f"{busiest}: {fabric} is saturated, at {shares[busiest]:.0%} of its peak")
        return tuple(lines)

    @property
    def sample_count(self) -> int:
        """Samples in the window that hold any reading, of all devices."""
        return sum(window.sample_count for window in self.devices)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why figures are missing or want looking at, each with its device."""
        return tuple(problem for window in self.devices for problem in window.problems)

    def metrics(self) -> dict[str, float | None]:
        """The figures under the names by which they are recorded."""
        names = (
            "mean_power_w",
            "peak_power_w",
            "power_spread_w",
            "mean_hbm_power_w",
            "energy_ratio",
            "throttle_ratio",
            "power_cap_ratio",
            "throttle_time_s",
            "mean_sm_clock_mhz",
            "min_sm_clock_mhz",
            "sm_clock_spread_mhz",
            "mean_gpu_temp_c",
            "peak_gpu_temp_c",
            "gpu_temp_spread_c",
            "min_gpu_temp_margin_c",
            "peak_hbm_temp_c",
            "tensor_activity",
            "dram_activity",
            "pcie_bytes_per_s",
            "pcie_utilisation",
            "link_bytes_per_s",
            "link_utilisation",
        )
        return {name: getattr(self, name) for name in names}

    def methods(self) -> dict[str, str]:
        """How the power and throttle figures that are known were got, by metric."""
        throttle = _least_trusted(window.throttle_method for window in self.devices)
        methods = {
            "mean_power_w": self.energy_method,
            "peak_power_w": "estimated" if self.energy_method == "estimated" else "sampled",
            "power_spread_w": self.energy_method,
            "throttle_ratio": throttle,
            "power_cap_ratio": _least_trusted(window.power_cap_method for window in self.devices),
            "throttle_time_s": throttle,
        }
        return {name: method for name, method in methods.items() if method and getattr(self, name) is not None}

    def to_dict(self) -> dict[str, Any]:
        """A value that JSON holds; `from_dict` is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> WindowSummary:
        """What `to_dict` made, before or after a way through JSON."""
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

    def _mean(self, figure: Callable[[DeviceWindow], float | None]) -> float | None:
        values = [(figure(window), window.duration_s) for window in self.devices]
        return self._share(_total(None if value is None else value * seconds for value, seconds in values))

    def _bytes_per_s(self, fabric: str) -> float | None:
        return _total(
            window.bytes_per_s[column] for window in self.devices for column in TRAFFIC if column.startswith(fabric)
        )


def summarise(
    table: pa.Table,
    start_ns: int,
    end_ns: int,
    devices: Iterable[str],
    infos: Mapping[str, DeviceInfo] | None = None,
) -> WindowSummary:
    """The window from `start_ns` to `end_ns` of one node's monotonic clock, for the given devices of that node.

    `table` has `telemetry.samples.SCHEMA`, and must reach MARGIN_BEFORE_NS before the window and MARGIN_AFTER_NS past
    it. `infos`, of all devices of the node, has the peaks of fabrics, and tells which devices share a card: energy that
    is `shared` is the `counter`'s if all devices of the card are in the window, and else `estimated`. Raises ValueError
    if the window is empty.
    """
    if end_ns <= start_ns:
        raise ValueError(f"the window is empty: it starts at {start_ns} ns and ends at {end_ns} ns")
    known = infos or {}
    names = list(dict.fromkeys(devices))
    windows, powers = [], []
    for device in names:
        rows = table.filter(pc.equal(table["device"], device)).sort_by("time_ns")
        windows.append(device_window(device, rows, start_ns, end_ns, known, names))
        powers.append(power_readings(rows))
    return WindowSummary(devices=tuple(windows), peak_power_w=_peak_power_w(powers, start_ns, end_ns))


def combine(summaries: Sequence[WindowSummary]) -> WindowSummary:
    """One trial's windows on all its nodes as one."""
    return WindowSummary(
        devices=tuple(window for summary in summaries for window in summary.devices),
        peak_power_w=_total(summary.peak_power_w for summary in summaries),
    )


def _peak_power_w(powers: list[tuple[np.ndarray, np.ndarray]], start_ns: int, end_ns: int) -> float | None:
    """Highest sum of the devices' power at the ticks of the first one, the others' interpolated."""
    try:
        for time_ns, power_w in powers:
            integral(time_ns, power_w, start_ns, end_ns)  # without a gap
    except Unusable:
        return None
    ticks = powers[0][0] if powers else np.empty(0)
    ticks = ticks[(ticks >= start_ns) & (ticks <= end_ns)]
    if not len(ticks):
        return None
    return float(max(sum(np.interp(ticks - start_ns, time_ns - start_ns, power_w) for time_ns, power_w in powers)))


def _least_trusted(methods: Iterable[str | None]) -> str | None:
    known = _all_known(methods)
    return None if known is None else max(known, key=_METHODS_BY_TRUST.index)


def _all_known(values: Iterable[T | None]) -> list[T] | None:
    every = list(values)
    known = [value for value in every if value is not None]
    return known if known and len(known) == len(every) else None


def _max(values: Iterable[float | None]) -> float | None:
    known = _all_known(values)
    return None if known is None else max(known)


def _min(values: Iterable[float | None]) -> float | None:
    known = _all_known(values)
    return None if known is None else min(known)


def _spread(values: Iterable[float | None]) -> float | None:
    known = _all_known(values)
    return None if known is None else max(known) - min(known)


def _total(values: Iterable[float | None]) -> float | None:
    known = _all_known(values)
    return None if known is None else math.fsum(known)
