"""Ranks that compute on the host, one thread each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trainables.platforms.base import AHEAD_S, Platform

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Instant:
    """A time: the host does at once what it is given."""

    ns: int

    def elapsed_time(self, end: Instant, /) -> float:
        """Milliseconds from here to `end`."""
        return (end.ns - self.ns) / 1e6


class Cpu(Platform):
    """No device beside the host."""

    backend = "gloo"
    ray_resource = None
    visible = None
    profiler_device = None
    names_kernels = True
    # On a machine with GPUs, no library may open their driver.
    environment: ClassVar[Mapping[str, str]] = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "DS_ACCELERATOR": "cpu"}

    def device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def take(self, local_rank: int, expandable_segments: bool = False) -> torch.device:
        import torch

        torch.set_num_threads(1)
        return self.device(local_rank)

    def limit_memory(self, device: torch.device, size: float) -> None:
        """Nothing: what torch takes of the host's memory it does not count."""

    def synchronize(self) -> None:
        pass

    def mark(self) -> Instant:
        return Instant(time.monotonic_ns())

    def peak_memory_gib(self, device: torch.device) -> float | None:
        return None

    def reclaims(self, device: torch.device) -> int:
        return 0

    def identity(self, device: torch.device) -> str | None:
        return None

    def versions(self, device: torch.device) -> dict[str, str]:
        return {}

    def race(self, first: Callable[[], object], *tasks: Callable[[], object], ahead_s: float = AHEAD_S) -> list[float]:
        def seconds(task: Callable[[], object]) -> float:
            task()
            return time.perf_counter() - began

        with ThreadPoolExecutor(len(tasks)) as threads:
            first()
            began = time.perf_counter()
            return list(threads.map(seconds, tasks))

    def handed_s(self, task: Callable[[], object], held_s: float) -> float:
        return 0.0


PLATFORM = Cpu()
