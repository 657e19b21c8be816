"""Against the GPUs of the machine at hand; `-s` shows what readings cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from telemetry.devices.nvidia import REFRESH_NS, NvidiaDevice, discover
from telemetry.sampler import FULL_PERIOD_S, Sampler
from telemetry.samples import SCHEMA, SampleBuffer
from telemetry.windows.trial import summarise

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpus() -> list[NvidiaDevice]:
    gpus = discover(os.getpid())
    if not gpus:
        pytest.skip("no NVIDIA GPU")
    return gpus


@pytest.fixture(scope="module")
def nvml(gpus: list[NvidiaDevice]) -> Any:
    import pynvml

    return pynvml


@pytest.fixture(scope="module")
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch


def device_of(torch: Any, gpus: list[NvidiaDevice], index: int = 0) -> NvidiaDevice:
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    return next(gpu for gpu in gpus if gpu.info.uuid == uuid)


@pytest.fixture(scope="module")
def loaded(gpus: list[NvidiaDevice], torch: Any) -> tuple[pa.Table, int, int, str]:
    """Samples of four seconds of bf16 matrix products on one GPU, the window's edges and the GPU."""
    buffer = SampleBuffer(capacity_rows=10_000)
    sampler = Sampler(gpus, buffer, "n")
    sampler.start()
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def work(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(20):
                torch.mm(matrix, matrix)
            torch.cuda.synchronize()

    work(2)
    start_ns = time.monotonic_ns()
    sampler.mark()
    work(4)
    end_ns = time.monotonic_ns()
    sampler.mark()
    device = device_of(torch, gpus).info.uuid
    while not sampler.was_full([device], end_ns):
        work(0.1)
    work(0.3)
    sampler.stop()
    return buffer.between(0, time.monotonic_ns()), start_ns, end_ns, device


def test_every_gpu_answers(gpus: list[NvidiaDevice]) -> None:
    for gpu in gpus:
        assert gpu.info.uuid.startswith("GPU-")
        assert gpu.info.pcie_peak_bytes_per_s is not None
        sample = gpu.read(full=True)
        assert set(sample) <= set(SCHEMA.names)
        for column in ("power_w", "energy_mj", "sm_clock_mhz", "gpu_temp_c", "memory_used_gib", "throttle_reasons"):
            assert sample[column] is not None, column
        assert 5 < sample["power_w"] < 1500
        assert 5 < sample["gpu_temp_c"] < 110


def test_readings_agree_with_calls_of_their_own(gpus: list[NvidiaDevice], nvml: Any) -> None:
    for gpu in gpus:
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.info.uuid)
        before_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        sample = gpu.read(full=True)
        after_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        assert before_mj <= sample["energy_mj"] <= after_mj
        assert sample["gpu_temp_c"] == pytest.approx(nvml.nvmlDeviceGetTemperature(handle, 0), abs=2)
        assert sample["sm_clock_mhz"] == pytest.approx(nvml.nvmlDeviceGetClockInfo(handle, 1), rel=0.3)
        assert sample["memory_used_gib"] == pytest.approx(nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30, abs=1)
        assert sample["ecc_uncorrected"] == nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0)


