"""Figures with their uncertainty, and by what share they differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from service.metrics import Doubt, Method


@dataclass(frozen=True)
class Value:
    """A figure, half the width of its 95% confidence interval, None if it was measured once, and how it came about."""

    value: float
    half_width: float | None = None
    method: Method | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {"value": self.value, "half_width": self.half_width, "method": self.method}


@dataclass(frozen=True)
class Change:
    """By what share a figure differs from another, and half the width of the 95% interval of that, None if unknown."""

    share: float
    half_width: float | None = None

    def __str__(self) -> str:
        interval = "" if self.half_width is None else f" ± {self.half_width:.1%}"
        return f"{self.share:+.1%}{interval}"

    @property
    def sure(self) -> bool:
        """Whether there is one, beyond the interval if that is known."""
        return abs(self.share) > (self.half_width or 0.0)


def change(one: Value, base: Value) -> Change:
    """From `base` to `one`, with an interval where both have one.

    Relative errors of a ratio of independent means add in squares, to first order.
    """
    ratio = one.value / base.value
    if one.half_width is None or base.half_width is None:
        return Change(ratio - 1)
    return Change(ratio - 1, ratio * math.hypot(one.half_width / one.value, base.half_width / base.value))


def comparable(one: Value | None, base: Value | None) -> Change | None:
    """As `change`; None where one is missing, where they are not as much in doubt, and from 0."""
    if one is None or base is None or not one.value or not base.value:
        return None
    return change(one, base) if Doubt.of(one.method) is Doubt.of(base.method) else None
