"""Whether one of two is better, by measurements in pairs, one right after the other, so that what drifts falls out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENT = 0.95


@dataclass(frozen=True)
class Difference:
    """What one saves of the other, as a share, on average over `pairs`, within `half` to each side with 95% confidence
    (Student's t); `half` is infinite of a single pair."""

    saves: float
    half: float
    pairs: int

    @property
    def proven(self) -> bool:
        """Whether the interval excludes that nothing, or less than nothing, is saved."""
        return self.saves - self.half > 0


def difference(plain: Sequence[float], other: Sequence[float]) -> Difference:
    """Of costs that were measured in pairs, one pair at least, such as seconds of a step."""
    saved = [1 - cost / usual for usual, cost in zip(plain, other, strict=True)]
    half = math.inf
    if len(saved) > 1:
        error = statistics.stdev(saved) / math.sqrt(len(saved))
        half = float(stats.t.ppf((1 + CONFIDENT) / 2, len(saved) - 1)) * error
    return Difference(statistics.fmean(saved), half, len(saved))
