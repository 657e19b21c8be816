"""Which layouts are best: the Pareto front and queries on it, from the record of a search alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from service.answers.candidates import Candidate, candidates
from service.answers.query import FIRST, Near, Query
from service.errors import InputError, NoAnswerError
from service.goals import Comparison
from service.metrics import DIRECTIONS, Direction, nearest
from service.pareto import knee as bend
from service.record.results import SearchRecord, TrialRecord


def compared(search: SearchRecord) -> Comparison[Candidate]:
    """All that is ranked of a search, held against each other by its goals."""
    return search.goals.among(candidates(search.trials))


def pareto(search: SearchRecord) -> list[Candidate]:
    """The layouts that no other beats on all objectives at once, best on the first objective first.

    Only those take part that keep the search's constraints and have every objective; one that no trial has is left
    out. Equal ones are all on it.
    """
    return compared(search).front()


def ranked(comparison: Comparison[Candidate]) -> list[Candidate]:
    """Those that any answer may name: they keep the search's constraints and have every objective."""
    return comparison.ranked(comparison.admitted)


def leaders(comparison: Comparison[Candidate]) -> dict[str, Candidate]:
    """Objective -> the best layout on it, which is on the front; none if there is no front."""
    some = ranked(comparison)
    objectives = comparison.objectives.items()
    return {metric: comparison.ordered(some, metric, way)[0] for metric, way in objectives if some}


def undecided(comparison: Comparison[Candidate]) -> dict[str, tuple[Candidate, Candidate]]:
    """Objective -> the layout that leads on it and another that may be better still; see `rivals`."""
    some = ranked(comparison)
    pairs = {
        metric: rivals(comparison.ordered(some, metric, way), metric) for metric, way in comparison.objectives.items()
    }
    return {metric: pair for metric, pair in pairs.items() if pair is not None}


def rivals(ordered: Sequence[Candidate], metric: str) -> tuple[Candidate, Candidate] | None:
    """The first of candidates that are ordered by a metric, and the one from which it cannot be told apart.

    If it was measured once while others were measured again, that is the best of the others, as the best of many
    single measurements is partly luck; else the second, if it is within noise. None where it is plain which is better,
    and as long as none was measured again.
    """
    first = ordered[0] if ordered else None
    ordered = [one for one in ordered if first is None or not one.beaten_by(first)]
    again = [one for one in ordered if one.confirmed]
    if first is None or not again or len(ordered) < 2:
        return None
    other = ordered[1] if first.confirmed else again[0]
    if first.metrics[metric] == other.metrics[metric]:
        return None
    return (first, other) if not first.confirmed or within_noise(first, other, metric) else None


def within_noise(one: Candidate, other: Candidate, metric: str) -> bool:
    """Whether the confidence intervals of a metric meet; that of a figure without one is the figure alone."""
    gap = abs(one.metrics[metric] - other.metrics[metric])
    return gap <= one.intervals.get(metric, 0.0) + other.intervals.get(metric, 0.0)


def told(metric: str, pair: tuple[Candidate, Candidate]) -> str:
    """The notice on two layouts that cannot be told apart on a metric."""
    return f"undecided on {metric}: between {' and '.join(f'{one.label} ({_often(one)})' for one in pair)}"


def _often(one: Candidate) -> str:
    if not one.confirmed:
        return "measured once"
    return f"{len(one.trials)} times" if len(one.trials) > 1 else "once again"


def best(search: SearchRecord, query: Query = FIRST) -> Candidate:
    """The best layout on the query's metric among those of `ranked` for which every condition holds.

    A condition of `within` is on how far a metric is off its best value among layouts that meet `where` (the
    epsilon-constraint method, Haimes et al. 1971). Ties are settled by the objectives in their order, so that what is
    best on one of them without conditions is on the front. With `knee`, the point where the front bends most
    (`service.pareto.knee`).

    Raises `InputError` for an unknown metric, `NoAnswerError` if no layout is left.
    """
    return answer(search, query)[0]


def answer(search: SearchRecord, query: Query = FIRST) -> tuple[Candidate, list[str]]:
    """What `best` answers, with notices on it: what it could not be told apart from, or that it was measured once."""
    comparison = compared(search)
    for metric in query.metrics:
        _check_known(search, comparison.results, metric)
    some = ranked(comparison)
    left = _meeting(comparison, some, search, query)
    metric, direction = query.by or next(iter(comparison.objectives.items()), ("", Direction.MAXIMIZE))
    choices = comparison.front(left) if query.knee else comparison.ordered(left, metric, direction)
    if not choices:
        conditions = query.conditions and f" with {query.conditions}"
        lacking = "" if some or not comparison.admitted else f"; none has all of {', '.join(comparison.objectives)}"
        reason = f"no trial to choose from{conditions}; {_count(search.trials)}{lacking}"
        raise NoAnswerError(f"search {search.id}: {reason}")
    notices = []
    if query.knee and len(choices) < 3:
        notices.append(f"the front has no bend: it holds {len(choices)} of the layouts")
    elif not query.knee and (pair := rivals(choices, metric)):
        notices.append(told(metric, pair))
    if not any(one.confirmed for one in choices) and any(one.confirmed for one in some):
        notices.append("no layout that was measured again meets the conditions: this one was measured once")
    return choices[bend(comparison.costs(choices)) if query.knee else 0], notices


def _meeting(
    comparison: Comparison[Candidate], some: Sequence[Candidate], search: SearchRecord, query: Query
) -> list[Candidate]:
    """Those of `some` that meet all conditions; see `best`."""
    left = [one for one in some if all(comparison.meets(one, condition) for condition in query.where)]
    near = [_near(comparison, left, share, _better(search, share.metric)) for share in query.within]
    return [one for one in left if all(one in those for those in near)]


def _near(
    comparison: Comparison[Candidate], some: Sequence[Candidate], near: Near, direction: Direction
) -> list[Candidate]:
    """Those of `some` that are within a share of the best of them on a metric."""
    values = [(one, comparison.value(one, near.metric)) for one in some]
    present = [(one, value) for one, value in values if value is not None]
    best = min((value for _, value in present), key=direction.cost, default=0.0)
    return [one for one, value in present if abs(value - best) <= near.share * abs(best)]


def _better(search: SearchRecord, metric: str) -> Direction:
    """Which way a metric is better: as in the search's objectives, else as is plain."""
    direction = (DIRECTIONS | search.objectives).get(metric)
    if direction is None:
        raise InputError(f"within: neither more nor less of {metric} is better; {nearest(metric, DIRECTIONS)}")
    return direction


def _check_known(search: SearchRecord, ranked: Sequence[Candidate], metric: str) -> None:
    recorded = {name for one in ranked for name in one.metrics}
    if not recorded:
        raise NoAnswerError(f"search {search.id}: no trial to choose from; {_count(search.trials)}")
    if metric not in recorded:
        raise InputError(f"search {search.id} has no metric {metric!r}; {nearest(metric, recorded)}")


def _count(trials: Sequence[TrialRecord]) -> str:
    counts = Counter(trial.status for trial in trials)
    return "its trials: " + (", ".join(f"{n} {status}" for status, n in counts.items()) or "none")
