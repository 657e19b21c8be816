"""Which layouts are best: the Pareto front and queries on it, from the record of a search alone.

Figures are only compared with figures that are as little in doubt.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from service.answers.candidates import METHODS, Candidate, candidates, doubt
from service.errors import InputError
from service.pareto import knee, pareto_front
from service.record.results import SearchRecord, TrialRecord

DIRECTIONS = {
    "tokens_per_s": "maximize",
    "tokens_per_s_per_gpu": "maximize",
    "mfu": "maximize",
    "min_gpu_temp_margin_c": "maximize",
    **dict.fromkeys(
        (
            "step_time_s",
            "joules_per_token",
            "energy_per_step_j",
            "idle_energy_j",
            "mean_power_w",
            "peak_power_w",
            "power_spread_w",
            "throttle_ratio",
            "throttle_time_s",
            "power_cap_ratio",
            "mean_gpu_temp_c",
            "peak_gpu_temp_c",
            "gpu_temp_spread_c",
            "peak_hbm_temp_c",
            "peak_memory_gib",
            "trial_overhead_s",
        ),
        "minimize",
    ),
}
"""Which way a metric is better, of those for which one way is."""

_CONDITION = re.compile(r"^\s*(\w+)\s*(<=|>=|==|<|>)\s*(\S+)\s*$")
_WITHIN = re.compile(r"^\s*(\w+)\s+(\d+(?:\.\d+)?)\s*%\s*$")
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}


class Ranking:
    """Some candidates of a search, compared on its objectives and under its constraints."""

    def __init__(self, search: SearchRecord, candidates: Sequence[Candidate]) -> None:
        self.search, self.candidates = search, candidates
        self._comparable: dict[str, dict[Candidate, float]] = {}

    def comparable(self, metric: str) -> dict[Candidate, float]:
        """The values of a metric; only those of the method that is the least in doubt."""
        if metric not in self._comparable:
            having = [one for one in self.candidates if metric in one.metrics]
            least = min((doubt(one.methods.get(metric)) for one in having), default=0)
            alike = [one for one in having if doubt(one.methods.get(metric)) == least]
            self._comparable[metric] = {one: one.metrics[metric] for one in alike}
        return self._comparable[metric]

    def method(self, metric: str) -> str:
        """measured, extrapolated or estimated: what the comparable values of a metric have in common."""
        return METHODS[min((doubt(one.methods.get(metric)) for one in self.comparable(metric)), default=0)]

    @cached_property
    def objectives(self) -> dict[str, tuple[dict[Candidate, float], float]]:
        """Of each objective that can be ranked: its comparable values, and the sign that makes smaller better."""
        values = {metric: self.comparable(metric) for metric in self.search.objectives}
        return {metric: (found, _sign(self.search.objectives[metric])) for metric, found in values.items() if found}

    def admitted(self, where: Sequence[str] = (), within: Sequence[str] = ()) -> list[Candidate]:
        """Those for which the search's constraints and all conditions hold; see `keeps` and `best`."""
        left = [one for one in self.candidates if all(self.keeps(one, text) for text in self.search.constraints)]
        left = [one for one in left if all(self.meets(one, text) for text in where)]
        near = [self._near(text, left) for text in within]
        return [one for one in left if all(one in those for those in near)]

    def meets(self, candidate: Candidate, condition: str) -> bool:
        """Whether a condition, 'metric<=number', holds, which it does not for a metric that is missing."""
        metric, holds, bound = parse_condition(condition)
        values = self.comparable(metric)
        return candidate in values and holds(values[candidate], bound)

    def keeps(self, candidate: Candidate, constraint: str) -> bool:
        """Whether a constraint of the search holds; one on a metric that no candidate has is not applied."""
        return not self.comparable(parse_condition(constraint)[0]) or self.meets(candidate, constraint)

    def complete(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those of `candidates` that have every objective that can be ranked."""
        ranked = self.objectives.values()
        return [one for one in candidates if ranked and all(one in values for values, _ in ranked)]

    def costs(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """[n, objectives], all to be minimised, of candidates that are `complete`."""
        return np.array([[sign * values[one] for values, sign in self.objectives.values()] for one in candidates])

    def front(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those of `candidates` that none of them beats on all objectives, best on the first objective first."""
        ranked = self.complete(candidates)
        return [ranked[i] for i in pareto_front(self.costs(ranked))] if ranked else []

    def ordered(self, candidates: Sequence[Candidate], metric: str, direction: str) -> list[Candidate]:
        """Those of `candidates` with a comparable value of `metric`, the best first, ties by the objectives."""
        by = [(self.comparable(metric), _sign(direction)), *self.objectives.values()]

        def cost(one: Candidate) -> list[float]:
            return [sign * values[one] if one in values else math.inf for values, sign in by]

        return sorted((one for one in candidates if one in by[0][0]), key=cost)

    def _near(self, text: str, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those of `candidates` that are within a share of the best of them on a metric: 'tokens_per_s 2%'."""
        metric, share, direction = _nearness(text, self.search)
        ordered = self.ordered(candidates, metric, direction)
        values = self.comparable(metric)
        return [one for one in ordered if abs(values[one] - values[ordered[0]]) <= share * abs(values[ordered[0]])]


def pareto(search: SearchRecord) -> list[Candidate]:
    """The layouts that no other beats on all objectives at once, best on the first objective first.

    Only those that keep the search's constraints take part. An objective that no trial has is left out; a layout that
    lacks one which others have cannot be on the front. Equal ones are all on it. See `notices`.
    """
    ranking = Ranking(search, candidates(search))
    return ranking.front(ranking.admitted())


def best(
    search: SearchRecord,
    maximize: str | None = None,
    minimize: str | None = None,
    where: Sequence[str] = (),
    within: Sequence[str] = (),
    knee: bool = False,
) -> Candidate:
    """The best layout on one metric among those for which every condition holds.

    Conditions are `where`, 'metric<=number', and `within`, 'metric 2%': no more than that share off the best value of
    the metric among layouts that meet `where` (the epsilon-constraint method, Haimes et al. 1971). Without a metric,
    the best point of the Pareto front on the search's first objective or, with `knee`, the one where the front bends
    most (`service.pareto.knee`). Ties are settled by the other objectives in their order.

    Layouts that were measured again are asked first, and the others only if none of those meets the conditions. Raises
    `InputError` for an unknown metric, a malformed condition, or if no layout is left.
    """
    return answer(search, maximize, minimize, where, within, knee)[0]


def answer(
    search: SearchRecord,
    maximize: str | None = None,
    minimize: str | None = None,
    where: Sequence[str] = (),
    within: Sequence[str] = (),
    knee: bool = False,
) -> tuple[Candidate, list[str]]:
    """The same with notices on the choice: what could not be told apart from it, and what is not sure to be worse."""
    if bool(maximize) + bool(minimize) + knee > 1:
        raise InputError("best: give one of maximize, minimize and knee")
    ranked = candidates(search)
    asked = [*filter(None, [maximize or minimize]), *(parse_condition(text)[0] for text in where)]
    for metric in [*asked, *(_nearness(text, search)[0] for text in within)]:
        _check_known(search, ranked, metric)

    def choices(among: Sequence[Candidate]) -> tuple[list[Candidate], list[str]]:
        """What meets the query, the best first, with notices."""
        ranking = Ranking(search, among)
        admitted = ranking.admitted(where, within)
        if knee:
            return _bent(ranking, ranking.front(admitted))
        metric, direction = (maximize, "maximize") if maximize else (minimize, "minimize")
        if metric is None:
            admitted = ranking.complete(admitted)
            metric = next(iter(ranking.objectives), "")
            direction = search.objectives.get(metric, direction)
        ordered = ranking.ordered(admitted, metric, direction)
        return ordered, noise(ordered, metric)

    confirmed = [one for one in ranked if one.confirmed]
    chosen, told = choices(confirmed)
    others, told_of_others = choices(ranked)
    if chosen:
        if others and not others[0].confirmed:
            told.append(f"{others[0].label} was measured once only, or it would be the answer")
        return chosen[0], told
    if not others:
        among = " and ".join([*where, *(f"{text} of the best" for text in within)])
        left = f" with {among}" if among else ""
        raise InputError(f"search {search.id}: no trial to choose from{left}; {_count(search.trials)}")
    if confirmed:
        told_of_others.append("no layout that was measured again meets the conditions: this one was measured once")
    return others[0], told_of_others


def within_noise(one: Candidate, other: Candidate, metric: str) -> bool:
    """Whether the confidence intervals of a metric meet, of two candidates that have one."""
    if metric not in one.intervals or metric not in other.intervals:
        return False
    return abs(one.metrics[metric] - other.metrics[metric]) <= one.intervals[metric] + other.intervals[metric]


def _sign(direction: str) -> float:
    return -1.0 if direction == "maximize" else 1.0


def _bent(ranking: Ranking, front: list[Candidate]) -> tuple[list[Candidate], list[str]]:
    """The knee of a front, with a notice where there is none to speak of."""
    if not front:
        return [], []
    told = [] if len(front) > 2 else [f"the front has no bend: it holds {len(front)} of the layouts"]
    return [front[knee(ranking.costs(front))]], told


def noise(ordered: Sequence[Candidate], metric: str) -> list[str]:
    """A notice if the best two on a metric differ by less than their confidence intervals."""
    if len(ordered) < 2:
        return []
    first, second = ordered[:2]
    if first.metrics[metric] == second.metrics[metric] or not within_noise(first, second, metric):
        return []
    return [f"{metric} of {first.label} and of {second.label} are within noise of each other"]


def parse_condition(text: str) -> tuple[str, Callable[[float, float], bool], float]:
    """Metric, comparison and bound of 'METRIC<=NUMBER'. Raises `InputError` for anything else."""
    match = _CONDITION.match(text)
    try:
        if match and not math.isnan(bound := float(match[3])):
            return match[1], _HOLDS[match[2]], bound
    except ValueError:
        pass
    raise InputError(f"condition {text!r} is not 'METRIC<=NUMBER'; operators: {' '.join(_HOLDS)}")


def _nearness(text: str, search: SearchRecord) -> tuple[str, float, str]:
    """Metric, share and the better direction of 'METRIC NUMBER%'."""
    match = _WITHIN.match(text)
    if match is None:
        raise InputError(f"within: {text!r} is not 'METRIC NUMBER%'")
    direction = (DIRECTIONS | search.objectives).get(match[1])
    if direction is None:
        raise InputError(f"within: neither more nor less of {match[1]} is better; known: {', '.join(DIRECTIONS)}")
    return match[1], float(match[2]) / 100, direction


def _check_known(search: SearchRecord, ranked: Sequence[Candidate], metric: str) -> None:
    known = sorted({name for one in ranked for name in one.metrics})
    if metric not in known:
        recorded = f"recorded: {', '.join(known)}" if known else f"{_count(search.trials)}"
        raise InputError(f"search {search.id} has no metric {metric!r}; {recorded}")


def _count(trials: Sequence[TrialRecord]) -> str:
    counts = Counter(trial.status for trial in trials)
    return "its trials: " + (", ".join(f"{n} {status}" for status, n in counts.items()) or "none")
