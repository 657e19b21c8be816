"""A sampler for spaces that can be listed: a Gaussian process over the legal layouts, on top of what is predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState
from scipy.linalg import cho_factor, cho_solve
from scipy.special import ndtr
from scipy.stats import norm

from search_spaces.memory import Needed

Array = NDArray[np.float64]

Coordinates = tuple[Any, ...]
"""Where a layout lies, axis by axis."""

CANDIDATES = 5000
"""Layouts that are weighed for one suggestion, at most."""

CELLS = 1024
"""Points by which volumes are estimated."""

BEYOND = 0.1
"""How far the reference lies beyond the worst, in the range of an objective, so that both ends of a front count."""

NOISE = 1e-4
"""Variance of a measured logarithm: 1% of the figure."""

OFFSET = 0.1
"""Variance of what the logarithms of all layouts are off by alike."""

SCALES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Variances of what they are off by besides, of which the likeliest is taken; `UNMEASURED` before there is a figure."""

UNMEASURED = 0.03

TRUSTED_MEMORY = 0.01, (0.001, 0.003, 0.01, 0.03, 0.1), 0.01
"""The variances that hold for the memory that layouts need, in place of `OFFSET`, `SCALES` and `UNMEASURED`. Of a sweep
that it had not seen, the memory model's estimates were a tenth off."""

DOUBTFUL_MEMORY = 0.3, (0.03, 0.1, 0.3, 1.0), 0.3
"""Likewise where the estimates are of another program, or there are none: twice as much would be no surprise."""

SUM, REACH = 0.9, 0.5
"""Share of the kernel that is a sum over the axes, and its length scale, in that of an axis from end to end."""

LIKELY = 0.95
"""A layout is left while others are likelier to fit in memory: while its probability is below this share of the
largest."""

FAILURES = ("ran", "memory")
"""Constraints of which a trial without figures of its own violates one."""


