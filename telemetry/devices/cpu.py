"""The CPUs of a node without GPUs, as one device whose power is estimated."""

from __future__ import annotations

import platform
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from telemetry.devices.base import DeviceInfo

GIB = 2**30

IDLE_WATTS_PER_CPU = 0.74
WATTS_PER_BUSY_CPU = 3.50 - IDLE_WATTS_PER_CPU

_TREE_REFRESH_S = 1.0


def cpu_uuid() -> str:
    """The name of this node's CPU device."""
    return f"cpu:{socket.gethostname()}"


class CpuDevice:
    """All CPUs of this node. Its power and energy are estimates.

    Power is linear in utilisation, P = idle + slope * busy CPUs (Fan, Weber and Barroso, "Power provisioning for a
    warehouse-sized computer", ISCA 2007), with 0.74 W for an idle and 3.50 W for a busy logical CPU: the averages over
    servers that Cloud Carbon Footprint derives from SPECpower results for AWS. It knows nothing of this machine's
    processor: good for telling busy from idle, not for comparing machines or with measured energy. Energy is the same
    model integrated exactly: idle watts times the monotonic clock plus slope times busy CPU-seconds.

    `process_root` is the process whose tree gives `process_cpu_utilisation`; children that live less than a second
    may be missed.
    """

    def __init__(self, process_root: int) -> None:
        self.info = DeviceInfo(
            uuid=cpu_uuid(), index=0, name=_processor_name(), kind="cpu", energy_method="estimated", power_limit_w=None
        )
        self._cpus = psutil.cpu_count() or 1
        self._tree = _ProcessTree(process_root)
        self._throttle_files = sorted(
            Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_total_time_ms")
        )
        self._previous = (time.monotonic(), _busy_seconds(), self._tree.busy_seconds())

    def read(self, full: bool) -> dict[str, Any]:
        now, busy, tree_busy = time.monotonic(), _busy_seconds(), self._tree.busy_seconds()
        before, busy_before, tree_before = self._previous
        self._previous = (now, busy, tree_busy)
        elapsed = now - before
        idle_watts = IDLE_WATTS_PER_CPU * self._cpus
        joules = idle_watts * now + WATTS_PER_BUSY_CPU * busy
        sample: dict[str, Any] = {
            "energy_mj": round(joules * 1000),
            "throttle_hw_thermal_ns": self._throttled_ns(),
            "memory_used_gib": psutil.virtual_memory().used / GIB,
            "cpu_clock_mhz": _clock_mhz(),
            "cpu_temp_c": _temperature_c(),
        }
        if elapsed > 0:
            busy_cpus = (busy - busy_before) / elapsed
            sample["power_w"] = idle_watts + WATTS_PER_BUSY_CPU * busy_cpus
            sample["cpu_utilisation"] = min(busy_cpus / self._cpus, 1.0)
            sample["process_cpu_utilisation"] = min((tree_busy - tree_before) / elapsed / self._cpus, 1.0)
        return sample

    def _throttled_ns(self) -> int | None:
        """Thermally throttled time, averaged over CPUs; None where the kernel does not count it."""
        try:
            total_ms = sum(int(path.read_text()) for path in self._throttle_files)
        except (OSError, ValueError):
            return None
        return total_ms * 1_000_000 // len(self._throttle_files) if self._throttle_files else None


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
