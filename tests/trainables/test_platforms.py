"""What a platform is to torch and Ray; that trials run on it is what the other tests show, those on GPUs marked so."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time

import pytest
import torch

from search_spaces.hardware import ACCELERATORS, Accelerator
from telemetry.devices import discover
from trainables.platforms.base import platform_of


def test_each_accelerator_leads_to_a_platform_that_travels() -> None:
    here = "rocm" if torch.version.hip else "cuda"
    names = dict.fromkeys(("mi250", "mi300x", "mi325x"), "rocm") | {"cpu": "cpu", "gpu": here}
    for name, accelerator in ACCELERATORS.items():
        platform = pickle.loads(pickle.dumps(platform_of(accelerator)))
        assert type(platform).__module__ == f"trainables.platforms.{names.get(name, 'cuda')}"


def test_an_unknown_platform_is_named() -> None:
    with pytest.raises(ValueError, match="there is no platform 'abacus'"):
        platform_of(Accelerator(platform="abacus"))


def test_gpus_are_gpus_to_ray_and_cpus_are_not() -> None:
    resources = {name: platform_of(ACCELERATORS[name]).ray_resource for name in ("cpu", "h200", "mi250")}
    assert resources == {"cpu": None, "h200": "GPU", "mi250": "GPU"}


def test_only_rccl_keeps_to_itself_which_collective_a_kernel_is() -> None:
    assert [platform_of(ACCELERATORS[name]).names_kernels for name in ("cpu", "h200", "mi250")] == [True, True, False]


def test_a_rank_on_the_cpu_has_no_device_of_its_own() -> None:
    platform = platform_of(ACCELERATORS["cpu"])
    device = platform.take(0)
    assert device == torch.device("cpu")
    assert torch.get_num_threads() == 1
    assert (platform.identity(device), platform.peak_memory_gib(device), platform.versions(device)) == (None, None, {})
    assert platform.reclaims(device) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_torch_can_be_given_less_of_a_gpu() -> None:
    platform = platform_of(ACCELERATORS["gpu"])
    device = platform.take(0)
    platform.limit_memory(device, 2**30)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**30 + 1, dtype=torch.uint8, device=device)
        platform.limit_memory(device, 1e15)  # more than there is leaves what there is
        torch.empty(2**30 + 1, dtype=torch.uint8, device=device)
    finally:
        platform.limit_memory(device, 1e15)
        torch.cuda.empty_cache()  # before cuBLAS settles in what is left of it


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_what_torch_gives_back_to_go_on_is_counted() -> None:
    platform = platform_of(ACCELERATORS["gpu"])
    device = platform.take(0)
    torch.cuda.empty_cache()
    before = platform.reclaims(device)
    platform.limit_memory(device, torch.cuda.memory_reserved(device) + 2**30)
    try:
        for size, reclaimed in ((600, 0), (600, 0), (900, 1)):  # MiB; of each the one before is given up
            torch.empty(size * 2**20, dtype=torch.uint8, device=device)
            assert platform.reclaims(device) - before == reclaimed
    finally:
        platform.limit_memory(device, 1e15)
        torch.cuda.empty_cache()


def test_tasks_race_beside_each_other_once_the_first_is_done() -> None:
    """Two that wait for each other are done, neither before it was begun."""
    begun, done = threading.Barrier(2, timeout=60), []

    def task(name: str, seconds: float) -> None:
        begun.wait()
        time.sleep(seconds)
        done.append(name)

    platform = platform_of(ACCELERATORS["cpu"])
    taken = platform.race(lambda: done.append("first"), lambda: task("long", 0.2), lambda: task("short", 0.02))
    assert done[0] == "first"
    assert sorted(done[1:]) == ["long", "short"]
    assert taken[0] >= 0.2
    assert taken[1] >= 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_what_a_gpu_does_is_timed_without_the_hosts_part() -> None:
    platform = platform_of(ACCELERATORS["gpu"])
    device = platform.take(0)
    square = torch.randn(1024, 1024, device=device)
    assert (square @ square).isfinite().all()  # the first product of a process loads cuBLAS, for longer than all others
    (one,) = platform.race(lambda: None, lambda: square @ square)
    (many,) = platform.race(lambda: None, lambda: [square @ square for _ in range(200)])
    assert 0 < one < many


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_known_to_telemetry_by_the_same_name() -> None:
    platform = platform_of(ACCELERATORS["gpu"])
    device = platform.take(0)
    torch.cuda.empty_cache()  # of tests before this one in the same process
    torch.cuda.reset_peak_memory_stats()
    torch.ones(1 << 20, device=device)
    platform.synchronize()
    assert platform.identity(device) in [found.info.uuid for found in discover()]
    assert 0 < (platform.peak_memory_gib(device) or 0) < 1
    assert set(platform.versions(device)) == {"gpu_name", "cuda", "nccl"}


def _expands(wanted: bool) -> bool:
    """Whether torch's allocator maps memory piecewise, once the GPU was taken so."""
    device = platform_of(ACCELERATORS["gpu"]).take(0, expandable_segments=wanted)
    kept = torch.ones(1 << 20, device=device)
    expands = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
    assert kept.sum() == 1 << 20
    return expands == {True}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_layout_says_how_memory_is_mapped() -> None:
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        assert pool.map(_expands, [False, True], chunksize=1) == [False, True]