def test_what_a_reading_costs(gpus: list[NvidiaDevice], torch: Any) -> None:
    """CPU time in milliseconds, median of many, on a GPU that works."""
    gpu = device_of(torch, gpus)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(1500):
        torch.mm(matrix, matrix)

    def cost_ms(read: Callable[[], object], times: int) -> float:
        costs = []
        for _ in range(times):
            began = time.thread_time_ns()
            read()
            costs.append((time.thread_time_ns() - began) / 1e6)
        return sorted(costs)[times // 2]

    tick = cost_ms(lambda: gpu.read(full=False), 200)
    full = cost_ms(lambda: gpu.read(full=True), 20)
    parts = {
        "fields": cost_ms(gpu._fields.read, 200),
        "queries": cost_ms(gpu._queries.read, 200),
        "costly fields": cost_ms(gpu._costly_fields.read, 20),
        "costly queries": cost_ms(gpu._costly_queries.read, 20),
    }
    if gpu._gpm:
        parts["GPM"] = cost_ms(gpu._gpm.read, 20)
    torch.cuda.synchronize()
    print(f"\ntick {tick:.3f} ms, full {full:.3f} ms:", ", ".join(f"{part} {ms:.3f}" for part, ms in parts.items()))
    assert tick < 0.5
    assert full < 50


def test_the_counter_agrees_with_integrated_power_under_load(loaded: tuple[pa.Table, int, int, str]) -> None:
    table, start_ns, end_ns, device = loaded
    summary = summarise(table, start_ns, end_ns, [device])
    assert summary.energy_method == "counter"
    assert summary.energy_ratio == pytest.approx(1, abs=0.05)
    assert summary.mean_power_w is not None
    assert summary.peak_power_w is not None
    assert 0.8 * summary.mean_power_w < summary.peak_power_w < 2 * summary.mean_power_w


def test_throttle_counters_run_no_faster_than_time(loaded: tuple[pa.Table, int, int, str]) -> None:
    """Fields read by the wrong numbering would be other quantities, or missing."""
    table, start_ns, end_ns, device = loaded
    summary = summarise(table, start_ns, end_ns, [device])
    assert summary.problems == ()
    for ratio in (summary.throttle_ratio, summary.power_cap_ratio):
        assert ratio is not None
        assert 0 <= ratio <= 1


def needs_gpm(gpu: NvidiaDevice) -> None:
    if gpu._gpm is None:
        pytest.skip("this GPU has no GPM")


def test_activity_is_that_of_the_work(gpus: list[NvidiaDevice], torch: Any) -> None:
    gpu = device_of(torch, gpus)
    needs_gpm(gpu)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    many = torch.empty(2**30, device="cuda")

    def activity(work: Callable[[], object]) -> tuple[float, float]:
        work()
        torch.cuda.synchronize()
        gpu.read(full=True)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            work()
            torch.cuda.synchronize()
        sample = gpu.read(full=True)
        return sample["tensor_activity"], sample["dram_activity"]

    product_tensor, product_dram = activity(lambda: [torch.mm(matrix, matrix) for _ in range(20)])
    fill_tensor, fill_dram = activity(lambda: [many.add_(1) for _ in range(20)])
    print(f"\nproducts: tensor {product_tensor:.2f} dram {product_dram:.2f}; sums: {fill_tensor:.2f}, {fill_dram:.2f}")
    assert product_tensor > 0.5 > fill_tensor
    assert fill_dram > 0.5 > product_dram


def copied(gpu: NvidiaDevice, copy: Callable[[], int]) -> tuple[dict[str, int], int]:
    """What the traffic columns grew by between two full readings, and what was copied between them.

    The readings are as far apart as they get. The driver refreshes its rates each 100 ms: half a second is off by 20%.
    """
    before = gpu.read(full=True)
    until, moved = time.monotonic() + FULL_PERIOD_S, 0
    while time.monotonic() < until:
        moved += copy()
    after = gpu.read(full=True)
    columns = ("pcie_rx_bytes", "pcie_tx_bytes", "link_rx_bytes", "link_tx_bytes")
    return {column: after[column] - before[column] for column in columns if after.get(column) is not None}, moved


@pytest.mark.parametrize("to_gpu", [True, False])
def test_pcie_bytes_are_those_copied(gpus: list[NvidiaDevice], torch: Any, to_gpu: bool) -> None:
    column, other = ("pcie_rx_bytes", "pcie_tx_bytes") if to_gpu else ("pcie_tx_bytes", "pcie_rx_bytes")
    gpu = device_of(torch, gpus)
    needs_gpm(gpu)
    there = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    here = torch.empty(2**28, dtype=torch.uint8).pin_memory()
    target, source = (there, here) if to_gpu else (here, there)

    def copy() -> int:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return 2**28

    grown, moved = copied(gpu, copy)
    print(f"\n{moved / 1e9:.1f} GB copied {'to' if to_gpu else 'from'} the GPU in {FULL_PERIOD_S} s: {grown}")
    assert 0.95 * moved < grown[column] < 1.35 * moved  # and the packets' heads
    assert grown[other] < 0.3 * moved


def test_link_bytes_are_those_copied(gpus: list[NvidiaDevice], torch: Any) -> None:
    if torch.cuda.device_count() < 2 or device_of(torch, gpus).info.link_peak_bytes_per_s is None:
        pytest.skip("no two GPUs with links")
    gpu = device_of(torch, gpus)
    needs_gpm(gpu)
    here = torch.empty(2**30, dtype=torch.uint8, device="cuda:0")
    there = torch.empty(2**30, dtype=torch.uint8, device="cuda:1")

    def copy() -> int:
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        return 2**30

    copy()
    grown, moved = copied(gpu, copy)
    print(
        f"\n{moved / 1e9:.1f} GB sent to another GPU in {FULL_PERIOD_S} s, "
        f"at most {gpu.info.link_peak_bytes_per_s} bytes/s: {grown}"
    )
    assert 0.95 * moved < grown["link_tx_bytes"] < 1.35 * moved
    assert grown["link_rx_bytes"] < 0.3 * moved
    assert gpu.info.link_peak_bytes_per_s is not None
    assert moved / FULL_PERIOD_S < gpu.info.link_peak_bytes_per_s


def test_the_energy_counter_is_refreshed_when_it_is_said_to_be(gpus: list[NvidiaDevice], nvml: Any) -> None:
    """Against a loop that reads it until it moves, 100 ms and less after each reading."""
    handle = nvml.nvmlDeviceGetHandleByIndex(gpus[0].info.index)
    away_ms = []
    for number in range(20):
        time.sleep(0.2 + 0.013 * number)
        refreshed_ns = gpus[0].read(True)["energy_ns"]
        before = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        asked_ns = time.monotonic_ns()
        while nvml.nvmlDeviceGetTotalEnergyConsumption(handle) == before:
            time.sleep(0.001)
            asked_ns = time.monotonic_ns()
        away_ms.append((asked_ns - refreshed_ns + REFRESH_NS // 2) % REFRESH_NS / 1e6 - REFRESH_NS / 2e6)
    print(f"refreshes are seen {min(away_ms):+.1f} to {max(away_ms):+.1f} ms from when they are said to be")
    assert sorted(map(abs, away_ms))[15] < 8
