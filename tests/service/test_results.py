from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from search_spaces.config import TrialConfig
from service import results
from service.errors import InputError
from service.home import Home
from service.results import Results, SearchRecord, TrialRecord
from service.tracking import Tracker
from trainables.result import TrialResult

CONFIG = TrialConfig("deepspeed", 2, 16, micro_batch_size=4, zero_stage=2, recompute="full", precision="fp32")
DEFAULT = {"tokens_per_s": "maximize", "joules_per_token": "minimize", "throttle_ratio": "minimize"}


def trial(trial_id: str, energy: str = "counter", status: str = "ok", **metrics: float) -> TrialRecord:
    methods = {"joules_per_token": energy} if "joules_per_token" in metrics else {}
    return TrialRecord(trial_id, CONFIG.label, CONFIG.to_dict(), status, None, metrics, methods, f"run-{trial_id}")


def search(
    *trials: TrialRecord, objectives: dict[str, str] | None = None, constraints: tuple[str, ...] = ()
) -> SearchRecord:
    facts = {"model": "tiny-llama", "accelerator": "cpu", "data": "synthetic"}
    objectives = DEFAULT if objectives is None else objectives
    started = datetime(2026, 1, 1, tzinfo=UTC)
    return SearchRecord("s1", "tiny", "finished", started, objectives, constraints, facts, {}, (), "run", trials)


def ids(trials: list[TrialRecord]) -> list[str]:
    return [one.trial_id for one in trials]


def record(home: Home, search_id: str, *outcomes: TrialResult) -> None:
    tracker = Tracker(home.tracking_uri, home)
    facts = {"model": "tiny-llama", "accelerator": "cpu", "data": "synthetic"}
    tracker.start_search(search_id, "", facts, {}, {}, name="tiny", objectives=DEFAULT)
    for outcome in outcomes:
        tracker.start_trial(outcome.trial_id, outcome.config, {})
        tracker.finish_trial(outcome)
    tracker.finish_search("finished", {})


FAST = trial("fast", tokens_per_s=100, joules_per_token=3, throttle_ratio=0)
FRUGAL = trial("frugal", tokens_per_s=50, joules_per_token=1, throttle_ratio=0)
BEATEN = trial("beaten", tokens_per_s=50, joules_per_token=2, throttle_ratio=0)


def test_the_front_holds_what_nobody_beats_on_all_objectives() -> None:
    assert ids(results.pareto(search(BEATEN, FRUGAL, FAST))) == ["fast", "frugal"]


def test_equal_trials_are_all_on_the_front() -> None:
    twin = trial("twin", tokens_per_s=100, joules_per_token=3, throttle_ratio=0)
    assert set(ids(results.pareto(search(FAST, BEATEN, FRUGAL, twin)))) == {"fast", "twin", "frugal"}


def test_only_trials_that_ended_well_are_ranked() -> None:
    crashed = trial("crashed", status="crash", tokens_per_s=1e9, joules_per_token=0, throttle_ratio=0)
    record = search(crashed, FAST)
    assert ids(results.pareto(record)) == ["fast"]
    assert results.best(record, maximize="tokens_per_s") == FAST
    assert results.pareto(search(crashed)) == []
    with pytest.raises(InputError, match="1 crash"):
        results.best(search(crashed))


def test_an_estimate_is_never_ranked_against_a_measured_figure() -> None:
    guessed = trial("guessed", energy="estimated", tokens_per_s=1e9, joules_per_token=0.01, throttle_ratio=0)
    record = search(guessed, FAST, FRUGAL)
    assert ids(results.pareto(record)) == ["fast", "frugal"]
    assert results.best(record, minimize="joules_per_token") == FRUGAL
    assert results.best(record, maximize="tokens_per_s", where=["joules_per_token<2"]) == FRUGAL
    assert "joules_per_token" in results.notices(record)[0]
    alone = search(guessed)
    assert results.best(alone, minimize="joules_per_token") == guessed
    assert results.notices(alone) == ["joules_per_token is estimated, not measured"]
    assert results.describe(alone).estimated == ("joules_per_token",)
    assert results.describe(record).best["joules_per_token"] == 1


