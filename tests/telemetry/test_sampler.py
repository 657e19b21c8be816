from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from telemetry.devices import DeviceInfo
from telemetry.devices.cpu import IDLE_WATTS_PER_CPU, WATTS_PER_BUSY_CPU, CpuDevice, cpu_uuid
from telemetry.sampler import Sampler
from telemetry.samples import SampleBuffer
from telemetry.windows.trial import summarise

TRIES = 5
"""Times that a busy machine may wake the sampler late."""


class Failing:
    """A device whose driver call fails each second time."""

    info = DeviceInfo(uuid="GPU-lost", index=1, name="lost", kind="nvidia", energy_method="counter")

    def __init__(self) -> None:
        self.reads = 0

    def read(self, full: bool) -> dict[str, Any]:
        self.reads += 1
        if self.reads % 2 == 0:
            raise OSError("GPU is lost")
        return {"power_w": 1.0}


class Slow:
    info = DeviceInfo(uuid="GPU-slow", index=0, name="slow", kind="nvidia", energy_method="counter")

    def read(self, full: bool) -> dict[str, Any]:
        time.sleep(0.07)
        return {}


def watch(device: Any, count: int, period_s: float) -> pa.Table:
    """The first samples of a device, `count` or more."""
    buffer = SampleBuffer(capacity_rows=10_000)
    sampler = Sampler([device], buffer, "n", period_s)
    sampler.start()
    while (samples := buffer.between(0, time.monotonic_ns())).num_rows < count:
        time.sleep(period_s)
    sampler.stop()
    return samples


def late_ns(times: np.ndarray, period_ns: int) -> np.ndarray:
    """How far each sample is from the grid of the first one, however many ticks were skipped."""
    return (times - times[0] + period_ns // 2) % period_ns - period_ns // 2


def test_the_real_cpu_device_is_sampled_and_summarised() -> None:
    cpu = CpuDevice(os.getpid())
    buffer = SampleBuffer(capacity_rows=10_000)
    sampler = Sampler([cpu], buffer, "n", period_s=0.05)
    began = time.monotonic_ns()
    sampler.start()
    time.sleep(0.5)
    start_ns = time.monotonic_ns()
    spinning = "import time\nwhile time.process_time() < 1.5: pass"
    subprocess.run([sys.executable, "-c", spinning], check=True)  # in this process it would hold the sampler up
    end_ns = time.monotonic_ns()
    assert buffer.wait_for(end_ns + 200_000_000, timeout_s=60)
    sampler.stop()

    rows = buffer.between(began, time.monotonic_ns())
    assert set(rows["device"].to_pylist()) == {cpu_uuid()}
    assert set(rows["energy_method"].to_pylist()) == {"estimated"}
    assert pc.max(rows["process_cpu_utilisation"]).as_py() > 0.2 / (os.cpu_count() or 1)
    assert 0 <= pc.min(rows["cpu_utilisation"]).as_py() <= pc.max(rows["cpu_utilisation"]).as_py() <= 1
    assert rows["gpu_temp_c"].null_count == rows.num_rows

    summary = summarise(rows, start_ns, end_ns, [cpu_uuid()])
    seconds, cpus = (end_ns - start_ns) / 1e9, os.cpu_count() or 1
    assert summary.energy_method == "estimated"
    assert summary.energy_j is not None
    idle_j = IDLE_WATTS_PER_CPU * cpus * seconds
    assert idle_j + WATTS_PER_BUSY_CPU * 1.2 < summary.energy_j < 1.1 * (idle_j + WATTS_PER_BUSY_CPU * cpus * seconds)
    assert summary.problems == ()


def test_a_failing_read_leaves_a_row_of_nulls() -> None:
    power = watch(Failing(), 6, 0.02)["power_w"].to_pylist()
    assert power[:6] == [1.0, None, 1.0, None, 1.0, None]


@pytest.mark.parametrize(
    ("device", "apart_ns"), [(CpuDevice(os.getpid()), 0), (Slow(), 70_000_000)], ids=["cpu", "slow"]
)
def test_the_schedule_holds_also_where_ticks_are_missed(device: Any, apart_ns: int) -> None:
    """Of the slow one each second tick is there, or a later one."""
    for _ in range(TRIES):
        times = watch(device, 7, 0.05)["time_ns"].to_numpy()
        assert np.min(np.diff(times)) > apart_ns
        if np.median(np.abs(late_ns(times, 50_000_000))) < 10_000_000:
            return
    raise AssertionError(late_ns(times, 50_000_000))
