"""What is best: fronts, queries and notices, on records made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import stdtrit

from search_spaces.layout import Layout
from service import student
from service.answers import candidates, overview, ranking
from service.answers.candidates import Candidate
from service.answers.front import choose, front
from service.answers.query import FIRST, parse_query
from service.errors import InputError, NoAnswerError
from service.metrics import Method
from service.record.results import SearchRecord, TrialRecord
from service.result import Purpose
from tests.service.records import CONFIG, DEFAULT, search, trial


def ask(record: SearchRecord, **texts: Any) -> Candidate:
    return ranking.best(record, parse_query(**texts))


def ids(trials: list[Candidate]) -> list[str]:
    return [one.trial_id for one in trials]


FAST = trial("fast", tokens_per_s=100, joules_per_token=3, throttle_ratio=0)
FRUGAL = trial("frugal", tokens_per_s=50, joules_per_token=1, throttle_ratio=0)
BEATEN = trial("beaten", tokens_per_s=50, joules_per_token=2, throttle_ratio=0)


def test_the_front_holds_what_nobody_beats_on_all_objectives() -> None:
    assert ids(ranking.pareto(search(BEATEN, FRUGAL, FAST))) == ["fast", "frugal"]


def test_equal_trials_are_all_on_the_front() -> None:
    twin = trial("twin", tokens_per_s=100, joules_per_token=3, throttle_ratio=0)
    assert set(ids(ranking.pareto(search(FAST, BEATEN, FRUGAL, twin)))) == {"fast", "twin", "frugal"}


def test_only_trials_that_ended_well_are_ranked() -> None:
    crashed = trial("crashed", status="crash", tokens_per_s=1e9, joules_per_token=0, throttle_ratio=0)
    record = search(crashed, FAST)
    assert ids(ranking.pareto(record)) == ["fast"]
    assert ask(record, maximize="tokens_per_s").trials == (FAST,)
    assert ranking.pareto(search(crashed)) == []
    with pytest.raises(InputError, match="1 crash"):
        ranking.best(search(crashed))


def test_an_estimate_is_never_ranked_against_a_measured_figure() -> None:
    guessed = trial("guessed", energy="estimated", tokens_per_s=1e9, joules_per_token=0.01, throttle_ratio=0)
    record = search(guessed, FAST, FRUGAL)
    assert ids(ranking.pareto(record)) == ["fast", "frugal"]
    assert ask(record, minimize="joules_per_token").trials == (FRUGAL,)
    assert ask(record, maximize="tokens_per_s", where=["joules_per_token<2"]).trials == (FRUGAL,)
    assert "joules_per_token" in overview.notices(record)[0]
    alone = search(guessed)
    assert ask(alone, minimize="joules_per_token").trials == (guessed,)
    assert overview.notices(alone) == ["joules_per_token is estimated, not measured"]
    assert overview.describe(alone).estimated == ("joules_per_token",)
    assert overview.describe(record).best["joules_per_token"] == 1


def test_figures_of_depth_proxies_are_never_ranked_against_measured_ones() -> None:
    proxies = dict.fromkeys(("tokens_per_s", "joules_per_token"), Method.EXTRAPOLATED)
    thought = replace(trial("thought", tokens_per_s=1e9, joules_per_token=0.01, throttle_ratio=0), methods=proxies)
    slower = replace(thought, trial_id="slower", metrics=thought.metrics | {"tokens_per_s": 1e8})
    record = search(thought, FAST, FRUGAL)
    assert ids(ranking.pareto(record)) == ["fast", "frugal"]
    assert ask(record, maximize="tokens_per_s").trials == (FAST,)
    assert "tokens_per_s is extrapolated on 1 of 3 trials: these are not ranked" in overview.notices(record)
    alone = search(thought, slower)
    assert ask(alone, maximize="tokens_per_s").trials == (thought,)
    assert overview.notices(alone) == [
        "tokens_per_s is extrapolated from models of fewer layers, not measured",
        "joules_per_token is extrapolated from models of fewer layers, not measured",
    ]
    info = overview.describe(alone)
    assert info.extrapolated == ("tokens_per_s", "joules_per_token")
    assert [info.method(metric) for metric in DEFAULT] == ["extrapolated", "extrapolated", None]


@pytest.mark.parametrize(
    ("idle_s", "method", "accelerator", "told"),
    [
        (0.24, Method.SLICE, "h200", "24%"),
        (0.02, Method.SLICE, "h200", None),
        (0.24, None, "h200", None),
        (0.24, Method.SLICE, "cpu", None),
    ],
)
def test_slices_of_the_best_layout_whose_gpus_wait_for_the_cpu_are_told_to_be_unsure(
    idle_s: float, method: Method | None, accelerator: str, told: str | None
) -> None:
    late = replace(FAST, metrics=FAST.metrics | {"breakdown_span_s": 1.0, "breakdown_idle_s": idle_s})
    if method is not None:
        late = replace(late, methods=dict.fromkeys(late.metrics, method))
    record = search(late)
    record = replace(record, params={**record.params, "accelerator": accelerator})
    found = [line for line in overview.notices(record) if "waited for the CPU" in line]
    how = f"{late.label} was explored by slices, whose GPUs waited for the CPU for {told} of a step: "
    assert [line[: len(how)] for line in found] == ([] if told is None else [how])


def test_an_extrapolation_is_ranked_before_an_estimate() -> None:
    thought = replace(FAST, trial_id="thought", methods={"joules_per_token": Method.EXTRAPOLATED})
    guessed = replace(FRUGAL, trial_id="guessed", methods={"joules_per_token": Method.ESTIMATED})
    assert ask(search(thought, guessed), minimize="joules_per_token").trials == (thought,)


def test_an_objective_that_nobody_measured_is_left_out_and_told() -> None:
    a, b = trial("a", tokens_per_s=2, joules_per_token=2), trial("b", tokens_per_s=1, joules_per_token=1)
    record = search(a, b, trial("c", tokens_per_s=1, joules_per_token=2))
    assert ids(ranking.pareto(record)) == ["a", "b"]
    assert overview.notices(record) == ["throttle_ratio was not measured by any trial: ranked without it"]


def test_a_trial_without_an_objective_that_others_have_is_not_on_the_front() -> None:
    lacking = trial("lacking", tokens_per_s=1e9, throttle_ratio=0)
    record = search(lacking, FAST)
    assert ids(ranking.pareto(record)) == ["fast"]
    assert ranking.best(record).trials == (FAST,)
    assert ask(record, maximize="tokens_per_s").trials == (FAST,), "what is not ranked is no answer"
    assert overview.notices(record) == ["joules_per_token is missing on 1 of 2 trials: these are not ranked"]
    others = [trial("energy", joules_per_token=1), trial("speed", tokens_per_s=1)]
    with pytest.raises(InputError, match="its trials: 2 ok; none has all of tokens_per_s, joules_per_token"):
        ranking.best(search(*others))
    assert overview.describe(search(*others)).best == {}


def test_the_constraints_of_the_search_hold() -> None:
    record = search(FAST, FRUGAL, constraints=("joules_per_token<=2", "peak_memory_gib<=70"))
    assert ids(ranking.pareto(record)) == ["frugal"]
    assert ask(record, maximize="tokens_per_s").trials == (FRUGAL,)
    assert overview.notices(record) == ["constraint peak_memory_gib<=70 was not applied: no trial has this metric"]


def test_best_is_the_first_objective_by_default_and_ties_go_to_the_others() -> None:
    cool = trial("cool", tokens_per_s=100, joules_per_token=2, throttle_ratio=0)
    record = search(FRUGAL, FAST, cool)
    assert ranking.best(record).trials == (cool,)
    assert ask(record, minimize="throttle_ratio").trials == (cool,)
    assert ask(record, minimize="tokens_per_s").trials == (FRUGAL,)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("tokens_per_s<100", "frugal"),
        ("tokens_per_s <= 100", "fast"),
        ("joules_per_token>1", "fast"),
        ("joules_per_token<=1e0", "frugal"),
        ("tokens_per_s==50", "frugal"),
        ("tokens_per_s>=50", "fast"),
    ],
)
def test_conditions(condition: str, expected: str) -> None:
    assert ask(search(FAST, FRUGAL, BEATEN), where=[condition]).trial_id == expected


@pytest.mark.parametrize(
    "condition", ["tokens_per_s", "tokens_per_s<", "tokens_per_s<ten", "tokens_per_s=5", "mfu<nan"]
)
def test_a_malformed_condition_is_refused(condition: str) -> None:
    with pytest.raises(InputError, match="is not 'METRIC<=NUMBER'"):
        ask(search(FAST), where=[condition])


def test_unknown_metrics_and_empty_choices_are_refused() -> None:
    record = search(FAST)
    for unknown in ({"maximize": "speed"}, {"minimize": "speed"}, {"where": ["speed>1"]}):
        with pytest.raises(
            InputError, match="no metric 'speed'; known: tokens_per_s, joules_per_token, throttle_ratio"
        ):
            ask(record, **unknown)
    with pytest.raises(InputError, match=r"no metric 'token_per_s'; did you mean tokens_per_s\?"):
        ask(record, maximize="token_per_s")
    with pytest.raises(NoAnswerError, match="no trial to choose from with tokens_per_s>100"):
        ask(record, where=["tokens_per_s>100"])
    with pytest.raises(InputError, match="one of maximize, minimize and knee"):
        ask(record, maximize="tokens_per_s", minimize="joules_per_token")


figures = st.dictionaries(st.sampled_from([*DEFAULT, "mfu"]), st.integers(0, 3).map(float))
outcomes = st.lists(
    st.tuples(
        st.sampled_from(["ok", "ok", "oom"]),
        st.sampled_from(["counter", "integrated", "extrapolated", "estimated"]),
        figures,
    ),
    max_size=12,
)


@given(outcomes, st.sampled_from(list(DEFAULT)))
def test_whatever_was_recorded_the_answers_are_comparable_and_agree(
    recorded: list[tuple[str, str, dict[str, float]]], metric: str
) -> None:
    trials = [trial(str(i), energy, status, **values) for i, (status, energy, values) in enumerate(recorded)]
    record = search(*trials)
    ok = candidates.explored(record.trials)
    objectives = [name for name in DEFAULT if any(name in one.metrics for one in ok)]
    front = ranking.pareto(record)
    assert all(one in ok and set(objectives) <= set(one.metrics) for one in front)
    energies = {one.methods.get("joules_per_token") for one in front}
    for method in ("estimated", "extrapolated"):
        assert method not in energies or energies == {method}
    if front:
        assert ranking.best(record) == front[0]
        assert metric not in objectives or ask(record, maximize=metric).metrics[metric] == max(
            one.metrics[metric] for one in ranking.ranked(ranking.compared(record))
        )


TP, PP = (Layout("megatron", 4, 8, tensor_parallel_size=tp, pipeline_parallel_size=4 // tp) for tp in (4, 1))


def again(
    layout: Layout, *speeds: float, purpose: Purpose = Purpose.FINALIST, energy: float = 1.0
) -> list[TrialRecord]:
    """Trials of one layout, of which all but the first search trial, of 100 tokens/s, are repeats."""
    explored = trial(f"{layout.label}-search", tokens_per_s=100, joules_per_token=energy, throttle_ratio=0)
    repeats = [
        replace(
            trial(f"{layout.label}-{i}", tokens_per_s=speed, joules_per_token=energy, throttle_ratio=0), purpose=purpose
        )
        for i, speed in enumerate(speeds)
    ]
    return [replace(one, layout=layout, label=layout.label) for one in (explored, *repeats)]


def test_a_finalist_is_the_mean_of_its_repeats_without_its_search_trial() -> None:
    (only,) = candidates.candidates(search(*again(TP, 80, 82, 84)).trials)
    assert only.layout == TP
    assert only.purpose == "finalist"
    assert [one.metrics["tokens_per_s"] for one in only.trials] == [80, 82, 84]
    assert only.metrics == {"tokens_per_s": 82, "joules_per_token": 1, "throttle_ratio": 0}
    # Student's t of 95% with 2 degrees of freedom is 4.3027, the standard error 2 / sqrt(3).
    assert only.intervals["tokens_per_s"] == pytest.approx(4.3027 * 2 / 3**0.5, rel=1e-4)
    assert only.intervals["joules_per_token"] == 0
    assert only.methods == {"joules_per_token": "counter"}


def test_a_single_measurement_has_no_interval() -> None:
    assert student.confidence_interval([7.0]) == (7.0, None)
    assert candidates.candidates(search(*again(TP, 80)).trials)[0].intervals == {}


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 30, 999])
def test_student_s_t_is_that_of_scipy(degrees: int) -> None:
    assert student.student_t(degrees) == pytest.approx(stdtrit(degrees, 0.975), rel=1e-9)


def test_repeats_are_averaged_over_what_is_the_least_in_doubt() -> None:
    trials = again(TP, 80, 82)
    trials[2] = replace(
        trials[2], metrics=trials[2].metrics | {"joules_per_token": 9}, methods={"joules_per_token": Method.ESTIMATED}
    )
    (only,) = candidates.candidates(trials)
    assert only.metrics["joules_per_token"] == 1
    assert only.methods == {"joules_per_token": "counter"}
    assert only.metrics["tokens_per_s"] == 81


def test_a_layout_measured_once_that_leads_is_the_answer_and_it_is_told_that_this_is_undecided() -> None:
    record = search(*again(TP, 80, 82, 84), FAST)
    chosen, told = ranking.answer(record)
    assert chosen.trials == (FAST,)
    assert told == [f"undecided on tokens_per_s: between {CONFIG.label} (measured once) and {TP.label} (3 times)"]
    assert overview.notices(record) == ["measured again: 1 layout, 3 times each", *told]
    assert [(one.label, one.confirmed) for one in ranking.pareto(record)] == [(CONFIG.label, False), (TP.label, True)]
    assert overview.describe(record).best["tokens_per_s"] == 100
    assert overview.describe(record).undecided == tuple(told)
    assert overview.describe(record).repeats == {"finalist": 3}
    assert overview.describe(record).trials == {"ok": 2}


def test_the_front_and_the_best_are_one_where_a_finalist_came_out_worse_again() -> None:
    """As a noisy machine had it: the front was another layout alone, better on both, and `best` was the finalist."""
    once = trial("once", tokens_per_s=2163, joules_per_token=2.165, throttle_ratio=0)
    record = search(once, *again(TP, 280, 1380, 1880, energy=3.0))
    found = front(record)
    assert [one.trials for one in found.candidates] == [(once,)]
    assert found.candidates[0] == found.best["tokens_per_s"] == choose(record, FIRST).candidate
    assert overview.describe(record).best == {metric: one.metrics[metric] for metric, one in found.best.items()}
    open_ends = tuple(overview.contests(ranking.compared(record)))
    assert [notice.partition(":")[0] for notice in open_ends] == [f"undecided on {name}" for name in list(DEFAULT)[:2]]
    assert open_ends == found.notices[-2:] == choose(record, FIRST).notices[-2:]


def test_a_search_that_was_recorded_as_undecided_says_so_once() -> None:
    record = search(*again(TP, 80, 82, 84), FAST)
    told = tuple(overview.contests(ranking.compared(record)))
    assert told == front(replace(record, notices=told)).notices[:1]
    assert len(front(replace(record, notices=told)).notices) == len(front(record).notices)


def test_what_no_finalist_meets_is_answered_by_the_others_and_told() -> None:
    record = search(*again(TP, 80, 82, 84), FAST)
    chosen, told = ranking.answer(record, parse_query(where=["tokens_per_s>=90"]))
    assert chosen.trials == (FAST,)
    assert told == ["no layout that was measured again meets the conditions: this one was measured once"]


def test_a_condition_on_what_no_finalist_has_is_not_taken_for_met() -> None:
    cool = replace(FAST, metrics=FAST.metrics | {"peak_gpu_temp_c": 60})
    assert ask(search(*again(TP, 80, 82), cool), where=["peak_gpu_temp_c<=70"]).trials == (cool,)


def test_a_layout_whose_repeats_all_failed_stays_as_it_was_explored() -> None:
    trials = [replace(one, status="crash") if one.purpose == Purpose.FINALIST else one for one in again(TP, 80, 82)]
    record = search(*trials)
    assert [one.purpose for one in candidates.candidates(record.trials)] == ["search"]
    assert overview.notices(record) == [f"{TP.label}: of 2 repeats, 2 crash"]


def test_finalists_within_their_intervals_are_not_called_better() -> None:
    told = f"undecided on tokens_per_s: between {PP.label} (3 times) and {TP.label} (3 times)"
    close = search(*again(TP, 80, 82, 84), *again(PP, 81, 83, 85))
    assert told in overview.notices(close)
    assert told in ranking.answer(close)[1]
    apart = search(*again(TP, 80, 80.1, 80.2), *again(PP, 85, 85.1, 85.2))
    assert overview.contests(ranking.compared(apart)) == []


def test_a_single_measurement_within_a_finalist_s_interval_is_not_called_worse() -> None:
    once = replace(again(PP)[0], metrics={"tokens_per_s": 81, "joules_per_token": 1, "throttle_ratio": 0})
    told = f"undecided on tokens_per_s: between {TP.label} (3 times) and {PP.label} (measured once)"
    assert overview.contests(ranking.compared(search(*again(TP, 80, 82, 84), once))) == [told]
    assert overview.contests(ranking.compared(search(*again(TP, 82, 82, 82), once))) == []
    assert overview.contests(ranking.compared(search(once, FAST))) == [], "nothing was measured again"


def test_a_metric_that_no_repeat_has_is_that_of_the_first_trial_and_told() -> None:
    trials = again(TP, 80, 82, 84)
    reset = "GPU 0: the energy counter was reset"
    lacking = [
        replace(one, metrics={"tokens_per_s": one.metrics["tokens_per_s"]}, methods={}, cause=reset)
        for one in trials[1:]
    ]
    slower = again(PP, 50, 51, 52, energy=2.0)
    record = search(trials[0], *lacking, *slower)
    (only,) = ranking.pareto(record)
    assert (only.label, len(only.trials)) == (TP.label, 3)
    assert only.metrics == {"tokens_per_s": 82, "joules_per_token": 1, "throttle_ratio": 0}
    assert only.methods == {"joules_per_token": "counter"}
    assert set(only.intervals) == {"tokens_per_s"}
    assert overview.notices(record) == [
        "measured again: 2 layouts, 3 times each",
        f"joules_per_token of {TP.label} is that of its first trial alone, as its repeats have none: {reset}",
        f"throttle_ratio of {TP.label} is that of its first trial alone, as its repeats have none: {reset}",
    ]
    partly = search(trials[0], lacking[0], *trials[2:], *slower)
    assert ranking.pareto(partly)[0].intervals["joules_per_token"] == 0, "of the repeats that have it"
    assert not [notice for notice in overview.notices(partly) if "first trial" in notice]


def test_what_is_known_of_a_short_trial_alone_is_not_taken_over() -> None:
    trials = again(TP, 80, 82, 84)
    trials[0] = replace(trials[0], metrics=trials[0].metrics | {"extrapolation_error": 0.01, "peak_memory_gib": 3.0})
    (only,) = candidates.candidates(trials)
    assert only.borrowed == ("peak_memory_gib",)
    assert "extrapolation_error" not in only.metrics


@pytest.mark.parametrize("purpose", [Purpose.SENTINEL, Purpose.CALIBRATION])
def test_other_purposes_are_not_ranked(purpose: Purpose) -> None:
    record = search(*again(TP, 1e9, 1e9, purpose=purpose))
    assert [one.metrics["tokens_per_s"] for one in candidates.candidates(record.trials)] == [100]
    assert overview.describe(record).repeats == {purpose: 2}


def test_what_was_stopped_early_is_not_ranked() -> None:
    stopped = trial("stopped", status="pruned", tokens_per_s=1e9, joules_per_token=0, throttle_ratio=0)
    assert ids(ranking.pareto(search(stopped, FAST))) == ["fast"]
    assert overview.describe(search(stopped, FAST)).trials == {"pruned": 1, "ok": 1}


def test_short_trials_are_ranked_with_whole_ones_and_told() -> None:
    short = replace(FAST, trial_id="short", methods={"tokens_per_s": Method.SHORT})
    record = search(short, FRUGAL)
    assert ids(ranking.pareto(record)) == ["short", "frugal"]
    assert overview.notices(record) == [
        "tokens_per_s is extrapolated from steps of fewer microbatches on 1 of 2 trials"
    ]


def test_within_a_share_of_the_best_of_another_metric() -> None:
    near = trial("near", tokens_per_s=98, joules_per_token=2, throttle_ratio=0)
    record = search(FAST, FRUGAL, near)
    assert ask(record, minimize="joules_per_token", within=["tokens_per_s 2%"]).trials == (near,)
    assert ask(record, minimize="joules_per_token", within=["tokens_per_s 1.9 %"]).trials == (FAST,)
    assert ask(record, maximize="tokens_per_s", within=["joules_per_token 0%"]).trials == (FRUGAL,)
    slower = ask(record, minimize="joules_per_token", where=["tokens_per_s<99"], within=["tokens_per_s 0%"])
    assert slower.trials == (near,), "the best of those that meet the conditions"
    with pytest.raises(InputError, match="no trial to choose from with tokens_per_s 0% of the best and joules"):
        ask(record, within=["tokens_per_s 0%", "joules_per_token 0%"])


@pytest.mark.parametrize(
    ("within", "problem"),
    [
        ("tokens_per_s", "is not 'METRIC NUMBER%'"),
        ("tokens_per_s -1%", "is not 'METRIC NUMBER%'"),
        ("mean_sm_clock_mhz 1%", "neither more nor less of mean_sm_clock_mhz is better"),
        ("mfu 1%", "no metric 'mfu'"),
    ],
)
def test_a_wrong_share_is_refused(within: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        ask(search(replace(FAST, metrics=FAST.metrics | {"mean_sm_clock_mhz": 1980.0})), within=[within])


def test_the_knee_is_where_the_front_bends() -> None:
    bend = trial("bend", tokens_per_s=95, joules_per_token=1.2, throttle_ratio=0)
    flat = trial("flat", tokens_per_s=60, joules_per_token=1.1, throttle_ratio=0)
    assert ranking.answer(search(FAST, FRUGAL, flat, bend), parse_query(knee=True)) == (ranking.best(search(bend)), [])
    assert "the front has no bend" in ranking.answer(search(FAST, FRUGAL), parse_query(knee=True))[1][0]
    with pytest.raises(InputError, match="one of maximize, minimize and knee"):
        ask(search(FAST), knee=True, maximize="tokens_per_s")


def test_trials_that_had_others_beside_them_are_counted() -> None:
    told = "1 of 2 trials that explored had others beside them on a node, which may disturb"
    record = search(replace(FAST, beside=True), replace(FAST, trial_id="alone", beside=False))
    again = replace(FAST, trial_id="again", beside=True, purpose=Purpose.FINALIST)
    assert "1 of 1 repeats had another search beside them on a node, which may disturb" in overview.notices(
        search(again)
    )
    assert told in overview.notices(record)
    assert overview.notices(search(FAST)) == [], "records made before it was kept"
