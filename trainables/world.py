"""The ranks of one trial, as one of them sees them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from trainables.program import Place, TrialRequest


def join_trial(request: TrialRequest, place: Place, backend: str, device: torch.device | None = None) -> PrefixStore:
    """Make the trial's ranks the default process group. The key-value store that is the trial's own. Collective."""
    timeout = timedelta(seconds=2 * request.deadline_s)  # the deadline is kept from outside: a hang is not a crash
    shared = TCPStore(place.store_host, place.store_port, is_master=False, timeout=timeout)
    store = PrefixStore(request.trial_id, shared)
    size = len(request.ranks)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=size, timeout=timeout, device_id=device)
    return store


class World(ABC):
    """The rank's own device, and the default process group of the trial once the rank has joined it."""

    def __init__(self, request: TrialRequest, place: Place) -> None:
        """Take the device."""
        self.rank, self.size = place.rank, request.layout.num_gpus
        # As torchrun sets them: engines may read their place from the environment.
        os.environ.update(RANK=str(self.rank), LOCAL_RANK=str(place.local_rank), WORLD_SIZE=str(self.size))
        self.device = place.platform.take(place.local_rank, request.layout.expandable_segments)

    @abstractmethod
    def slowest(self, seconds: float) -> float:
        """The largest of the ranks' seconds. Collective."""

    @abstractmethod
    def total(self, values: Tensor) -> Tensor:
        """The ranks' sum of `values`. Collective."""

    @abstractmethod
    def meet(self, occasion: str) -> None:
        """Return once all ranks have called this, without any use of a device. An occasion's name serves once."""


class GangWorld(World):
    """A process for each rank. They also share a key-value store that is the trial's own."""

    def __init__(self, request: TrialRequest, place: Place) -> None:
        """Join the other ranks. Collective."""
        super().__init__(request, place)
        self.store = join_trial(
            request, place, place.platform.backend, None if self.device.index is None else self.device
        )

    def slowest(self, seconds: float) -> float:
        longest = torch.tensor(seconds, device=self.device, dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return longest.item()

    def total(self, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    def meet(self, occasion: str) -> None:
        keys = [f"{occasion}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], "")
        self.store.wait(keys)
