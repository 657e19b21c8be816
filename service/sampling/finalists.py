"""The layouts that may be the best of a search and are worth measuring again, and in which order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from search_spaces.layout import Layout
from service.pareto import pareto_front, scaled
from service.result import TrialResult
from service.spec import excess

CLOSE = 0.02
"""By what share of a figure a layout may have been measured worse than it is: a short trial, run once."""

ERRORS = 2.0
"""How many times the standard error that a short trial gives itself comes on top of that."""


def front(
    results: Sequence[TrialResult], objectives: Mapping[str, str], limits: Sequence[tuple[str, str, float]] = ()
) -> list[TrialResult]:
    """The results that ended well, keep the limits, and that no other beats on all objectives, best on the first first.

    An objective that no result has is left out; a result that lacks one which others have cannot be on the front.
    """
    ranked, costs = _ranked(results, objectives, limits)
    return [ranked[i] for i in pareto_front(costs)]


def contenders(
    results: Sequence[TrialResult],
    objectives: Mapping[str, str],
    limits: Sequence[tuple[str, str, float]],
    count: int,
) -> list[TrialResult]:
    """At most `count` results: of the front; if it has fewer, then those that would be on it were they better by what
    they may be measured wrong.

    Of the latter, those first that no other of them beats.
    """
    ranked, costs = _ranked(results, objectives, limits)
    own_errors = [result.metrics.get("extrapolation_error") or 0.0 for result in ranked]
    better = costs - (CLOSE + ERRORS * np.array(own_errors)[:, None]) * np.abs(costs)
    left = [r for r, row in zip(ranked, better, strict=True) if not _dominated(row, costs)]
    chosen: list[TrialResult] = []
    while left and len(chosen) < count:
        best = front(left, objectives)
        chosen += spread(best, objectives, count - len(chosen))
        left = [r for r in left if all(r is not one for one in best)]
    return chosen


def spread(front: Sequence[TrialResult], objectives: Mapping[str, str], count: int) -> list[TrialResult]:
    """At most `count` of a front: the best on each objective, then always the one farthest from those chosen.

    Distances are Euclidean, each objective scaled to the front's range on it.
    """
    if len(front) <= count:
        return list(front)
    _, costs = _ranked(front, objectives)
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


def _ranked(
    results: Sequence[TrialResult], objectives: Mapping[str, str], limits: Sequence[tuple[str, str, float]] = ()
) -> tuple[list[TrialResult], np.ndarray]:
    """The results that can be ranked, and a row of costs for each: the objectives that there are, to be minimised."""
    admitted = [r for r in results if r.status == "ok" and not any(excess(limit, r.metrics) > 0 for limit in limits)]
    known = [metric for metric in objectives if any(r.metrics.get(metric) is not None for r in admitted)]
    signs = {metric: -1.0 if objectives[metric] == "maximize" else 1.0 for metric in known}
    ranked, rows = [], []
    for result in admitted:
        row = [sign * value for metric, sign in signs.items() if (value := result.metrics.get(metric)) is not None]
        if known and len(row) == len(known):
            ranked.append(result)
            rows.append(row)
    return ranked, np.array(rows).reshape(len(rows), len(known))


def _dominated(row: np.ndarray, costs: np.ndarray) -> bool:
    return bool(((costs <= row).all(axis=1) & (costs < row).any(axis=1)).any())