def test_figures_of_depth_proxies_are_never_ranked_against_measured_ones() -> None:
    proxies = {"tokens_per_s": "extrapolated", "joules_per_token": "extrapolated"}
    thought = replace(trial("thought", tokens_per_s=1e9, joules_per_token=0.01, throttle_ratio=0), methods=proxies)
    slower = replace(thought, trial_id="slower", metrics=thought.metrics | {"tokens_per_s": 1e8})
    record = search(thought, FAST, FRUGAL)
    assert ids(results.pareto(record)) == ["fast", "frugal"]
    assert results.best(record, maximize="tokens_per_s") == FAST
    assert "tokens_per_s is extrapolated on 1 of 3 trials: these are not ranked" in results.notices(record)
    alone = search(thought, slower)
    assert results.best(alone, maximize="tokens_per_s") == thought
    assert results.notices(alone) == [
        "tokens_per_s is extrapolated from models of fewer layers, not measured",
        "joules_per_token is extrapolated from models of fewer layers, not measured",
    ]
    info = results.describe(alone)
    assert info.extrapolated == ("tokens_per_s", "joules_per_token")
    assert [info.method(metric) for metric in DEFAULT] == ["extrapolated", "extrapolated", None]


def test_an_extrapolation_is_ranked_before_an_estimate() -> None:
    thought = replace(FAST, trial_id="thought", methods={"joules_per_token": "extrapolated"})
    guessed = replace(FRUGAL, trial_id="guessed", methods={"joules_per_token": "estimated"})
    assert results.best(search(thought, guessed), minimize="joules_per_token") == thought


def test_an_objective_that_nobody_measured_is_left_out_and_told() -> None:
    a, b = trial("a", tokens_per_s=2, joules_per_token=2), trial("b", tokens_per_s=1, joules_per_token=1)
    record = search(a, b, trial("c", tokens_per_s=1, joules_per_token=2))
    assert ids(results.pareto(record)) == ["a", "b"]
    assert results.notices(record) == ["throttle_ratio was not measured by any trial: ranked without it"]


def test_a_trial_without_an_objective_that_others_have_is_not_on_the_front() -> None:
    lacking = trial("lacking", tokens_per_s=1e9, throttle_ratio=0)
    record = search(lacking, FAST)
    assert ids(results.pareto(record)) == ["fast"]
    assert results.best(record) == FAST
    assert results.best(record, maximize="tokens_per_s") == lacking
    assert results.notices(record) == ["joules_per_token is missing on 1 of 2 trials: these are not ranked"]


def test_the_constraints_of_the_search_hold() -> None:
    record = search(FAST, FRUGAL, constraints=("joules_per_token<=2", "peak_memory_gib<=70"))
    assert ids(results.pareto(record)) == ["frugal"]
    assert results.best(record, maximize="tokens_per_s") == FRUGAL
    assert results.notices(record) == ["constraint peak_memory_gib<=70 was not applied: no trial has this metric"]


def test_best_is_the_first_objective_by_default_and_ties_go_to_the_others() -> None:
    cool = trial("cool", tokens_per_s=100, joules_per_token=2, throttle_ratio=0)
    record = search(FRUGAL, FAST, cool)
    assert results.best(record) == cool
    assert results.best(record, minimize="throttle_ratio") == cool
    assert results.best(record, minimize="tokens_per_s") == FRUGAL


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
    assert results.best(search(FAST, FRUGAL, BEATEN), where=[condition]).trial_id == expected


@pytest.mark.parametrize(
    "condition", ["tokens_per_s", "tokens_per_s<", "tokens_per_s<ten", "tokens_per_s=5", "mfu<nan"]
)
def test_a_malformed_condition_is_refused(condition: str) -> None:
    with pytest.raises(InputError, match="is not 'METRIC<=NUMBER'"):
        results.best(search(FAST), where=[condition])


def test_unknown_metrics_and_empty_choices_are_refused() -> None:
    record = search(FAST)
    for unknown in ({"maximize": "speed"}, {"minimize": "speed"}, {"where": ["speed>1"]}):
        with pytest.raises(InputError, match="recorded: joules_per_token, throttle_ratio, tokens_per_s"):
            results.best(record, **unknown)
    with pytest.raises(InputError, match="no trial to choose from with tokens_per_s>100"):
        results.best(record, where=["tokens_per_s>100"])
    with pytest.raises(InputError, match="one of maximize and minimize"):
        results.best(record, maximize="tokens_per_s", minimize="joules_per_token")


def test_export_holds_what_launching_needs() -> None:
    exported = json.loads(json.dumps(results.export(search(FAST), FAST)))
    assert TrialConfig.from_dict(exported["config"]) == CONFIG
    assert (exported["search_id"], exported["trial_id"]) == ("s1", "fast")
    assert exported["workload"]["model"] == "tiny-llama"
    assert exported["metrics"]["tokens_per_s"] == 100
    assert exported["methods"] == {"joules_per_token": "counter"}
    assert exported["deepspeed"]["zero_optimization"]["stage"] == 2
    assert exported["deepspeed"]["train_micro_batch_size_per_gpu"] == 4
    assert set(exported["not_expressible"]) == {"recompute"}
    assert "megatron_lm" not in exported


