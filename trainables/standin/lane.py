"""How the collectives of one group take their time, one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from threading import Timer
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast  # record_function takes twenty times as long where nobody profiles
from torch.futures import Future

from search_spaces.network import Collective
from trainables.breakdown import STANDIN
from trainables.standin.moves import Move, fill


class Lane(Protocol):
    """What carries the data of one group. `beside`: whether what is called now goes on beside computation."""

    @property
    def beside(self) -> bool: ...

    def carry(self, kind: Collective, moves: Sequence[Move], seconds: float, asynchronous: bool) -> dist.Work:
        """Have the moves of a collective take `seconds` once all before them are over.

        Who called a collective that is not `asynchronous` may take what it returns for over.
        """
        ...

    def pause(self, seconds: float) -> None:
        """Have the device wait, as it does in this group for a message that is so long in coming."""
        ...


def lane_of(device: torch.device) -> Lane:
    """A new lane between devices of this kind."""
    if device.type == "cpu":
        return HostLane()
    from trainables.standin.device import DeviceLane

    return DeviceLane(device)


class HostLane:
    """Data that are there at once, and time that is over later.

    A profiler sees the time that the calling thread spends on either, by the collective's name.
    """

    beside = False

    def __init__(self) -> None:
        self._free_at = 0.0

    def carry(self, kind: Collective, moves: Sequence[Move], seconds: float, asynchronous: bool) -> dist.Work:
        name = f"{STANDIN}_{kind}"
        with _RecordFunctionFast(name):
            for move in moves:
                fill(move)
        self._free_at = max(self._free_at, time.monotonic()) + seconds
        return HostWork(name, self._free_at, moves)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class HostWork(dist.Work):
    """Is over when the clock says so; `moves` are kept until somebody waits for it."""

    def __init__(self, name: str, over_at: float, moves: Sequence[Move]) -> None:
        super().__init__()
        self._name, self._over_at, self._moves = name, over_at, moves

    @property
    def left_s(self) -> float:
        return self._over_at - time.monotonic()

    def is_completed(self) -> bool:
        return self.left_s <= 0

    def get_future(self) -> Future[list[Tensor]]:
        return self._future

    @cached_property
    def _future(self) -> Future[list[Tensor]]:
        """Has what arrived once that is over, for torch's DistributedDataParallel, which goes on from there."""
        future, arrived = Future[list[Tensor]](), [move.target for move in self._moves]
        if (left := self.left_s) <= 0:
            future.set_result(arrived)
            return future
        timer = Timer(left, future.set_result, (arrived,))
        timer.daemon = True
        timer.start()
        return future

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if (left := self.left_s) > 0:
            with _RecordFunctionFast(self._name):
                time.sleep(left)
        self._moves = ()
        return True
