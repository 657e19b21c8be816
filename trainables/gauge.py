"""Telling whether a device works for one process alone, by what it takes for products that it has done before."""

from __future__ import annotations

import math
import time

import torch

from trainables.platforms.base import Platform

WIDTH = 4096
"""Of the square matrices that are multiplied."""

LASTS_S = 10e-3
"""How long the products take together: processes take turns at a GPU of NVIDIA's, each for some 2 ms, so that what is
as short as that may see nothing of others."""

ROUNDS = 5
"""Times that they are done to begin with, of which the shortest counts."""

SHARED = 1.2
"""How many times as long they take, at least, where the device works for others, too."""

PATIENCE_S = 2.0
"""After which a device that takes longer is taken to have become slower."""


class Gauge:
    """Products of which it is known how long a device takes for them alone."""

    def __init__(self, platform: Platform, device: torch.device) -> None:
        """Measure that. As yet the device works for nobody else."""
        self.platform = platform
        self.factor, self.product = (torch.zeros(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.count = 1
        self._seconds()  # by which libraries are loaded
        self.count = math.ceil(LASTS_S / self._seconds())
        self.least_s = min(self._seconds() for _ in range(ROUNDS))

    def wait(self) -> None:
        """Wait until the device works for nobody else, but no longer than `PATIENCE_S`."""
        until = time.monotonic() + PATIENCE_S
        while (taken_s := self._seconds()) > SHARED * self.least_s and time.monotonic() < until:
            pass
        self.least_s = min(self.least_s, taken_s)

    def _seconds(self) -> float:
        (seconds,) = self.platform.race(lambda: None, self._multiply)
        return seconds

    def _multiply(self) -> None:
        for _ in range(self.count):
            torch.mm(self.factor, self.factor, out=self.product)