def test_export_of_a_megatron_layout_has_its_arguments() -> None:
    layout = TrialConfig("megatron", 8, 16, tensor_parallel_size=2, pipeline_parallel_size=4, compile=True)
    exported = results.export(search(FAST), replace(FAST, config=layout.to_dict()))
    arguments = " ".join(exported["megatron_lm"])
    assert "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4" in arguments
    assert set(exported["not_expressible"]) == {"compile"}
    assert "deepspeed" not in exported


def dominates(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a <= b).all() and (a < b).any())


shapes = st.tuples(st.integers(1, 40), st.integers(1, 4))
few_values = st.integers(-3, 3).map(float)
any_values = st.floats(allow_nan=False, allow_infinity=False)


@given(shapes.flatmap(lambda shape: hnp.arrays(float, shape, elements=st.one_of(few_values, any_values))))
def test_a_row_is_on_the_front_exactly_if_no_row_dominates_it(costs: np.ndarray) -> None:
    front = results.pareto_front(costs)
    assert sorted(front) == [i for i, row in enumerate(costs) if not any(dominates(other, row) for other in costs)]
    assert [tuple(costs[i]) for i in front] == sorted(tuple(costs[i]) for i in front)


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
    ok = [one for one in trials if one.status == "ok"]
    objectives = [name for name in DEFAULT if any(name in one.metrics for one in ok)]
    front = results.pareto(record)
    assert all(one in ok and set(objectives) <= set(one.metrics) for one in front)
    energies = {one.methods.get("joules_per_token") for one in front}
    for method in ("estimated", "extrapolated"):
        assert method not in energies or energies == {method}
    if front:
        assert results.best(record) == front[0]
    if metric in objectives:
        chosen = results.best(record, maximize=metric)
        compared = [
            one for one in ok if metric in one.metrics and one.methods.get(metric) == chosen.methods.get(metric)
        ]
        assert chosen.metrics[metric] == max(one.metrics[metric] for one in compared)


def test_searches_are_listed_with_their_trials_and_best_values(home: Home) -> None:
    good: dict[str, float | None] = {"tokens_per_s": 10.0, "joules_per_token": 2.0}
    record(
        home,
        "alpha-1",
        TrialResult("alpha-1-0", CONFIG, "ok", None, good, {"joules_per_token": "estimated"}),
        TrialResult("alpha-1-1", CONFIG, "oom", "rank 0: out of memory"),
    )
    record(home, "alpha-2")
    latest, first = Results(home.tracking_uri).searches()
    assert (latest.id, latest.trials, latest.best) == ("alpha-2", {}, {})
    assert (first.id, first.name, first.status) == ("alpha-1", "tiny", "finished")
    assert first.trials == {"ok": 1, "oom": 1}
    assert first.best == good
    assert first.estimated == ("joules_per_token",)
    assert (first.model, first.accelerator, first.data) == ("tiny-llama", "cpu", "synthetic")
    assert abs((datetime.now(UTC) - first.started).total_seconds()) < 60


def test_a_search_is_found_by_a_unique_beginning_of_its_id(home: Home) -> None:
    for search_id in ("alpha-1", "alpha-12", "beta-1"):
        record(home, search_id)
    found = Results(home.tracking_uri)
    assert found.search("beta").id == "beta-1"
    assert found.search("alpha-1").id == "alpha-1"
    with pytest.raises(InputError, match="'alpha' is ambiguous: alpha-12, alpha-1"):
        found.search("alpha")
    for unknown in ("gamma", ""):
        with pytest.raises(InputError, match=r"is unknown at .*; known: beta-1, alpha-12, alpha-1$"):
            found.search(unknown)


def test_asking_an_empty_directory_leaves_it_empty(tmp_path: Path) -> None:
    nothing = Results(Home(tmp_path / "state").tracking_uri)
    assert nothing.searches() == []
    with pytest.raises(InputError, match="there are none"):
        nothing.search("any")
    assert list(tmp_path.iterdir()) == []


def test_an_answer_needs_neither_ray_nor_torch(home: Home) -> None:
    record(home, "alpha", TrialResult("alpha-0", CONFIG, "ok", None, {"tokens_per_s": 10.0}))
    code = """
import sys
from service import results
search = results.Results(sys.argv[1]).search("alpha")
print(results.best(search).trial_id, [m for m in ("ray", "torch", "deepspeed", "optuna") if m in sys.modules])
"""
    command = [sys.executable, "-c", code, home.tracking_uri]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("alpha-0 []\n", "")
