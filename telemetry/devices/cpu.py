"""The CPUs of a node without GPUs, as one device whose energy the kernel counts or a model estimates."""

from __future__ import annotations

import logging
import platform
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from telemetry.devices import DeviceInfo, Precedence, Vendor

logger = logging.getLogger(__name__)

GIB = 2**30

POWERCAP = Path("/sys/class/powercap")

IDLE_WATTS_PER_CPU = 0.74
WATTS_PER_BUSY_CPU = 3.50 - IDLE_WATTS_PER_CPU

_TREE_REFRESH_S = 1.0


def cpu_uuid(hostname: str | None = None) -> str:
    """The name of a node's CPU device, by default of this one's."""
    return f"cpu:{hostname or socket.gethostname()}"


def counts_throttling() -> bool:
    """Whether the kernel counts for how long the CPUs of this node are slowed for heat."""
    return bool(_throttle_files())


def _throttle_files() -> list[Path]:
    return sorted(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_total_time_ms"))


class CpuDevice:
    """All CPUs of this node.

    Energy is RAPL's where the kernel offers it under `powercap` and lets this process read it: a `counter`, of all
    packages and of the memory that the processors count apart. It is read at every tick; power is its growth by time.

    Elsewhere both are estimates. Power is linear in utilisation, P = idle + slope * busy CPUs (Fan, Weber and Barroso,
    "Power provisioning for a warehouse-sized computer", ISCA 2007), with 0.74 W for an idle and 3.50 W for a busy
    logical CPU: the averages over servers that Cloud Carbon Footprint derives from SPECpower results for AWS. It knows
    nothing of this machine's processor: good for telling busy from idle, not for comparing machines or with measured
    energy. Energy is the same model integrated exactly: idle watts times the monotonic clock plus slope times busy
    CPU-seconds.

    `process_root` is the process whose tree gives `process_cpu_utilisation`; children that live less than a second
    may be missed.
    """

    def __init__(self, process_root: int, powercap: Path = POWERCAP) -> None:
        self._rapl = _rapl(powercap)
        self.info = DeviceInfo(
            uuid=cpu_uuid(),
            index=0,
            name=_processor_name(),
            kind="cpu",
            energy_method="counter" if self._rapl else "estimated",
        )
        self._cpus = psutil.cpu_count() or 1
        self._tree = _ProcessTree(process_root)
        self._throttle_files = _throttle_files()
        self._previous = self._state()

    def read(self, full: bool) -> dict[str, Any]:
        before, joules_before, busy_before, tree_before = self._previous
        now, joules, busy, tree_busy = self._previous = self._state()
        elapsed = now - before
        sample: dict[str, Any] = {
            "energy_mj": None if joules is None else round(joules * 1000),
            "throttle_hw_thermal_ns": self._throttled_ns(),
            "memory_used_gib": psutil.virtual_memory().used / GIB,
            "cpu_clock_mhz": _clock_mhz(),
            "cpu_temp_c": _temperature_c(),
        }
        if elapsed > 0:
            if joules is not None and joules_before is not None:
                sample["power_w"] = (joules - joules_before) / elapsed
            sample["cpu_utilisation"] = min((busy - busy_before) / elapsed / self._cpus, 1.0)
            sample["process_cpu_utilisation"] = min((tree_busy - tree_before) / elapsed / self._cpus, 1.0)
        return sample

    def _state(self) -> tuple[float, float | None, float, float]:
        """The time, energy in joules, and busy CPU-seconds of all processes and of the tree."""
        now = time.monotonic()
        counted = self._rapl.joules() if self._rapl else None
        busy = _busy_seconds()
        estimated = IDLE_WATTS_PER_CPU * self._cpus * now + WATTS_PER_BUSY_CPU * busy
        return now, counted if self._rapl else estimated, busy, self._tree.busy_seconds()

    def _throttled_ns(self) -> int | None:
        """Thermally throttled time, averaged over CPUs; None where the kernel does not count it."""
        try:
            total_ms = sum(_number(path) for path in self._throttle_files)
        except (OSError, ValueError):
            return None
        return total_ms * 1_000_000 // len(self._throttle_files) if self._throttle_files else None


class _Rapl:
    """Energy of some zones of the kernel's power capping, as one counter that does not wrap as theirs do.

    A zone's counter starts again at 0 beyond its `max_energy_range_uj`, after some minutes at full load: it must be
    read more often than that.
    """

    def __init__(self, zones: Sequence[Path]) -> None:
        self._counters = [zone / "energy_uj" for zone in zones]
        self._ranges_uj = [_number(zone / "max_energy_range_uj") for zone in zones]
        self._latest_uj = [_number(counter) for counter in self._counters]
        self._laps_uj = 0

    def joules(self) -> float | None:
        """Energy since an arbitrary moment; None if a zone cannot be read."""
        try:
            latest_uj = [_number(counter) for counter in self._counters]
        except (OSError, ValueError):
            return None
        for range_uj, before_uj, now_uj in zip(self._ranges_uj, self._latest_uj, latest_uj, strict=True):
            if now_uj < before_uj:
                self._laps_uj += range_uj
        self._latest_uj = latest_uj
        return (self._laps_uj + sum(latest_uj)) / 1e6


def _rapl(powercap: Path) -> _Rapl | None:
    """The counters of the packages and of memory (zone `dram`, which no package includes), if all may be read.

    Cores and graphics are parts of a package, `psys` has packages as its parts, and `intel-rapl-mmio` counts the same
    packages once more. AMD's processors are under `intel-rapl` too.
    """
    zones = []
    try:
        for zone in sorted(powercap.glob("intel-rapl:*")):
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                zones.append(zone)
        return _Rapl(zones) if zones else None
    except (OSError, ValueError) as error:
        logger.warning("the kernel's energy counters cannot be read, so that the CPU's power is estimated: %s", error)
        return None


def _number(path: Path) -> int:
    return int(path.read_text())


class _ProcessTree:
    """CPU time of a process and its descendants, never decreasing as they come and go."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._processes: dict[int, psutil.Process] = {}
        self._seconds: dict[int, float] = {}
        self._total = 0.0
        self._refreshed = -_TREE_REFRESH_S

    def busy_seconds(self) -> float:
        now = time.monotonic()
        if now - self._refreshed >= _TREE_REFRESH_S:
            self._refresh()
            self._refreshed = now
        for pid, process in self._processes.items():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            seconds = times.user + times.system
            self._total += max(seconds - self._seconds.get(pid, seconds), 0.0)
            self._seconds[pid] = seconds
        return self._total

    def _refresh(self) -> None:
        try:
            root = psutil.Process(self._root)
            self._processes = {process.pid: process for process in [root, *root.children(recursive=True)]}
        except psutil.Error:
            self._processes = {}
        self._seconds = {pid: seconds for pid, seconds in self._seconds.items() if pid in self._processes}


def _busy_seconds() -> float:
    """CPU-seconds that this machine's CPUs have worked since boot (guests are in user time already)."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))


def _clock_mhz() -> float | None:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return None
    return frequency.current or None if frequency else None


def _temperature_c() -> float | None:
    """The hottest reading of the processor's own sensors."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError):
        return None
    readings = [entry.current for chip in ("coretemp", "k10temp", "zenpower") for entry in sensors.get(chip, [])]
    return max(readings, default=None)


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def discover(process_root: int) -> list[CpuDevice]:
    """All CPUs of this node as one device."""
    return [CpuDevice(process_root)]


VENDOR = Vendor(kind="cpu", discover=discover, precedence=Precedence.HOST)
