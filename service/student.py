"""Student's t, for as few measurements as there are of anything here.

Of a whole number of degrees of freedom the distribution is a finite sum (Abramowitz and Stegun 1964, 26.7.3 and
26.7.4). SciPy has it too, but takes a third of a second to import.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

CONFIDENCE = 0.95


def within(t: float, degrees: int) -> float:
    """The probability that the magnitude of Student's t with so many degrees of freedom is at most `t`."""
    return _within_angle(math.atan(abs(t) / math.sqrt(degrees)), degrees)


def below(t: float, degrees: int) -> float:
    """The probability that Student's t with so many degrees of freedom is below `t`."""
    return 0.5 * (1 + math.copysign(within(t, degrees), t))


@lru_cache
def student_t(degrees: int) -> float:
    """The value that the magnitude of Student's t with so many degrees of freedom exceeds by a chance of 5%."""
    low, high = 0.0, math.pi / 2
    while low < (angle := (low + high) / 2) < high:
        low, high = (angle, high) if _within_angle(angle, degrees) < CONFIDENCE else (low, angle)
    return math.tan(angle) * math.sqrt(degrees)


def confidence_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of some measurements and half the width of its 95% confidence interval, None of a single one."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    t = student_t(len(values) - 1)
    return mean, float(t * np.std(values, ddof=1) / math.sqrt(len(values)))


def next_deviation(values: Sequence[float]) -> float:
    """The standard deviation of what one more measurement will be off the mean of some, two at least."""
    return statistics.stdev(values) * math.sqrt(1 + 1 / len(values))


def _within_angle(angle: float, degrees: int) -> float:
    inside = angle if degrees % 2 else 0.0
    term = math.cos(angle) * math.sin(angle) if degrees % 2 else math.sin(angle)
    for k in range(1 + degrees % 2, degrees, 2):
        inside += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    return inside * (2 / math.pi if degrees % 2 else 1.0)
