"""What a search is for: which of its results are admitted, which are better, and which of them nothing beats."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np

from service.errors import InputError
from service.metrics import METRICS, Direction, Doubt, nearest
from service.pareto import Rows, dominating, pareto_front

UNKNOWN = 1.0
"""By how much a limit counts as exceeded where the value is missing, as a share of its bound."""

_LIMIT = re.compile(r"^\s*(\w+)\s*(<=|>=|==|<|>)\s*([-+.\deE]+)\s*$")
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Limit:
    """What a metric has to be, such as ``peak_memory_gib<=70``; `text` is how it was given."""

    metric: str
    comparison: str
    bound: float
    text: str = field(compare=False)

    def holds(self, value: float) -> bool:
        return _HOLDS[self.comparison](value, self.bound)

    def excess(self, value: float) -> float:
        """By how much a value is beyond the bound of `<=` or `>=`, as a share of it; at most 0 where it is not."""
        beyond = (value - self.bound) / (abs(self.bound) or 1.0)
        return beyond if self.comparison == "<=" else -beyond


def parse_condition(text: str) -> Limit:
    """A bound on any metric by any comparison, of 'METRIC<=NUMBER'. Raises `InputError` for anything else."""
    limit = _parsed(text)
    if limit is None or math.isnan(limit.bound):
        raise InputError(f"condition {text!r} is not 'METRIC<=NUMBER'; operators: {' '.join(_HOLDS)}")
    return limit


def parse_constraint(text: str) -> Limit:
    """A finite bound on one of `METRICS`, of text such as ``peak_memory_gib<=70``. Raises `ValueError`."""
    limit = _parsed(text)
    if limit is None or limit.comparison not in ("<=", ">="):
        raise ValueError(f"constraints: {text!r} is not METRIC<=NUMBER or METRIC>=NUMBER")
    if limit.metric not in METRICS:
        raise ValueError(f"constraints: unknown metric in {text!r}; {nearest(limit.metric, METRICS)}")
    if not math.isfinite(limit.bound):
        number = text.partition(limit.comparison)[2].strip()
        raise ValueError(f"constraints: {number!r} in {text!r} is not a finite number")
    return limit


def _parsed(text: str) -> Limit | None:
    """The parts of a text that looks like a limit; a bound such as ``1.2.3`` becomes NaN."""
    if (match := _LIMIT.match(text)) is None:
        return None
    try:
        bound = float(match[3])
    except ValueError:
        bound = math.nan
    return Limit(match[1], match[2], bound, text)


class Measured(Protocol):
    """Anything with metrics. One that is missing is None or left out; `methods` has the `Method` of some."""

    @property
    def metrics(self) -> Mapping[str, float | None]: ...

    @property
    def methods(self) -> Mapping[str, str]: ...


M = TypeVar("M", bound=Measured)


@dataclass(frozen=True)
class Figures:
    """Metrics and nothing else, such as bounds on those of a trial, or a point of the front that a trial is given."""

    metrics: Mapping[str, float | None]
    methods: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Goals:
    """The objectives of a search, in their order, with the better direction of each, and limits that must hold."""

    objectives: Mapping[str, Direction]
    limits: tuple[Limit, ...] = ()

    def among(self, results: Iterable[M]) -> Comparison[M]:
        """The results held against each other: all that say, together, what can be compared."""
        return Comparison(self, tuple(results))


class Comparison(Generic[M]):
    """Some results held against each other by the goals of a search.

    What is compared depends on all of them. A value counts only if none is less in doubt (`service.metrics.Doubt`);
    any other counts as missing. An objective that none has is left out, and a limit on a metric that none has is not
    applied; a result that lacks what others have is not on the front, or not admitted.
    """

    def __init__(self, goals: Goals, results: Sequence[M]) -> None:
        self.goals, self.results = goals, results
        self._doubts: dict[str, Doubt | None] = {}

    def doubt(self, metric: str) -> Doubt | None:
        """That of all values of a metric which count; None if no result has it."""
        if metric not in self._doubts:
            having = [one for one in self.results if one.metrics.get(metric) is not None]
            self._doubts[metric] = min((Doubt.of(one.methods.get(metric)) for one in having), default=None)
        return self._doubts[metric]

    def value(self, one: Measured, metric: str) -> float | None:
        """The value that counts; None if it is missing, or more in doubt than another's."""
        value = one.metrics.get(metric)
        return value if Doubt.of(one.methods.get(metric)) is self.doubt(metric) else None

    @cached_property
    def objectives(self) -> dict[str, Direction]:
        """Those that any result has."""
        objectives = self.goals.objectives.items()
        return {metric: direction for metric, direction in objectives if self.doubt(metric) is not None}

    def keeps(self, one: Measured, limit: Limit) -> bool:
        """Whether a limit of the search holds, or is not applied."""
        return self.doubt(limit.metric) is None or self.meets(one, limit)

    def meets(self, one: Measured, condition: Limit) -> bool:
        """Whether a condition holds, which it does not for a value that is missing."""
        value = self.value(one, condition.metric)
        return value is not None and condition.holds(value)

    def excess(self, one: Measured, limit: Limit) -> float:
        """By how much a limit of the search is exceeded, as a share of its bound; above 0 unless it is kept."""
        if self.doubt(limit.metric) is None:
            return 0.0
        value = self.value(one, limit.metric)
        return UNKNOWN if value is None else limit.excess(value)

    def admits(self, one: Measured) -> bool:
        """Whether all limits of the search are kept."""
        return all(self.keeps(one, limit) for limit in self.goals.limits)

    @cached_property
    def admitted(self) -> list[M]:
        """The results that keep all limits of the search."""
        return [one for one in self.results if self.admits(one)]

    def cost(self, one: Measured) -> list[float] | None:
        """Each objective as what is to be minimised; None if one is missing, or if there are none."""
        values = [(direction, self.value(one, metric)) for metric, direction in self.objectives.items()]
        costs = [direction.cost(value) for direction, value in values if value is not None]
        return costs if costs and len(costs) == len(values) else None

    def ranked(self, some: Iterable[M]) -> list[M]:
        """Those that have every objective."""
        return [one for one in some if self.cost(one) is not None]

    def costs(self, ranked: Sequence[Measured]) -> Rows:
        """[n, objectives], all to be minimised, of results that are `ranked`."""
        return np.array([self.cost(one) for one in ranked], float).reshape(len(ranked), len(self.objectives))

    def front(self, some: Iterable[M] | None = None) -> list[M]:
        """Those that none of them beats on all objectives, the best on the first one first; of all that are admitted
        unless `some` are named. Equal ones are all on it."""
        ranked = self.ranked(self.admitted if some is None else some)
        return [ranked[row] for row in pareto_front(self.costs(ranked))]

    def beating(self, one: Measured, some: Iterable[M]) -> M | None:
        """The first of `some` that is nowhere worse than `one` and somewhere better; None if one of them lacks an
        objective, as it might still come to anything."""
        ranked, cost = self.ranked(some), self.cost(one)
        if cost is None:
            return None
        beats = dominating(self.costs(ranked), np.array(cost))
        return ranked[int(beats.argmax())] if beats.any() else None

    def ordered(self, some: Iterable[M], metric: str, direction: Direction) -> list[M]:
        """Those with a value of `metric`, the best first, ties by the objectives."""
        by = [(metric, direction), *self.objectives.items()]

        def cost(one: M) -> list[float]:
            values = [(way, self.value(one, name)) for name, way in by]
            return [math.inf if value is None else way.cost(value) for way, value in values]

        return sorted((one for one in some if self.value(one, metric) is not None), key=cost)
