"""Whether one of two is better, by measurements in pairs, one right after the other, so that what drifts falls out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from service.student import CONFIDENCE


@dataclass(frozen=True)
class Difference:
    """What one saves of the other, as a share, by `pairs`, and from where to where that lies with 95% confidence; None
    of fewer than six pairs, which cannot tell so."""

    saves: float
    interval: tuple[float, float] | None
    pairs: int

    @property
    def proven(self) -> bool:
        """Whether the interval excludes that nothing, or less than nothing, is saved."""
        return self.interval is not None and self.interval[0] > 0

    def __str__(self) -> str:
        """Both in per cent."""
        if self.interval is None:
            return f"{self.saves:.2%}"
        low, high = self.interval
        return f"{self.saves:.2%} ({low:.2%} to {high:.2%})"


def difference(plain: Sequence[float], other: Sequence[float]) -> Difference:
    """Of costs that were measured in pairs, one pair at least, such as seconds of a step.

    By signed ranks (Hodges and Lehmann 1963; Hollander and Wolfe 1999, 3.2 and 3.3): the median of all means of two
    pairs, and such means as an exact test of Wilcoxon's keeps. It asks of what disturbs a measurement only that it
    disturbs both of a pair alike. Of six pairs it proves a saving where all six have one; from twelve on, one pair
    that the host held up does not decide.
    """
    saved = np.array([1 - cost / usual for usual, cost in zip(plain, other, strict=True)])
    first, second = np.triu_indices(len(saved))
    means = np.sort((saved[first] + saved[second]) / 2)
    beyond = _beyond(len(saved))
    interval = (float(means[beyond - 1]), float(means[-beyond])) if beyond else None
    return Difference(float(np.median(means)), interval, len(saved))


@lru_cache
def _beyond(pairs: int) -> int:
    """From which of the ordered means the interval begins, counted from one; 0 where not even the first is sure
    enough."""
    ways = np.ones(1)
    for rank in range(1, pairs + 1):  # how many signs of the ranks so far have which sum
        ways = np.concatenate((ways, np.zeros(rank))) / 2
        ways[rank:] += ways[: len(ways) - rank]
    return int(np.searchsorted(np.cumsum(ways), (1 - CONFIDENCE) / 2, side="right"))
