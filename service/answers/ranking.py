"""Which layouts are best: the Pareto front and queries on it, from the record of a search alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from service.answers.candidates import Candidate, candidates
from service.errors import InputError, NoAnswerError
from service.goals import Comparison, parse_condition
from service.metrics import DIRECTIONS, Direction, nearest
from service.pareto import knee as bend
from service.record.results import SearchRecord, TrialRecord

_WITHIN = re.compile(r"^\s*(\w+)\s+(\d+(?:\.\d+)?)\s*%\s*$")


def compared(search: SearchRecord) -> Comparison[Candidate]:
    """All that is ranked of a search, held against each other by its goals."""
    return search.goals.among(candidates(search.trials))


def pareto(search: SearchRecord) -> list[Candidate]:
    """The layouts that no other beats on all objectives at once, best on the first objective first.

    Only those that keep the search's constraints take part. An objective that no trial has is left out; a layout that
    lacks one which others have cannot be on the front. Equal ones are all on it. See `notices`.
    """
    return compared(search).front()


def leaders(comparison: Comparison[Candidate]) -> dict[str, Candidate]:
    """Objective -> the best layout on it of those that the search's limits admit.

    As for `best`, layouts that were measured again are asked first.
    """
    leading = {}
    for metric, direction in comparison.objectives.items():
        ordered = comparison.ordered(comparison.admitted, metric, direction)
        if ordered:
            leading[metric] = next((one for one in ordered if one.confirmed), ordered[0])
    return leading


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
    `InputError` for an unknown metric or a malformed condition, `NoAnswerError` if no layout is left.
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
    """What `best` answers, with notices on it: what could not be told apart, and what is not sure to be worse."""
    if bool(maximize) + bool(minimize) + knee > 1:
        raise InputError("best: give one of maximize, minimize and knee")
    comparison = compared(search)
    asked = [*filter(None, [maximize or minimize]), *(parse_condition(text).metric for text in where)]
    for metric in [*asked, *(_nearness(text, search)[0] for text in within)]:
        _check_known(search, comparison.results, metric)

    def choices(some: Sequence[Candidate]) -> tuple[list[Candidate], list[str]]:
        """Those of `some` that meet the query, the best first, with notices."""
        left = _meeting(comparison, some, search, where, within)
        if knee:
            return _bent(comparison, comparison.front(left))
        metric, direction = (maximize, Direction.MAXIMIZE) if maximize else (minimize, Direction.MINIMIZE)
        if metric is None:
            left = comparison.ranked(left)
            metric, direction = next(iter(comparison.objectives.items()), ("", direction))
        ordered = comparison.ordered(left, metric, direction)
        return ordered, noise(ordered, metric)

    confirmed = [one for one in comparison.admitted if one.confirmed]
    chosen, notices = choices(confirmed)
    others, notices_of_others = choices(comparison.admitted)
    if chosen:
        if others and not others[0].confirmed:
            notices.append(f"{others[0].label} was measured once only, or it would be the answer")
        return chosen[0], notices
    if not others:
        among = " and ".join([*where, *(f"{text} of the best" for text in within)])
        left = f" with {among}" if among else ""
        raise NoAnswerError(f"search {search.id}: no trial to choose from{left}; {_count(search.trials)}")
    if any(one.confirmed for one in comparison.results):
        notices_of_others.append("no layout that was measured again meets the conditions: this one was measured once")
    return others[0], notices_of_others


def _meeting(
    comparison: Comparison[Candidate],
    some: Sequence[Candidate],
    search: SearchRecord,
    where: Sequence[str],
    within: Sequence[str],
) -> list[Candidate]:
    """Those of `some` that meet all conditions; see `best`."""
    conditions = [parse_condition(text) for text in where]
    left = [one for one in some if all(comparison.meets(one, condition) for condition in conditions)]
    near = [_near(comparison, left, *_nearness(text, search)) for text in within]
    return [one for one in left if all(one in those for those in near)]


def _near(
    comparison: Comparison[Candidate], some: Sequence[Candidate], metric: str, share: float, direction: Direction
) -> list[Candidate]:
    """Those of `some` that are within a share of the best of them on a metric."""
    values = [(one, comparison.value(one, metric)) for one in some]
    present = [(one, value) for one, value in values if value is not None]
    best = min((value for _, value in present), key=direction.cost, default=0.0)
    return [one for one, value in present if abs(value - best) <= share * abs(best)]


def within_noise(one: Candidate, other: Candidate, metric: str) -> bool:
    """Whether the confidence intervals of a metric meet, of two candidates that have one."""
    if metric not in one.intervals or metric not in other.intervals:
        return False
    return abs(one.metrics[metric] - other.metrics[metric]) <= one.intervals[metric] + other.intervals[metric]


def _bent(comparison: Comparison[Candidate], front: list[Candidate]) -> tuple[list[Candidate], list[str]]:
    """The knee of a front, with a notice where there is none to speak of."""
    if not front:
        return [], []
    notices = [] if len(front) > 2 else [f"the front has no bend: it holds {len(front)} of the layouts"]
    return [front[bend(comparison.costs(front))]], notices


def noise(ordered: Sequence[Candidate], metric: str) -> list[str]:
    """A notice if the best two on a metric differ by less than their confidence intervals."""
    if len(ordered) < 2:
        return []
    first, second = ordered[:2]
    if first.metrics[metric] == second.metrics[metric] or not within_noise(first, second, metric):
        return []
    return [f"{metric} of {first.label} and of {second.label} are within noise of each other"]


def _nearness(text: str, search: SearchRecord) -> tuple[str, float, Direction]:
    """Metric, share and the better direction of 'METRIC NUMBER%'."""
    match = _WITHIN.match(text)
    if match is None:
        raise InputError(f"within: {text!r} is not 'METRIC NUMBER%'")
    direction = (DIRECTIONS | search.objectives).get(match[1])
    if direction is None:
        raise InputError(f"within: neither more nor less of {match[1]} is better; {nearest(match[1], DIRECTIONS)}")
    return match[1], float(match[2]) / 100, direction


def _check_known(search: SearchRecord, ranked: Sequence[Candidate], metric: str) -> None:
    recorded = {name for one in ranked for name in one.metrics}
    if not recorded:
        raise NoAnswerError(f"search {search.id}: no trial to choose from; {_count(search.trials)}")
    if metric not in recorded:
        raise InputError(f"search {search.id} has no metric {metric!r}; {nearest(metric, recorded)}")


def _count(trials: Sequence[TrialRecord]) -> str:
    counts = Counter(trial.status for trial in trials)
    return "its trials: " + (", ".join(f"{n} {status}" for status, n in counts.items()) or "none")