class SurrogateSampler(BaseSampler):
    """Suggests the candidate that is expected to add the most hypervolume to the front.

    A Gaussian process (Rasmussen and Williams 2006, algorithm 2.1) models by how much the logarithm of each objective
    is off what was predicted, or off its mean where nothing was. Its kernel is mostly a sum over the axes, as a setting
    costs about the same share beside any others (Duvenaud et al. 2011), the rest a product. Trials without figures of
    their own are taken to come out as expected. Constraints are modelled likewise, memory by how much its logarithm is
    off the estimates: what a candidate may add counts by the probability that it keeps them (Gardner et al. 2014),
    and nothing while others are clearly likelier to fit in memory: a trial that runs out adds nothing.
    """

    def __init__(
        self,
        space: Mapping[str, BaseDistribution],
        candidates: Callable[[], Mapping[Coordinates, float | None]],
        needed: Callable[[], Mapping[Coordinates, Needed]],
        predicted: Mapping[Coordinates, Sequence[float | None]],
        seed: int,
        doubtful_memory: bool = False,
    ) -> None:
        """`candidates` has the share of a GPU's memory that each is estimated to need, None where that is not known;
        `needed` has what was learnt of that by trials. With `doubtful_memory` the estimates may be far off.

        `predicted` has the objectives of layouts, in the study's order, None where there is no prediction.
        """
        self.space, self.axes = dict(space), list(space)
        self.ordered = np.array([isinstance(axis, FloatDistribution) for axis in space.values()])
        self.spans = np.array([axis.high - axis.low for axis in space.values() if isinstance(axis, FloatDistribution)])
        self.memory = DOUBTFUL_MEMORY if doubtful_memory else TRUSTED_MEMORY
        self.candidates, self.needed, self.predicted = candidates, needed, predicted
        self.random = np.random.default_rng(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.space

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise NotImplementedError("all axes are suggested at once")

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        candidates = self.candidates()
        untried = list(candidates)
        if len(untried) > CANDIDATES:
            untried = self._promising(study, untried)
        shares = np.array([candidates[place] for place in untried], float)
        best = int(self._gain(study, untried, shares).argmax()) if len(untried) > 1 else 0
        return dict(zip(self.axes, untried[best], strict=True))

    def _promising(self, study: Study, untried: list[Coordinates]) -> list[Coordinates]:
        """`CANDIDATES` of `untried`, at most: half of them drawn at random, the others the best predicted."""
        chosen = set(self.random.choice(len(untried), CANDIDATES // 2, replace=False).tolist())
        if self.predicted:
            unknown = [None] * len(study.directions)
            ahead = np.array([self.predicted.get(place, unknown) for place in untried], float)
            for values, direction in zip(ahead.T, study.directions, strict=True):
                order = (-values if direction == StudyDirection.MAXIMIZE else values).argsort()
                chosen |= set(order[: CANDIDATES // 2 // len(study.directions)].tolist())
        return [untried[i] for i in sorted(chosen)]

    def _gain(self, study: Study, untried: list[Coordinates], shares: Array) -> Array:
        """Hypervolume that each of `untried` is expected to add, up to a common factor."""
        trials = [trial for trial in study.get_trials(deepcopy=False) if len(trial.params) == len(self.axes)]
        complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
        measured = [trial for trial in complete if _has_figures(trial)]
        failed = [trial for trial in complete if not _has_figures(trial)]
        others = [trial for trial in trials if trial.state in (TrialState.RUNNING, TrialState.PRUNED)]
        seen = [tuple(trial.params[axis] for axis in self.axes) for trial in measured + failed + others]
        places = seen + untried
        process = _Process(self._likeness(seen, places))

        figures, means, deviations = [], [], []
        for number, direction in enumerate(study.directions):
            sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
            values = np.array([trial.values[number] for trial in measured])
            ahead = np.array([self.predicted[place][number] for place in places if place in self.predicted], float)
            logarithm = bool((values > 0).all())
            values = np.log(values) if logarithm else values
            if logarithm and len(ahead) == len(places) and not np.isnan(ahead).any():
                mean, deviation = process.expect(values, np.log(ahead))
            elif len(set(values)) > 1:
                mean, deviation = process.expect(values)
            else:  # nothing is known of it, or it decides nothing
                continue
            figures.append(sign * values)
            means.append(sign * mean)
            deviations.append(deviation)
        estimated = bool(np.isfinite(shares).all())
        chance = self._fits(untried, shares) if estimated else np.ones(len(untried))
        likely = chance >= LIKELY * chance.max()
        if not means:
            return np.where(likely, self.random.random(len(untried)), 0.0)

        for name in complete[0].constraints if complete else ():
            values = np.array([t.constraints[name] for t in (measured + failed if name in FAILURES else measured)])
            if len(set(values)) > 1 and not (name == "memory" and estimated):
                mean, deviation = process.expect(values)
                chance *= ndtr(-mean / deviation)[len(seen) :]
        kept = [max(trial.constraints.values()) <= 0 for trial in measured]
        front = np.array(figures).T[kept]
        gain: Array = chance * self._added(front, np.array(means).T, np.array(deviations).T)[len(seen) :]
        gain = np.where(likely, gain, 0.0)
        return gain if gain.any() else chance  # rather than whichever is first

    def _fits(self, untried: list[Coordinates], shares: Array) -> Array:
        """Probability of each of `untried` that it fits in memory, of which it is estimated to need `shares`."""
        needed = self.needed()
        known = [place for place, need in needed.items() if need.after is not None]
        seen = known + [place for place, need in needed.items() if need.after is None]
        places = seen + untried
        ahead = np.log(np.array([needed[place].before for place in seen] + list(shares), float))
        after = np.log(np.array([needed[place].after for place in known], float))
        measured = _Process(self._likeness(known, places), *self.memory)
        mean, deviation = measured.expect(after, ahead)
        bounded = slice(len(known), len(seen))
        signs = np.array([-1.0 if needed[place].fits else 1.0 for place in seen[bounded]])
        after = np.append(after, _beyond_zero(mean[bounded], deviation[bounded], signs))
        mean, deviation = _Process(self._likeness(seen, places), *self.memory).expect(after, ahead)
        chance: Array = ndtr(-mean / deviation)[len(seen) :]
        return chance

    def _likeness(self, some: list[Coordinates], others: list[Coordinates]) -> Array:
        """Correlation of what two layouts are off by, for each of `some` and each of `others`."""
        axes = len(self.axes)
        apart = np.array(some, float).reshape(-1, 1, axes) - np.array(others, float).reshape(1, -1, axes)
        apart[..., ~self.ordered] = apart[..., ~self.ordered] != 0
        apart[..., self.ordered] /= self.spans
        squares = apart**2 / (2 * REACH**2)
        likeness: Array = SUM * np.exp(-squares).mean(axis=2) + (1 - SUM) * np.exp(-squares.mean(axis=2))
        return likeness

    def _added(self, front: Array, mean: Array, deviation: Array) -> Array:
        """Volume that each row of `mean` [places, objectives], to be minimised, is expected to add to `front`.

        It is the integral, over all that the front does not dominate, of the probability that the row dominates it
        (Emmerich et al. 2006); the objectives are independent. The reference lies beyond all places.
        """
        low, high = (mean - 2 * deviation).min(axis=0), np.vstack([mean, front]).max(axis=0)
        high += BEYOND * (high - low)
        cells = low + self.random.random((CELLS, len(low))) * (high - low)
        cells = cells[~(front[:, None] <= cells).all(axis=2).any(axis=0)]
        reached = np.ones((len(mean), len(cells)))
        for bound, centre, width in zip(cells.T, mean.T, deviation.T, strict=True):
            reached *= ndtr((bound - centre[:, None]) / width[:, None])
        volumes: Array = reached.sum(axis=1)
        return volumes


def _has_figures(trial: FrozenTrial) -> bool:
    """Whether the values of a complete trial are its own, not the worst that others had."""
    return all(trial.constraints[name] <= 0 for name in FAILURES)


def _beyond_zero(mean: Array, deviation: Array, signs: Array) -> Array:
    """Means of normal variables of which the sign is known, 1 or -1."""
    apart = signs * mean / deviation
    beyond: Array = mean + signs * deviation * np.exp(norm.logpdf(apart) - norm.logcdf(apart))
    return beyond


class _Process:
    """A Gaussian process over places of which the first have been seen."""

    def __init__(
        self,
        likeness: Array,
        offset: float = OFFSET,
        scales: Sequence[float] = SCALES,
        unmeasured: float = UNMEASURED,
    ) -> None:
        """`likeness` [seen, places]; the others are variances, as above."""
        self.likeness, self.offset, self.scales, self.unmeasured = likeness, offset, scales, unmeasured

    def expect(self, values: Array, ahead: Array | None = None) -> tuple[Array, Array]:
        """Mean and standard deviation of a figure at each place.

        `values` are those of the first places; others that have been seen count as if they had come out as expected.
        `ahead` is what was predicted of each place: without, the mean of `values`, and their spread is the unit.
        """
        known, unit = len(values), 1.0
        if ahead is None:
            ahead, unit = np.full(self.likeness.shape[1], values.mean()), values.std()
        off = (values - ahead[:known]) / unit
        scale = max(self.scales, key=lambda scale: self._likelihood(scale, off)) if known else self.unmeasured
        if known < len(self.likeness):
            off = np.append(off, self._posterior(scale, off)[0][known : len(self.likeness)])
        mean, variance = self._posterior(scale, off)
        return ahead + unit * mean, unit * np.sqrt(np.maximum(variance, 0.0) + NOISE)

    def _posterior(self, scale: float, off: Array) -> tuple[Array, Array]:
        covariance = scale * self.likeness[: len(off)] + self.offset
        solved = cho_solve(self._factor(scale, len(off)), covariance) if len(off) else covariance
        return off @ solved, scale + self.offset - (covariance * solved).sum(axis=0)

    def _likelihood(self, scale: float, off: Array) -> float:
        """Logarithm of the density of `off`, up to a constant."""
        factor = self._factor(scale, len(off))
        return float(-off @ cho_solve(factor, off) / 2 - np.log(np.diag(factor[0])).sum())

    def _factor(self, scale: float, known: int) -> tuple[Array, bool]:
        covariance = scale * self.likeness[:known, :known] + self.offset + NOISE * np.eye(known)
        factor: tuple[Array, bool] = cho_factor(covariance, lower=True)
        return factor
