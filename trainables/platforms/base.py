"""What is asked of a platform, and which one an accelerator is of."""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from search_spaces.hardware import Accelerator

if TYPE_CHECKING:
    import torch


AHEAD_S = 3e-3
"""Seconds by which the host is ahead of a device, unless it needs more."""


class Mark(Protocol):
    """A place among what a process gave its device to do."""

    def elapsed_time(self, end_event: Self, /) -> float:
        """Milliseconds that the device took from here to `end_event`. It must have done all before both."""


class Platform(ABC):
    """One kind of device: what torch, Ray and the fork server of trials must know of it.

    A value without state, which travels from the gang to the processes of its trials. Only these need torch, which the
    methods for them import themselves: drivers and workers ask for the rest, and are up sooner.

    - `backend`: of process groups between such devices.
    - `ray_resource`: what Ray counts such devices as; None for what it only knows as CPUs.
    - `visible`: the variable that says which of the node's devices a process sees; None where there are none.
    - `profiler_device`: what torch's profiler calls the device whose kernels it records; None where the host computes.
    - `names_kernels`: whether the kernel of a collective has a name that says which one it is.
    - `environment`: variables that must be set before the fork server of trials comes up.
    """

    backend: ClassVar[str]
    ray_resource: ClassVar[str | None]
    visible: ClassVar[str | None]
    profiler_device: ClassVar[str | None]
    names_kernels: ClassVar[bool]
    environment: ClassVar[Mapping[str, str]]

    def see(self, devices: Sequence[str]) -> None:
        """Have this process, which has used no device yet, see these alone and number them in this order."""
        if self.visible is not None and devices:
            os.environ[self.visible] = ",".join(devices)

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """Device number `local_rank` of those seen, of which nothing is used for that."""

    @abstractmethod
    def take(self, local_rank: int, expandable_segments: bool = False) -> torch.device:
        """Make device number `local_rank` of those seen this process's own, its memory mapped as the layout says."""

    @abstractmethod
    def limit_memory(self, device: torch.device, size: float) -> None:
        """Let torch reserve no more than `size` bytes of the device's memory, or what there is of it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the process's device has done all that it was given."""

    @abstractmethod
    def mark(self) -> Mark:
        """A mark behind all that the process's device was given so far."""

    @abstractmethod
    def peak_memory_gib(self, device: torch.device) -> float | None:
        """The most memory that torch has ever reserved on the device, in GiB; None where it does not count."""

    @abstractmethod
    def reclaims(self, device: torch.device) -> int:
        """How often torch has found the device's memory full so far, and has given back all that it kept unused to go
        on; 0 where it does not count."""

    @abstractmethod
    def identity(self, device: torch.device) -> str | None:
        """The device's UUID as `telemetry` spells it; None where ranks have no device of their own."""

    @abstractmethod
    def versions(self, device: torch.device) -> dict[str, str]:
        """The device's name and the versions of the libraries that drive it, by the names of a record."""

    @abstractmethod
    def race(self, first: Callable[[], object], *tasks: Callable[[], object], ahead_s: float = AHEAD_S) -> list[float]:
        """Seconds that the process's device takes for what each task gives it, beside each other.

        All begin when it has done what `first` gives it. The host's own time to hand the tasks over is not counted on a
        device that has yet to do them then: it is given `ahead_s` seconds of nothing to do before.
        """

    @abstractmethod
    def handed_s(self, task: Callable[[], object], held_s: float) -> float:
        """Seconds that the host takes to hand a task over to the process's device, which does nothing for `held_s`
        meanwhile; more than that if the task waits for the device. 0 on a device that is the host."""


def platform_of(accelerator: Accelerator) -> Platform:
    """The platform that the accelerator names; for one that names none, that which torch was built for here.

    Raises `ValueError` for a name that is no module of `trainables.platforms`.
    """
    name = accelerator.platform
    if name is None:
        import torch

        name = "rocm" if torch.version.hip else "cuda"
    path = f"trainables.platforms.{name}"
    if importlib.util.find_spec(path) is None:
        raise ValueError(f"there is no platform {name!r}: {path} is missing")
    module = importlib.import_module(path)
    platform: Platform = module.PLATFORM
    return platform
