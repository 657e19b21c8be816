"""How much of what was measured follows from each axis alone: functional analysis of variance (Hutter et al. 2014).

A forest of regression trees is grown over the grid of the axes' values, and the variance of each tree over the whole
grid is split into what its axes explain one by one. In numpy alone: Optuna has it too, but with scikit-learn takes two
seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

TREES = 64

Mask = NDArray[np.bool_]


def shares(
    places: Sequence[Sequence[int]], values: Sequence[float], sizes: Sequence[int], ordered: Sequence[bool]
) -> list[float]:
    """The share of each axis in the variance that single axes explain; they add up to one, or are all zero.

    `places` [points, axes] are places in the lists of the axes' values, of which there are `sizes`. Trees part the
    values of an `ordered` axis into lower and higher ones, those of any other into one and the rest.
    """
    random = np.random.default_rng(0)
    starts = np.cumsum([0, *sizes[:-1]])
    columns = np.asarray(places) + starts
    measured = np.asarray(values, dtype=float)
    splits = np.array(list(_splits(sizes, ordered)))
    explained = np.zeros(len(sizes))
    for _ in range(TREES):
        drawn = random.integers(len(measured), size=len(measured))
        leaves = list(_leaves(columns[drawn], measured[drawn], splits, random))
        explained += _explained(np.array([box for box, _ in leaves]), np.array([mean for _, mean in leaves]), sizes)
    total = explained.sum()
    return [float(share) for share in (explained / total if total > 0 else explained)]


def _splits(sizes: Sequence[int], ordered: Sequence[bool]) -> Iterator[tuple[Mask, Mask]]:
    """Every way to part the values of one axis: which values of all axes, one after the other, are on either side."""
    start = 0
    for size, graded in zip(sizes, ordered, strict=True):
        for value in range(size - 1 if graded else size):
            one = np.ones(sum(sizes), dtype=bool)
            one[start : start + size] = np.arange(size) <= value if graded else np.arange(size) == value
            other = ~one
            other[:start] = other[start + size :] = True
            yield one, other
        start += size


def _leaves(
    columns: NDArray[np.intp], values: NDArray[np.float64], splits: Mask, random: np.random.Generator
) -> Iterator[tuple[Mask, float]]:
    """A tree's leaves: the values of all axes that are inside one, and the mean of its points.

    Each split is the one that leaves the least variance on its sides, one of them by chance where several do.
    """
    goes: Mask = np.asarray(splits[:, 0][:, columns].all(axis=2))  # [splits, points]: to the first side
    nodes = [(np.ones(splits.shape[2], dtype=bool), np.arange(len(values)))]
    while nodes:
        box, points = nodes.pop()
        here, side = values[points] - values[points].mean(), goes[:, points]
        count, total = side.sum(axis=1), side @ here
        parts = (count > 0) & (count < len(points))
        gain = np.zeros(len(splits))
        gain[parts] = total[parts] ** 2 / count[parts] + total[parts] ** 2 / (len(points) - count[parts])
        if not gain.max(initial=0.0) > 1e-12 * (values**2).sum():
            yield box, float(values[points].mean())
            continue
        best = int(random.choice(np.flatnonzero(gain >= gain.max() * (1 - 1e-9))))
        first, second = splits[best]
        nodes += [(box & first, points[side[best]]), (box & second, points[~side[best]])]


def _explained(boxes: Mask, means: NDArray[np.float64], sizes: Sequence[int]) -> NDArray[np.float64]:
    """The share of a tree's variance over the grid that each axis explains alone, [axes]; zeros if it has none."""
    starts = np.cumsum([0, *sizes[:-1]])
    inside = np.add.reduceat(boxes, starts, axis=1, dtype=float) / sizes  # [leaves, axes]
    weighted = inside.prod(axis=1) * means
    mean = weighted.sum()
    variance = (weighted * means).sum() - mean**2
    marginals = (weighted[:, None] / np.repeat(inside, sizes, axis=1) * boxes).sum(axis=0)
    alone = np.add.reduceat(marginals**2, starts) / sizes - mean**2
    return np.maximum(alone, 0.0) / variance if variance > 1e-12 * mean**2 else np.zeros(len(sizes))
