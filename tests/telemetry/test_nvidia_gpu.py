"""Against the GPUs of the machine at hand."""

from __future__ import annotations

import time

import pyarrow as pa
import pytest

from telemetry.devices.nvidia import NvidiaDevice, discover
from telemetry.sampler import Sampler
from telemetry.samples import SampleBuffer
from telemetry.window import integral, summarise

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpus() -> list[NvidiaDevice]:
    found = discover()
    if not found:
        pytest.skip("no NVIDIA GPU")
    return found


@pytest.fixture(scope="module")
def loaded(gpus: list[NvidiaDevice]) -> tuple[pa.Table, int, int, str]:
    """Samples of four seconds of bf16 matrix products on one GPU, the window's edges and the GPU."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    device = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
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
    work(4)
    end_ns = time.monotonic_ns()
    work(0.5)
    assert buffer.wait_for(end_ns + 200_000_000, timeout_s=5)
    sampler.stop()
    return buffer.between(0, time.monotonic_ns()), start_ns, end_ns, device


def test_every_gpu_answers(gpus: list[NvidiaDevice]) -> None:
    for gpu in gpus:
        assert gpu.info.uuid.startswith("GPU-")
        sample = gpu.read()
        for column in ("power_w", "energy_mj", "sm_clock_mhz", "gpu_temp_c", "memory_used_gib", "throttle_reasons"):
            assert sample[column] is not None, column
        assert 5 < sample["power_w"] < 1500
        assert 5 < sample["gpu_temp_c"] < 110


def test_the_counter_agrees_with_integrated_power_under_load(loaded: tuple[pa.Table, int, int, str]) -> None:
    table, start_ns, end_ns, device = loaded
    summary = summarise(table, start_ns, end_ns, [device])
    assert summary.energy_method == "counter"
    rows = table.filter(pa.compute.field("device") == device).select(["time_ns", "power_w"]).drop_null()
    integrated_j = integral(rows["time_ns"].to_numpy(), rows["power_w"].to_numpy(), start_ns, end_ns)
    assert summary.energy_j == pytest.approx(integrated_j, rel=0.05)
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
