"""Fronts of several objectives: which rows are on them, what volume they dominate, where they bend.

Everywhere `costs` is [n, objectives], all to be minimised, and row a dominates row b if it is nowhere larger and
somewhere smaller.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]

REFERENCE = 1.1
"""The point up to which hypervolume is counted, on each objective that is `scaled` over all layouts that were tried.

A little beyond the worst, so that the ends of the front count too (Ishibuchi et al. 2018, "How to specify a reference
point in hypervolume calculation").
"""


def dominating(costs: Rows, row: Rows) -> NDArray[np.bool_]:
    """Which rows of `costs` dominate another `row` [objectives]: [n]."""
    beats: NDArray[np.bool_] = np.all(costs <= row, axis=1) & np.any(costs < row, axis=1)
    return beats


def pareto_front(costs: Rows) -> list[int]:
    """Rows of `costs` that no other row dominates, in lexicographic order.

    In lexicographic order whatever dominates a row comes before it, so each row need only be held against the front so
    far.
    """
    if not len(costs):
        return []
    order = np.lexsort(costs.T[::-1])
    front = np.empty_like(costs)
    members: list[int] = []
    for i in order:
        if not dominating(front[: len(members)], costs[i]).any():
            front[len(members)] = costs[i]
            members.append(int(i))
    return members


def hypervolume(costs: Rows, reference: Rows) -> float:
    """Volume of what the rows dominate up to `reference` [objectives] (Zitzler and Thiele 1998).

    Cut along the last objective into slabs, within each of which the rows so far dominate the same area.
    """
    inside = costs[(costs < reference).all(axis=1)]
    if not len(inside):
        return 0.0
    if inside.shape[1] == 1:
        return float(reference[0] - inside.min())
    inside = inside[pareto_front(inside)]
    inside = inside[np.argsort(inside[:, -1])]
    ends = np.append(inside[1:, -1], reference[-1])
    return sum(
        float(end - row[-1]) * hypervolume(inside[: i + 1, :-1], reference[:-1])
        for i, (row, end) in enumerate(zip(inside, ends, strict=True))
    )


def scaled(costs: Rows) -> Rows:
    """`costs` with the best of each objective at 0 and its worst at 1; one that is the same for all rows is 0."""
    best, worst = costs.min(axis=0), costs.max(axis=0)
    places: Rows = (costs - best) / np.where(worst > best, worst - best, 1.0)
    return places


def knee(costs: Rows) -> int:
    """The row of a front farthest below the plane through its extremes, objectives scaled by its own range.

    With two objectives this is the knee of Das (1999), "On characterizing the 'knee' of the Pareto curve": the point
    farthest from the line between both ends. With more, the plane meets every axis at 1. Ties go to the first row.
    """
    return int(scaled(costs).sum(axis=1).argmin())
