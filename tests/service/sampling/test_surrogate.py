"""The surrogate starts from predictions, corrects them by what it is told, and weighs what may fail."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from search_spaces.memory import Needed
from service.sampling import surrogate
from service.sampling.surrogate import Coordinates, SurrogateSampler, _Process

SPACE: dict[str, BaseDistribution] = {
    "engine": CategoricalDistribution([0, 1]),
    "tensor": FloatDistribution(0.0, 3.0),
    "micro": FloatDistribution(0.0, 2.0),
}
POINTS: list[Coordinates] = [(e, float(t), float(m)) for e in (0, 1) for t in range(4) for m in range(3)]


def speed(point: Coordinates) -> float:
    engine, tensor, micro = point
    return 1000 * math.exp(0.1 * micro - 0.2 * tensor - 0.3 * engine)


def joules(point: Coordinates) -> float:
    """The trade-off: what is fast takes more."""
    return speed(point) ** 1.5 / 1e5


class Search:
    """A study of `POINTS` with one or two objectives, told by hand."""

    def __init__(
        self,
        predicted: Mapping[Coordinates, Sequence[float | None]] | None = None,
        shares: Mapping[Coordinates, float] | None = None,
        directions: tuple[str, ...] = ("maximize",),
        doubtful: bool = False,
    ) -> None:
        self.left: dict[Coordinates, float | None] = dict.fromkeys(POINTS) | dict(shares or {})
        self.needed: dict[Coordinates, Needed] = {}
        self.sampler = SurrogateSampler(SPACE, lambda: self.left, lambda: self.needed, predicted or {}, 0, doubtful)
        self.study = optuna.create_study(
            directions=[StudyDirection[way.upper()] for way in directions], sampler=self.sampler
        )

    def tell(
        self,
        point: Coordinates,
        *values: float,
        state: TrialState = TrialState.COMPLETE,
        memory: float = -1.0,
        limit: float = -1.0,
    ) -> None:
        self.left.pop(point)
        self.study.add_trial(
            create_trial(
                state=state,
                params=dict(zip(SPACE, point, strict=True)),
                distributions=SPACE,
                values=list(values) or None,
                constraints={"ran": -1.0, "memory": memory, "limit": limit} if values else None,
            )
        )

    def wants(self) -> Coordinates:
        trial = self.study.ask(SPACE)
        self.study.tell(trial, state=TrialState.FAIL)  # out of the way of what follows
        return tuple(trial.params[axis] for axis in SPACE)


def by_speed(points: list[Coordinates]) -> list[Coordinates]:
    return sorted(points, key=speed, reverse=True)


@pytest.mark.parametrize("offset", [0.5, 1.0, 2.0])
def test_right_predictions_are_followed_whatever_all_are_off_by(offset: float) -> None:
    search = Search({point: [speed(point)] for point in POINTS})
    asked = []
    for _ in range(4):
        asked.append(search.wants())
        search.tell(asked[-1], offset * speed(asked[-1]))
    assert asked[0] == by_speed(POINTS)[0]
    assert set(asked) <= set(by_speed(POINTS)[:8])


def test_predictions_that_prove_wrong_on_an_axis_are_corrected_along_it() -> None:
    """The engine predicted to be the slower one by 26% is the faster one by 35%: a few trials tell."""
    search = Search({point: [speed(point)] for point in POINTS})
    really = {point: speed((1 - point[0], *point[1:])) for point in POINTS}
    best = max(really, key=really.__getitem__)
    asked = []
    for _ in range(6):
        asked.append(search.wants())
        search.tell(asked[-1], really[asked[-1]])
    assert asked[0] == by_speed(POINTS)[0] != best
    assert best in asked


def test_both_ends_of_a_front_are_found_without_predictions() -> None:
    search = Search(directions=("maximize", "minimize"))
    asked = []
    for _ in range(10):
        asked.append(search.wants())
        search.tell(asked[-1], speed(asked[-1]), joules(asked[-1]))
    ranks = [by_speed(POINTS).index(point) for point in asked]
    assert min(ranks) == 0
    assert max(ranks) >= len(POINTS) - 2


def test_of_many_candidates_the_best_predicted_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surrogate, "CANDIDATES", 4)
    predicted = {point: [speed(point), joules(point)] for point in POINTS}
    search = Search(predicted, directions=("maximize", "minimize"))
    for _ in range(5):
        some = search.sampler._promising(search.study, POINTS)
        assert len(some) <= 4
        assert {by_speed(POINTS)[0], by_speed(POINTS)[-1]} <= set(some)


def test_what_may_not_fit_counts_for_less() -> None:
    first, second = by_speed(POINTS)[:2]
    predicted = {point: [speed(point)] for point in POINTS}
    assert Search(predicted, dict.fromkeys(POINTS, 0.5)).wants() == first
    assert Search(predicted, dict.fromkeys(POINTS, 0.5) | {first: 0.99}).wants() == second


def test_memory_that_was_estimated_wrongly_is_learnt_along_an_axis() -> None:
    """The fast engine needs more than estimated and runs out: its fullest layouts are left alone, others are not."""
    predicted = {point: [speed(point)] for point in POINTS}
    shares = {point: 0.75 - 0.02 * point[1] - 0.2 * (2 - point[2]) for point in POINTS}
    first = by_speed(POINTS)[0]
    search = Search(predicted, shares)
    assert search.wants() == first
    for point in (first, (0, 1.0, 2.0)):
        search.needed[point] = Needed(shares[point], None, fits=False)
        search.left.pop(point)
    wanted = search.wants()
    assert wanted[0] == 0
    assert wanted[2] < 2.0


def test_limits_and_memory_are_learnt_from_what_violated_them() -> None:
    """Tensor parallel 1 is the fastest and exceeds a bound; another engine always runs out of memory."""
    search = Search({point: [speed(point)] for point in POINTS})
    for micro in (0.0, 1.0):
        search.tell((0, 0.0, micro), speed((0, 0.0, micro)), limit=0.5)
        search.tell((0, 1.0, micro), speed((0, 1.0, micro)), limit=-0.5)
        search.tell((1, 0.0, micro), 1.0, memory=0.3)
        search.tell((1, 1.0, micro), 1.0, memory=0.3)
    assert search.wants() == (0, 1.0, 2.0)


def test_what_is_under_way_or_was_stopped_early_is_not_asked_for_again_nearby() -> None:
    """Two trials at a time: the second is not the twin of the first, of which nothing new is to be learnt."""
    predicted = {point: [speed(point), joules(point)] for point in POINTS}
    alone = Search(predicted, directions=("maximize", "minimize"))
    first = alone.wants()
    for state in (TrialState.RUNNING, TrialState.PRUNED):
        beside = Search(predicted, directions=("maximize", "minimize"))
        beside.tell(first, state=state)
        untold = Search(predicted, directions=("maximize", "minimize"))
        untold.left.pop(first)
        assert beside.wants() in POINTS
        assert spread(beside, first) < spread(untold, first)


def spread(search: Search, near: Coordinates) -> float:
    """Uncertainty of the best of what is left, of the same engine."""
    places = [point for point in search.left if point[0] == near[0]]
    trials = search.study.get_trials(states=(TrialState.RUNNING, TrialState.PRUNED))
    seen = [tuple(trial.params[axis] for axis in SPACE) for trial in trials]
    process = _Process(search.sampler._likeness(seen, seen + places))
    return float(process.expect(np.array([]), np.zeros(len(seen + places)))[1][len(seen) :].min())


def test_an_objective_that_is_always_zero_changes_nothing() -> None:
    one, two = Search(), Search(directions=("maximize", "minimize"))
    for point in POINTS[:4]:
        one.tell(point, speed(point))
        two.tell(point, speed(point), 0.0)
    one.sampler.random, two.sampler.random = (np.random.default_rng(1) for _ in range(2))
    assert one.wants() == two.wants()


values = st.lists(st.floats(-2, 2), min_size=1, max_size=6)


@settings(deadline=None, max_examples=50)
@given(values, st.floats(-3, 3))
def test_the_process_goes_through_what_it_was_told(off: list[float], offset: float) -> None:
    """At places with a figure the mean is near it and the deviation small; elsewhere it is larger."""
    sampler = Search().sampler
    known = len(off)
    places = [*POINTS[::4][:known], *(point for point in POINTS if point not in POINTS[::4][:known])]
    ahead = np.full(len(places), offset)
    process = _Process(sampler._likeness(places[:known], places))
    mean, deviation = process.expect(np.array(off), ahead)
    assert np.abs(mean[:known] - off).max() < 0.1
    assert deviation[:known].max() <= deviation[known:].min() + 1e-9
    assert (deviation > 0).all()
    shifted, same = process.expect(np.array(off) + 1.0, ahead + 1.0)
    assert shifted == pytest.approx(mean + 1.0)
    assert same == pytest.approx(deviation)


def test_a_space_of_which_nothing_is_known_is_learnt_by_what_ran_and_what_ran_out() -> None:
    """The fast engine needs twice as much, which the memory that trials took tells, or only whether they ran."""
    for told in (True, False):
        search = Search(shares=dict.fromkeys(POINTS, 0.5), doubtful=True)
        for point in [(engine, tensor, 1.0) for engine in (0, 1) for tensor in (0.0, 1.0)]:
            fits = point[0] == 1
            search.needed[point] = Needed(0.5, 0.3 if fits and told else None, fits)
            search.tell(point, speed(point), memory=-1.0 if fits else 1.0)
        assert search.wants()[0] == 1


def test_what_adds_nothing_is_asked_for_by_how_likely_it_fits() -> None:
    """All that could be better has run out or is known not to fit."""
    first, *others = by_speed(POINTS)
    search = Search({point: [speed(point)] for point in POINTS}, dict.fromkeys(POINTS, 0.5))
    search.tell(first, 1e9)
    search.left = {**dict.fromkeys(others[:-1], 3.0), others[-1]: 0.2}
    assert search.wants() == others[-1]
