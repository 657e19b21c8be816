"""NVIDIA's GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from trainables.platforms.base import AHEAD_S, Platform

if TYPE_CHECKING:
    import torch

SPIN_HZ = 2e9
"""Cycles of a second in which a GPU is kept waiting, about: no GPU has more."""


class Cuda(Platform):
    """A GPU for each rank, with NCCL between them."""

    backend = "nccl"
    ray_resource = "GPU"
    visible = "CUDA_VISIBLE_DEVICES"
    profiler_device = "cuda"
    names_kernels = True
    # The server must not touch CUDA, or its forks could not: no check may open the driver.
    environment: ClassVar[Mapping[str, str]] = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "DS_ACCELERATOR": "cuda"}

    def device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cuda", local_rank)

    def take(self, local_rank: int, expandable_segments: bool = False) -> torch.device:
        import torch

        if expandable_segments:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        device = self.device(local_rank)
        torch.cuda.set_device(device)
        return device

    def limit_memory(self, device: torch.device, size: float) -> None:
        import torch

        share = size / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def peak_memory_gib(self, device: torch.device) -> float | None:
        import torch

        return torch.cuda.max_memory_reserved(device) / 2**30

    def reclaims(self, device: torch.device) -> int:
        import torch

        return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))

    def identity(self, device: torch.device) -> str | None:
        import torch

        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    def versions(self, device: torch.device) -> dict[str, str]:
        import torch

        return {
            "gpu_name": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda or torch.version.hip),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }

    def race(self, first: Callable[[], object], *tasks: Callable[[], object], ahead_s: float = AHEAD_S) -> list[float]:
        import torch

        start = torch.cuda.Event(enable_timing=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in tasks]
        torch.cuda.synchronize()
        torch.cuda._sleep(round(SPIN_HZ * ahead_s))
        first()
        start.record()
        for number, (task, end) in enumerate(zip(tasks, ends, strict=True)):
            stream = _stream(number)
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                task()
                end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for end in ends]

    def handed_s(self, task: Callable[[], object], held_s: float) -> float:
        import torch

        torch.cuda.synchronize()
        torch.cuda._sleep(round(SPIN_HZ * held_s))
        began = time.perf_counter()
        task()
        handed_s = time.perf_counter() - began
        torch.cuda.synchronize()
        return handed_s


@cache
def _stream(number: int) -> torch.cuda.Stream:
    """The same each time: cuBLAS allocates a workspace for each that it sees."""
    import torch

    return torch.cuda.Stream()


PLATFORM = Cuda()
