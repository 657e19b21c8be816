"""The layouts that may be the best of a search and are worth measuring again, and in which order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from search_spaces.layout import Layout
from service.goals import Comparison, Goals
from service.pareto import dominating, scaled
from service.result import TrialResult

CLOSE = 0.02
"""By what share of a figure a layout may have been measured worse than it is: a short trial, run once."""

ERRORS = 2.0
"""How many times the standard error that a short trial gives itself comes on top of that."""


def contenders(results: Sequence[TrialResult], goals: Goals, count: int) -> list[TrialResult]:
    """At most `count` of results that ended well: of their front; if it has fewer, then those that would be on it were
    they better by what they may be measured wrong.

    Of the latter, those first that no other of them beats.
    """
    comparison = goals.among(results)
    ranked = comparison.ranked(comparison.admitted)
    costs = comparison.costs(ranked)
    own_errors = [result.metrics.get("extrapolation_error") or 0.0 for result in ranked]
    better = costs - (CLOSE + ERRORS * np.array(own_errors)[:, None]) * np.abs(costs)
    left = [result for result, row in zip(ranked, better, strict=True) if not dominating(costs, row).any()]
    chosen: list[TrialResult] = []
    while left and len(chosen) < count:
        best = comparison.front(left)
        chosen += spread(best, comparison, count - len(chosen))
        left = [result for result in left if all(result is not one for one in best)]
    return chosen


def spread(front: Sequence[TrialResult], comparison: Comparison[TrialResult], count: int) -> list[TrialResult]:
    """At most `count` of a front: the best on each objective, then always the one farthest from those chosen.

    Distances are Euclidean, each objective scaled to the front's range on it.
    """
    if len(front) <= count:
        return list(front)
    costs = comparison.costs(front)
    places = scaled(costs)
    chosen = list(dict.fromkeys(int(i) for i in costs.argmin(axis=0)))[:count]
    while len(chosen) < count:
        gaps = np.linalg.norm(places[:, None] - places[chosen], axis=2).min(axis=1)
        gaps[chosen] = -1.0  # equal results have no gap between them
        chosen.append(int(gaps.argmax()))
    return [front[i] for i in chosen]


def rounds(layouts: Sequence[Layout], repeats: int, seed: int) -> list[Layout]:
    """Each layout `repeats` times: rounds of all of them, each in an order of its own that the seed decides."""
    draw = random.Random(seed)
    return [layout for _ in range(repeats) for layout in draw.sample(list(layouts), len(layouts))]
