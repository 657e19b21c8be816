"""The ranks of a trial, each beside its program: what they agree on, without any use of a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainables.program import Place, TrialRequest
from trainables.world import join_trial

LONGEST_PAUSE_S = 0.01


class Peers:
    """Gloo between the processes that follow the programs of a trial. While one waits for others, it calls `watch`.

    Its collectives are called by all ranks in the same order.
    """

    def __init__(self, request: TrialRequest, place: Place) -> None:
        """Join the others. Collective."""
        torch.set_num_threads(1)  # the program needs the others
        self.store = join_trial(request, place, "gloo")
        self.rank, self.size = place.rank, len(request.ranks)
        self.watch: Callable[[], None] = lambda: None

    def gather(self, value: object) -> list[Any]:
        """Each rank's value, by rank. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def largest(self, value: float) -> float:
        """The largest of the ranks' values. Collective."""
        largest = torch.tensor(value, dtype=torch.float64)
        self._finish(dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True))
        return largest.item()

    def means(self, values: Sequence[float | None]) -> list[float | None]:
        """The mean of each over the ranks that have it, None where nobody does. As many values everywhere. Collective.

        What is not finite on a rank is not in the mean.
        """
        sums = torch.zeros(2, len(values), dtype=torch.float64)
        for i, value in enumerate(values):
            if value is not None:
                sums[:, i] = torch.tensor([value, 1.0])
        self._finish(dist.all_reduce(sums, async_op=True))
        return [total / count if count else None for total, count in zip(*sums.tolist(), strict=True)]

    def meet(self) -> None:
        """Return once all ranks have called this. Collective."""
        self.largest(-math.inf)

    def _finish(self, work: dist.Work | None) -> None:
        assert work is not None
        pause_s = 1e-4
        while not work.is_completed():
            self.watch()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        work.wait()
