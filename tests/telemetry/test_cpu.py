from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from telemetry.devices.cpu import IDLE_WATTS_PER_CPU, WATTS_PER_BUSY_CPU, CpuDevice, cpu_uuid

RANGE_UJ = 262_143_328_850


def zone(powercap: Path, number: str, name: str, energy_uj: int) -> Path:
    folder = powercap / number
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    return folder / "energy_uj"


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    """Two packages with cores, one with memory, the platform as a whole, and a package's second interface."""
    zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 900_000_000)
    zone(tmp_path, "intel-rapl:0:1", "dram", 600_000)
    zone(tmp_path, "intel-rapl:1", "package-1", 7_000_000)
    zone(tmp_path, "intel-rapl:2", "psys", 900_000_000)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 5_000_000)
    (tmp_path / "intel-rapl").mkdir()  # the control type, which has no counter
    return tmp_path


def test_energy_is_that_of_packages_and_memory(powercap: Path) -> None:
    device = CpuDevice(os.getpid(), powercap)
    assert (device.info.energy_method, device.info.kind, device.info.uuid) == ("counter", "cpu", cpu_uuid())
    assert device.read(full=False)["energy_mj"] == 12_600


def test_power_is_the_growth_of_energy(powercap: Path) -> None:
    device = CpuDevice(os.getpid(), powercap)
    began = time.monotonic()
    device.read(full=False)
    (powercap / "intel-rapl:1/energy_uj").write_text("17000000\n")
    time.sleep(0.05)
    sample = device.read(full=False)
    assert sample["energy_mj"] == 22_600
    assert 10 / (time.monotonic() - began) < sample["power_w"] < 10 / 0.05


def test_a_counter_that_wraps_goes_on(powercap: Path) -> None:
    counter = powercap / "intel-rapl:0/energy_uj"
    counter.write_text(str(RANGE_UJ - 2_000_000))
    device = CpuDevice(os.getpid(), powercap)
    first = device.read(full=False)["energy_mj"]
    for energy_uj, grown_mj in [(RANGE_UJ - 1_000_000, 1_000), (3_000_000, 5_000), (4_000_000, 6_000), (1_000, None)]:
        counter.write_text(str(energy_uj))
        energy_mj = device.read(full=False)["energy_mj"]
        if grown_mj is not None:
            assert energy_mj - first == grown_mj
    assert energy_mj - first == pytest.approx((RANGE_UJ + 2_001_000) / 1000, abs=1)


def test_a_counter_that_fails_reads_nothing_while_it_does(powercap: Path) -> None:
    device = CpuDevice(os.getpid(), powercap)
    counter = powercap / "intel-rapl:0/energy_uj"
    counter.write_text("")
    sample = device.read(full=False)
    assert (sample["energy_mj"], sample.get("power_w")) == (None, None)
    assert sample["memory_used_gib"] > 0
    counter.write_text("6000000")
    sample = device.read(full=False)
    assert (sample["energy_mj"], sample.get("power_w")) == (13_600, None)


def test_counters_that_may_not_be_read_leave_an_estimate(powercap: Path, caplog: pytest.LogCaptureFixture) -> None:
    counter = powercap / "intel-rapl:1/energy_uj"
    counter.unlink()
    counter.mkdir()  # fails for every user, where permissions do not stop root
    with caplog.at_level(logging.WARNING):
        device = CpuDevice(os.getpid(), powercap)
    assert device.info.energy_method == "estimated"
    assert [str(counter) in record.getMessage() for record in caplog.records] == [True]


def test_without_counters_power_is_estimated_from_utilisation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = CpuDevice(os.getpid(), tmp_path / "powercap")
    assert (device.info.energy_method, caplog.records) == ("estimated", [])
    began = time.monotonic()
    first = device.read(full=True)
    while time.monotonic() - began < 0.3:
        pass
    sample = device.read(full=True)
    elapsed = time.monotonic() - began
    cpus = os.cpu_count() or 1
    busy_cpus = sample["cpu_utilisation"] * cpus
    # Where all CPUs are busy, the kernel's ticks may sum up to more than the time, which utilisation does not say.
    assert sample["power_w"] == pytest.approx(IDLE_WATTS_PER_CPU * cpus + WATTS_PER_BUSY_CPU * busy_cpus, rel=0.1)
    grown_mj = sample["energy_mj"] - first["energy_mj"]
    assert IDLE_WATTS_PER_CPU * cpus * 0.2 < grown_mj / 1000 <= sample["power_w"] * elapsed
    assert 0 < sample["process_cpu_utilisation"] * cpus < 1.5
