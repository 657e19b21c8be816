"""Where GPUs differ in speed the best layout is tried in other places, in pairs, and one is kept that proves better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from search_spaces.layout import Layout
from search_spaces.placement import plain
from search_spaces.schedules import Pass, PassTime
from service.answers import findings
from service.answers.candidates import candidates
from service.answers.placements import placements
from service.answers.ranking import undecided
from service.problem import Problem
from service.record.results import TrialRecord
from service.result import Purpose, RankRecord, SlowCause, Straggler, TrialResult
from service.sampling.agenda import SearchAgenda
from service.sampling.placing import PAIRS, due, slow_workers, stage_passes
from service.sampling.study import SearchStudy
from service.spec import dump_spec, make_problem, parse_spec
from tests.service.records import PLENTY, search
from tests.service.trials.test_straggler import BLANK
from trainables.status import Status

SPACE = {"pipeline_parallel_size": [1, 2], "stage_layers": "auto", "rank_order": ["auto"]}
EXAMINED = {"GPU-0": 1.0, "GPU-1": 1.25}
"""How much longer the slowest takes than each: the first is slow."""


def problem_of(**fields: Any) -> Problem:
    values: dict[str, Any] = {
        "name": "placed",
        "model": "llama3-1b",
        "data": "synthetic",
        "sequence_length": 512,
        "global_batch_size": 8,
        "cluster": {"nodes": 1, "gpus_per_node": 2, "accelerator": "h200"},
        "space": SPACE,
        "finalists": {"count": 2, "repeats": 2},
        "sentinel_every": 0,
        "sampler": "random",
    }
    return make_problem(values | fields)


def ranks_of(layout: Layout, slow: dict[int, float]) -> tuple[RankRecord, ...]:
    """Two ranks of which each takes longer for the same work by a share."""
    times = [1 + slow.get(worker, 0.0) for worker in range(2)]
    return tuple(
        RankRecord(
            rank,
            rank,
            "node",
            f"GPU-{rank}",
            layout.coordinates(rank),
            None,
            replace(BLANK, span_s=max(times), compute_s=mine, exposed_communication_s=max(times) - mine),
        )
        for rank, mine in enumerate(times)
    )


def ran(layout: Layout, rate: float, purpose: Purpose = Purpose.SEARCH, **fields: Any) -> TrialResult:
    metrics: dict[str, float | None] = {"tokens_per_s": rate, "joules_per_token": 100 / rate}
    return TrialResult("t", layout, Status.OK, metrics=metrics, purpose=purpose, **fields)


def run(problem: Problem, rate: Callable[[Layout, int], float], slower: dict[str, float]) -> list[TrialResult]:
    """A search to its end, whose trials are as fast as `rate` says of a layout and the trial's number."""
    study = SearchStudy("placed", problem.legal.layouts, problem.goals, problem.sampler, problem.seed)
    agenda = SearchAgenda(study, problem)
    agenda.slower = slower
    results: list[TrialResult] = []
    while (step := agenda.next(f"t{len(results)}", PLENTY)) is not None:
        layout = step.layout
        result = ran(layout, rate(layout, len(results)), step.purpose, ranks=ranks_of(layout, {}))
        if layout.pipeline_parallel_size == 1:
            result = replace(result, ranks=())
        results.append(replace(result, trial_id=f"t{len(results)}"))
        agenda.take(results[-1])
    return results


def pipelines_win(gain: float) -> Callable[[Layout, int], float]:
    """With two stages a layout is the fastest; with uneven ones it saves a share more. Trials vary, and drift."""

    def rate(layout: Layout, number: int) -> float:
        usual = 100 * (2 if layout.pipeline_parallel_size == 2 else 1) * (1 - 0.002 * number)
        return usual * (1 + (gain if layout.stage_layers is not None else 0.0)) * (1 + 0.0005 * (number * 7 % 5 - 2))

    return rate


def test_the_best_is_tried_in_other_places_in_rounds_and_what_proves_better_is_kept() -> None:
    results = run(problem_of(), pipelines_win(0.05), EXAMINED)
    tried = [one.layout for one in results if one.purpose is Purpose.PLACEMENT]
    usual = plain(tried[0])
    assert results[-1].purpose is Purpose.PLACEMENT
    size = len(set(tried))
    assert len(tried) == PAIRS * size
    assert all(set(tried[i : i + size]) == set(tried) for i in range(0, len(tried), size))
    assert {one.stage_layers for one in tried} == {None, (7, 9)}
    (found,) = placements(results)
    assert found.kept
    assert found.speed is not None
    assert found.speed.saves == pytest.approx(1 - 1 / 1.05, abs=0.003)
    assert found.speed.pairs == PAIRS
    ranked = {one.layout: one for one in candidates(results)}
    assert ranked[found.layout].confirmed
    assert usual in ranked, "which is still a layout"
    comparison = problem_of().goals.among(candidates(results))
    assert "tokens_per_s" not in undecided(comparison), "it was held against the plain one in pairs"


def test_what_saves_nothing_is_not_kept() -> None:
    results = run(problem_of(), pipelines_win(0.0), EXAMINED)
    (found,) = placements(results)
    assert not found.kept
    assert found.layout not in {one.layout for one in candidates(results)}


@pytest.mark.parametrize(
    ("fields", "slower"),
    [
        ({}, {}),
        ({}, {"GPU-0": 1.0, "GPU-1": 1.002}),
        ({"space": SPACE | {"pipeline_parallel_size": 1}}, EXAMINED),
        ({"space": {"pipeline_parallel_size": [1, 2]}}, EXAMINED),
    ],
)
def test_nothing_is_tried_without_reason(fields: dict[str, Any], slower: dict[str, float]) -> None:
    results = run(problem_of(**fields), pipelines_win(0.05), slower)
    assert all(one.purpose is not Purpose.PLACEMENT for one in results)


