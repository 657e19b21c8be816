"""What it was worth to have other GPUs take a layout's ranks, or other stages its layers: by trials in pairs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from search_spaces.layout import Layout
from search_spaces.placement import plain
from service.paired import Difference, difference
from service.result import Purpose
from trainables.status import Status

if TYPE_CHECKING:
    from service.answers.candidates import Trial

SPEED = "tokens_per_s"
"""What decides: a placement is to be faster."""

COSTS = ("joules_per_token",)
"""Metrics beside it that pairs are compared by, less being better."""

STATES = ("gpu_temp_spread_c", "throttle_time_s")
"""Metrics of which both means are told."""


@dataclass(frozen=True)
class Placement:
    """A layout whose places were tried, beside the plain one.

    `trials` are its own, `speed` what it saves of a step's time by the pairs, `costs` what of each of `COSTS` that both
    have, and `states` the means of each of `STATES`, of the plain layout and of this one. None if there is no pair.
    """

    layout: Layout
    trials: tuple[Trial, ...]
    speed: Difference | None
    costs: Mapping[str, Difference]
    states: Mapping[str, tuple[float, float]]

    @property
    def kept(self) -> bool:
        """Whether it is proven to be faster."""
        return self.speed is not None and self.speed.proven


def placements(trials: Sequence[Trial]) -> list[Placement]:
    """All that were tried, in the order of their first trials.

    Trials come in rounds, each of which has the plain layout once and each of its placements: the n-th trial of one is
    held against the n-th of the other. Pairs with one that failed are left out.
    """
    runs: dict[Layout, list[Trial]] = {}
    for trial in trials:
        over = trial.status not in ("running", "stopped")
        if trial.purpose == Purpose.PLACEMENT and over and not trial.infrastructure:
            runs.setdefault(trial.layout, []).append(trial)
    return [_of(mine, runs.get(plain(layout), [])) for layout, mine in runs.items() if layout != plain(layout)]


def _of(mine: Sequence[Trial], others: Sequence[Trial]) -> Placement:
    pairs = [(one, other) for one, other in zip(others, mine, strict=False) if one.status == other.status == Status.OK]

    def figures(metric: str) -> tuple[list[float], list[float]]:
        both = [(one.metrics.get(metric), other.metrics.get(metric)) for one, other in pairs]
        known = [(one, other) for one, other in both if one is not None and other is not None]
        return [one for one, _ in known], [other for _, other in known]

    speeds = figures(SPEED)
    taken = [[1 / speed for speed in each] for each in speeds]
    of_costs = {metric: figures(metric) for metric in COSTS}
    of_states = {metric: figures(metric) for metric in STATES}
    return Placement(
        mine[0].layout,
        tuple(one for one in mine if one.status == Status.OK),
        difference(*taken) if taken[0] else None,
        {metric: difference(*values) for metric, values in of_costs.items() if values[0]},
        {metric: (statistics.fmean(a), statistics.fmean(b)) for metric, (a, b) in of_states.items() if a},
    )
