"""A training outside Wattune for others to run beside: it goes on until it is ended, and tells when each step ended.

    torchrun --nproc-per-node 2 -m benchmarks.measure.beside RUN.json BOARD

trains what `trainables.launch` would of RUN.json. BOARD is of a `Board`: in windows that it says are watched, each rank
calls the hook after each step, as a program of a user's does. The host is at most a step ahead of its GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import numpy as np
import torch

from trainables.hook import wattune_steps
from trainables.launch import TIMEOUT_S, place_of, read
from trainables.leftovers import end_with_parent
from trainables.measure import Procedure
from trainables.program import TrialRequest
from trainables.rank import Rank, settle
from trainables.world import GangWorld

LONGEST = 1_000_000
"""Steps that there is room for."""


class Board:
    """Whether steps are to be told of by the hook now, and when each ended on rank 0, in ns of the monotonic clock.

    A file of 2 + `LONGEST` numbers: that, how many steps there were, and the times.
    """

    def __init__(self, path: Path, new: bool = False) -> None:
        """What there is, or a new one."""
        self.path, mode = path, "w+" if new else "r+"
        self._numbers: np.ndarray = np.memmap(path, np.int64, mode, shape=2 + LONGEST)  # type: ignore[call-overload]

    @property
    def watched(self) -> bool:
        return bool(self._numbers[0])

    def watch(self, watched: bool) -> None:
        self._numbers[0] = watched

    @property
    def ends_ns(self) -> np.ndarray:
        return np.array(self._numbers[2 : 2 + self._numbers[1]])

    def ended(self, ns: int) -> None:
        self._numbers[2 + self._numbers[1]] = ns
        self._numbers[1] += 1


def train(rank: Rank, board: Board) -> None:
    """Train until this process is ended. Collective."""
    on_gpu = rank.world.device.type == "cuda"
    before: torch.cuda.Event | None = None
    for number in range(LONGEST):
        output = rank.step()
        rank.losses.append(output.loss)  # by which batches are numbered
        if board.watched:
            wattune_steps.step(loss=output.loss)
        if on_gpu:
            event = torch.cuda.Event()
            event.record()
            if before is not None:
                before.synchronize()
            before = event
        if rank.world.rank == 0:
            board.ended(time.monotonic_ns())
        if number == 0:
            settle()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("board", type=Path)
    given = parser.parse_args()
    end_with_parent()  # torchrun has each rank in a session of its own
    launch = read(given.run)
    place = place_of(launch, os.environ)
    os.environ.update(place.platform.environment)
    request = TrialRequest("beside", launch.layout, launch.training, Procedure(2, math.inf, 0.0, 0.0, 1), TIMEOUT_S)
    train(Rank(launch.training, request, place, lambda _: None, GangWorld), Board(given.board))


if __name__ == "__main__":
    main()