def test_trials_say_which_gpu_is_slow_before_examinations_do() -> None:
    layout = Layout("megatron", 2, 8)
    shares = [ran(layout, 1.0, ranks=ranks_of(layout, {1: share})) for share in (0.10, 0.11, 0.30)]
    assert slow_workers(shares, EXAMINED, 2) == {0: 1.0, 1: pytest.approx(1.11)}
    pipeline = replace(layout, pipeline_parallel_size=2)
    named = Straggler(1, "node", "GPU-1", 0.2, SlowCause.CLOCK, 0.999)
    recorded = [ran(layout, 1.0, straggler=one) for one in (named, named, None)]
    assert slow_workers(recorded, {}, 2) == {1: pytest.approx(1.25)}
    assert slow_workers([*recorded, ran(layout, 1.0)], {}, 2) == {}, "half of the time it was not"
    assert slow_workers([ran(pipeline, 1.0, ranks=ranks_of(pipeline, {}))], EXAMINED, 2) == {0: 1.25, 1: 1.0}


def passed(layout: Layout, second: float, *slower: float) -> TrialResult:
    """A trial of two stages, of which the second's passes take so many times as long; some ranks are slower still."""
    more = (1.0, *slower) if slower else (1.0,) * layout.num_gpus
    ranks = tuple(
        RankRecord(rank, rank, "node", f"GPU-{rank}", coordinates, None, None, passes=passes)
        for rank in range(layout.num_gpus)
        for coordinates in [layout.coordinates(rank)]
        for stage in [coordinates["pp"]]
        for longer in [more[rank] * (second if stage else 1.0)]
        for passes in [
            (
                PassTime(stage, Pass.FORWARD, 0.011 * longer, 0.01 * longer),
                PassTime(stage, Pass.BACKWARD, 0.02 * longer, 0.02 * longer),
            )
        ]
    )
    return ran(layout, 200.0, ranks=ranks)


def test_layers_are_cut_by_the_passes_of_the_best_layout_whatever_is_known_of_gpus() -> None:
    problem = problem_of()
    (layout,) = (one for one in problem.legal.layouts if one.pipeline_parallel_size == 2)
    tried = due([passed(layout, 1.3)], problem, {}, 2)
    assert len(tried) == 2 * PAIRS
    (other,) = set(tried) - {layout}
    assert other.rank_order is None
    assert other.stage_layers is not None
    assert other.stage_layers[0] > 8 > other.stage_layers[1]
    assert due([passed(layout, 1.0)], problem, {}, 2) == [], "stages take as long"


def test_passes_are_the_medians_of_what_the_slowest_rank_of_a_stage_takes() -> None:
    layout = Layout("megatron", 4, 8, pipeline_parallel_size=2)
    trials = [
        passed(layout, 1.0, 1.1, 1.0, 1.0),
        passed(layout, 1.0, 1.2, 1.0, 1.3),
        passed(layout, 1.0, 1.0, 1.2, 9.0),
    ]
    failed = replace(trials[0], status=Status.CRASH)
    other = passed(replace(layout, recompute="full"), 7.0)
    found = {(one.stage, one.step): one for one in stage_passes([failed, other, *trials], layout)}
    assert set(found) == {(stage, step) for stage in (0, 1) for step in (Pass.FORWARD, Pass.BACKWARD)}
    assert found[0, Pass.FORWARD] == (0, Pass.FORWARD, pytest.approx(0.011 * 1.1), pytest.approx(0.01 * 1.1))
    assert found[1, Pass.BACKWARD].later_s == pytest.approx(0.02 * 1.3)
    assert stage_passes([ran(layout, 1.0)], layout) == []


def test_a_search_that_is_resumed_goes_on_with_the_same_places() -> None:
    problem = problem_of()
    results = run(problem, pipelines_win(0.05), EXAMINED)
    first = next(number for number, one in enumerate(results) if one.purpose is Purpose.PLACEMENT)
    order = [one.layout for one in results[first:]]
    for done in (2, 5, len(order)):
        assert sorted(map(str, due(results[: first + done], problem, {}, 2))) == sorted(map(str, order[done:]))


def test_the_report_says_what_it_was_worth() -> None:
    results = run(problem_of(), pipelines_win(0.05), EXAMINED)
    told = findings.placed(findings.Found(search(*map(recorded, results))))
    assert told is not None
    assert told.startswith("megatron 2gpu dp1 pp2 ")
    assert "in 6 pairs: the time of a step 4.86% (4.42% to 5.10%)" in told
    assert told.endswith("It was kept.")
    assert findings.placed(findings.Found(search())) is None


def recorded(result: TrialResult) -> TrialRecord:
    figures = {name: value for name, value in result.metrics.items() if value is not None}
    return TrialRecord(
        result.trial_id, result.layout.label, result.layout, "ok", None, figures, {}, "run", purpose=result.purpose
    )


def test_auto_is_kept_in_the_record_s_spec() -> None:
    problem = problem_of()
    assert problem.placement == ("rank_order", "stage_layers")
    assert problem.axes["stage_layers"] == problem.axes["rank_order"] == [None]
    assert parse_spec(dump_spec(problem)) == problem
    both = problem_of(space=SPACE | {"stage_layers": [[7, 9], "auto"]})
    assert both.axes["stage_layers"] == [(7, 9)]
    assert parse_spec(dump_spec(both)) == both
