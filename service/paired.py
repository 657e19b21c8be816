"""Whether one of two is better, by measurements in pairs, one right after the other, so that what drifts falls out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.student import confidence_interval


@dataclass(frozen=True)
class Difference:
    """What one saves of the other, as a share, on average over `pairs`, within `half` to each side with 95% confidence
    (Student's t); None of a single pair."""

    saves: float
    half: float | None
    pairs: int

    @property
    def proven(self) -> bool:
        """Whether the interval excludes that nothing, or less than nothing, is saved."""
        return self.half is not None and self.saves - self.half > 0


def difference(plain: Sequence[float], other: Sequence[float]) -> Difference:
    """Of costs that were measured in pairs, one pair at least, such as seconds of a step."""
    saved = [1 - cost / usual for usual, cost in zip(plain, other, strict=True)]
    return Difference(*confidence_interval(saved), len(saved))
