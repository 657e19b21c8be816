"""What is better and what is admitted: decided in one place, so that whoever asks gets the same answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from search_spaces.layout import Layout
from service.answers.front import choose, front
from service.answers.overview import describe
from service.answers.query import FIRST, Query
from service.answers.ranking import answer, best, compared, pareto
from service.answers.why import why
from service.display import Display
from service.driver import summary
from service.errors import InputError
from service.goals import UNKNOWN, Comparison, Figures, Goals, parse_condition, parse_constraint
from service.metrics import DIRECTIONS, Direction, Method
from service.problem import Problem
from service.record.results import SearchRecord, TrialRecord
from service.result import Purpose, TrialResult
from service.sampling.agenda import SearchAgenda
from service.sampling.finalists import contenders
from service.sampling.study import SearchStudy
from service.spec import parse_spec
from service.trials import early_stop
from tests.service.records import search, trial
from trainables.status import Status

SPEC = parse_spec(
    yaml.safe_dump(
        {
            "name": "goals",
            "model": "tiny-llama",
            "data": "synthetic",
            "sequence_length": 64,
            "global_batch_size": 8,
            "cluster": {"gpus_per_node": 2, "accelerator": "h200"},
            "space": {"tensor_parallel_size": [1, 2], "zero_stage": [0, 2], "micro_batch_size": [1, 2, 4]},
            "sampler": "random",
        }
    )
)
LAYOUTS = SPEC.legal.layouts
METRICS = ("tokens_per_s", "joules_per_token", "throttle_ratio", "peak_memory_gib")
GOALS = Goals({metric: DIRECTIONS[metric] for metric in METRICS[:2]}, (parse_constraint("peak_memory_gib<=2"),))


def among(*results: Figures) -> Comparison[Figures]:
    return GOALS.among(results)


def figures(speed: float | None, energy: float | None, memory: float | None = None, **methods: Method) -> Figures:
    return Figures(dict(zip(METRICS, (speed, energy, None, memory), strict=True)), methods)


def test_a_limit_on_what_nobody_has_is_not_applied_and_as_soon_as_one_has_it_holds_for_all() -> None:
    lacking, keeping, beyond = figures(3, 1), figures(2, 1, 2.0), figures(4, 1, 3.0)
    (limit,) = GOALS.limits
    assert among(lacking).admitted == [lacking]
    assert among(lacking).excess(lacking, limit) == 0.0
    comparison = among(lacking, keeping, beyond)
    assert comparison.admitted == comparison.front() == [keeping]
    assert [comparison.excess(one, limit) for one in comparison.results] == [UNKNOWN, 0.0, 0.5]


def test_an_objective_that_nobody_has_is_left_out_and_what_lacks_another_s_is_on_no_front() -> None:
    fast, lacking = figures(2, 1), figures(3, None)
    assert among(lacking).front() == [lacking]
    assert among(fast, lacking).front() == [fast]
    assert among(figures(None, None)).front() == among().front() == []


def test_values_count_only_if_none_is_less_in_doubt() -> None:
    measured, guessed = figures(1, 3), figures(1, 1, joules_per_token=Method.ESTIMATED)
    assert among(guessed).front() == [guessed]
    comparison = among(measured, guessed)
    assert comparison.front() == [measured]
    assert comparison.value(guessed, "joules_per_token") is None
    within = replace(GOALS, limits=(parse_constraint("joules_per_token<=2"),)).among([measured, guessed])
    assert within.admitted == [], "an estimate keeps no limit where others have measured"


def test_what_beats_another_is_nowhere_worse_and_somewhere_better() -> None:
    fast, frugal = figures(2, 2), figures(1, 1)
    comparison = among(fast, frugal)
    assert comparison.beating(figures(1, 2), [frugal, fast]) is frugal
    assert comparison.beating(fast, [fast, frugal]) is None
    assert comparison.beating(figures(0, None), [fast, frugal]) is None, "it might come to anything"
    assert comparison.costs([fast]).tolist() == [[-2.0, 2.0]]
    assert comparison.ordered([fast, frugal], "joules_per_token", Direction.MINIMIZE) == [frugal, fast]


@pytest.mark.parametrize("text", ["mfu<nan", "mfu<=1.2.3", "mfu=5", "mfu<=", "<=5", "mfu<=high"])
def test_conditions_and_constraints_are_refused_alike(text: str) -> None:
    with pytest.raises(InputError, match="is not 'METRIC<=NUMBER'"):
        parse_condition(text)
    with pytest.raises(ValueError, match="constraints: "):
        parse_constraint(text)


def test_a_condition_may_be_on_any_metric_and_strict() -> None:
    limit = parse_condition("breakdown_idle_s < 1e-3")
    assert (limit.metric, limit.comparison, limit.bound) == ("breakdown_idle_s", "<", 0.001)
    assert limit.holds(0.0)
    assert not limit.holds(0.001)


@dataclass(frozen=True)
class Outcome:
    """What one trial came to, as an example draws it."""

    status: Status = Status.OK
    metrics: dict[str, float] = field(default_factory=dict)
    method: Method | None = None
    repeats: tuple[dict[str, float], ...] = ()


values = st.fixed_dictionaries({}, optional={metric: st.integers(0, 3).map(float) for metric in METRICS})
methods = st.sampled_from([None, None, Method.COUNTER, Method.SHORT, Method.EXTRAPOLATED, Method.ESTIMATED])
outcomes = st.lists(
    st.builds(
        Outcome,
        st.sampled_from([Status.OK, Status.OK, Status.OK, Status.OOM, Status.PRUNED]),
        values,
        methods,
        st.lists(values, max_size=2).map(tuple),
    ),
    max_size=len(LAYOUTS),
)
constraints = st.lists(
    st.sampled_from(["peak_memory_gib<=2", "peak_memory_gib<=1", "joules_per_token<=2", "tokens_per_s>=1"]),
    unique=True,
    max_size=2,
).map(tuple)
objectives = st.lists(st.sampled_from(METRICS), unique=True, min_size=1, max_size=3).map(tuple)


def results_of(drawn: list[Outcome], repeats: bool) -> list[TrialResult]:
    """A trial of another layout for each outcome that explored, and then those that repeat it."""
    results: list[TrialResult] = []
    for layout, outcome in zip(LAYOUTS, drawn, strict=False):
        runs = [(Purpose.SEARCH, outcome.status, outcome.metrics)]
        runs += [(Purpose.FINALIST, Status.OK, metrics) for metrics in outcome.repeats if repeats]
        for purpose, status, metrics in runs:
            how = {metric: outcome.method for metric in metrics if outcome.method is not None}
            seen: dict[str, float | None] = dict.fromkeys(METRICS) | metrics
            results.append(TrialResult(f"t{len(results)}", layout, status, metrics=seen, methods=how, purpose=purpose))
    return results


def recorded(results: list[TrialResult], spec: Problem) -> SearchRecord:
    """The search of `results` as it is read from its record."""
    trials = [
        replace(
            trial(result.trial_id, status=result.status),
            layout=result.layout,
            label=result.layout.label,
            purpose=result.purpose,
            metrics={metric: value for metric, value in result.metrics.items() if value is not None},
            methods=result.methods,
        )
        for result in results
    ]
    constraints = tuple(limit.text for limit in spec.goals.limits)
    return search(*trials, objectives=dict(spec.goals.objectives), constraints=constraints)


def agenda_of(results: list[TrialResult], spec: Problem) -> SearchAgenda:
    study = SearchStudy("goals", LAYOUTS, spec.goals, "random", 0)
    study.recall([result for result in results if result.purpose == Purpose.SEARCH])
    return SearchAgenda(study, spec, results=results)


def layouts(ones: list[TrialResult] | list[TrialRecord]) -> list[Layout]:
    return [one.layout for one in ones]


def asked(record: SearchRecord) -> dict[str, float]:
    """The best value of each objective, as `best` has it."""
    values = {}
    for metric, direction in record.objectives.items():
        try:
            one = best(record, Query(by=(metric, direction)))
        except InputError:
            continue
        values[metric] = one.metrics[metric]
    return values


LACKING = [
    Outcome(metrics={"tokens_per_s": 3.0, "joules_per_token": 1.0}),
    Outcome(metrics={"tokens_per_s": 1.0, "joules_per_token": 1.0, "peak_memory_gib": 1.0}),
]


@settings(deadline=None, max_examples=80)
@given(outcomes, objectives, constraints, st.booleans())
@example(LACKING, METRICS[:2], ("peak_memory_gib<=2",), False)
@example([replace(one, repeats=(one.metrics,)) for one in LACKING], METRICS[:2], ("peak_memory_gib<=2",), True)
@example([replace(LACKING[0], method=Method.ESTIMATED), LACKING[1]], METRICS[:2], (), False)
def test_everybody_says_the_same(
    drawn: list[Outcome], names: tuple[str, ...], limits: tuple[str, ...], repeats: bool
) -> None:
    goals = Goals({name: DIRECTIONS[name] for name in names}, tuple(map(parse_constraint, limits)))
    spec = replace(SPEC, goals=goals)
    results = results_of(drawn, repeats)
    record, agenda = recorded(results, spec), agenda_of(results, spec)
    display = Display(spec.goals, spec.budget, len(LAYOUTS))
    for result in results:
        display.count(result)

    found = front(record)
    assert list(found.candidates) == pareto(record)
    fates = why(spec, {}, record).fates
    assert {fate.layout for fate in fates if fate.outcome == "on the front"} == {one.layout for one in found.candidates}
    status = describe(record).best
    assert status == asked(record) == display.best
    assert status == {metric: one.metrics[metric] for metric, one in found.best.items()}
    assert status == {k.removeprefix("best_"): v for k, v in summary(display, agenda).items() if k.startswith("best_")}
    assert all(one in found.candidates for one in found.best.values()), "what is best on an objective is on the front"
    if found.candidates:
        assert choose(record, FIRST).candidate == found.candidates[0] == next(iter(found.best.values()))
    else:
        with pytest.raises(InputError, match="no trial to choose from"):
            best(record)

    once = recorded([result for result in results if result.purpose == Purpose.SEARCH], spec)
    assert describe(once).best == asked(once)
    exploring = agenda.front()
    assert [one.layout for one in pareto(once)] == layouts(exploring)
    good = [result for result in results if result.status == Status.OK and result.purpose == Purpose.SEARCH]
    finalists = contenders(good, spec.goals, len(LAYOUTS))
    assert layouts(finalists)[: len(exploring)] == layouts(exploring)
    for one in finalists:
        assert compared(once).admits(one), "a finalist is one that `best` does not reject"
    if exploring:
        assert answer(once)[0].layout == exploring[0].layout

    comparison = spec.goals.among(good)
    points = [{name: v for name in names if (v := one.metrics.get(name)) is not None} for one in exploring]
    for one in comparison.ranked(comparison.admitted):
        own = {name: value for name in names if (value := comparison.value(one, name)) is not None}
        beaten = early_stop.rival(spec.goals, own, points) is not None
        assert beaten == (one not in exploring)
