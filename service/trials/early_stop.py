"""Trials that cannot become one of the best: what a trial could still come to, and who beats even that.

A trial is judged by the steps that ended its warm-up, which are steady already. What it is ended for is no measurement:
it is recorded as `pruned`, a censored outcome, with the bounds that were held against the front.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from service.goals import Figures, Goals
from service.metrics import TABLE, known
from service.problem import Problem
from service.trials.figures import of_step
from trainables.measure import Procedure, Stretch

TIME_NOISE, ENERGY_NOISE = 3 * 0.0025, 3 * 0.009
"""Shares by which time and energy may still turn out better: three times the largest difference between neighbouring
trials of a layout on an H200 (benchmarks/results/README.md)."""

SPREADS = 3
"""The share by which they may still turn out better where steps vary more, as on a CPU: so many standard errors of the
mean of the steps so far."""

EDGES_S = 0.2
"""Seconds of whose power is not known in which step they fall: an energy counter's refresh at either end."""

WORTH_S = 5.0
"""Seconds that a trial must have before it for its end to save more than the judgement takes."""

BOUND = "bound_"
"""What the name of a metric begins with that is the best which a pruned trial could have come to."""


def remaining_s(procedure: Procedure, step_s: float) -> float:
    """Seconds of the window that a trial has before it, and of the step that is profiled."""
    return max(procedure.window_s, procedure.window_min_steps * step_s) + procedure.breakdown * step_s


def bounds(problem: Problem, gpus: int, steps: Stretch, energy_j: float | None) -> dict[str, float]:
    """The best that a trial on so many GPUs could still come to, by objective; none where nothing can be said.

    `energy_j` is what the GPUs took for these steps, None if it is not known.
    """
    count, mean = len(steps.steps_s), statistics.fmean(steps.steps_s)
    spread = SPREADS * statistics.stdev(steps.steps_s) / mean / count**0.5
    if spread >= 1:
        return {}
    step_s = min(steps.steps_s) * (1 - max(TIME_NOISE, spread))
    joules = None
    if energy_j is not None:
        joules = energy_j / count * (1 - max(ENERGY_NOISE, spread) - EDGES_S / sum(steps.steps_s))
    best = of_step(problem, gpus, problem.tokens_per_step, mean_s=step_s, median_s=step_s, energy_j=joules)
    best |= {metric.name: metric.least for metric in TABLE if metric.least is not None}
    return {
        name: value
        for name, direction in problem.goals.objectives.items()
        if known(name).bounded(direction) and (value := best.get(name)) is not None
    }


def rival(goals: Goals, best: Mapping[str, float], front: Sequence[Mapping[str, float]]) -> Mapping[str, float] | None:
    """A point of `front` that is nowhere worse than the bounds `best` and somewhere better, or None.

    Objectives that no point of the front has are left out; one without a bound might still come to anything.
    """
    points = [Figures(point) for point in front]
    beating = goals.among(points).beating(Figures(best), points)
    return None if beating is None else front[points.index(beating)]


def cause(best: Mapping[str, float], point: Mapping[str, float]) -> str:
    """One line on why a trial was ended: the best it could have come to, and the point of the front that beats it."""
    at_best = ", ".join(f"{name} {value:.4g}" for name, value in best.items())
    beaten = ", ".join(f"{name} {point[name]:.4g}" for name in best if name in point)
    return f"dominated: {at_best} at best, where another has {beaten}"
