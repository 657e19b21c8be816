"""The record as it is read back from MLflow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from search_spaces.layout import Layout
from service.answers.overview import describe
from service.errors import InputError
from service.home import Home
from service.metrics import Method
from service.problem import Problem
from service.record.results import Results
from service.record.tracking import Tracker
from service.result import Purpose, SlowCause, Straggler, TrialResult
from service.spec import parse_spec
from tests.service.records import problem
from trainables.status import Status

CONFIG = Layout("deepspeed", 2, 16, micro_batch_size=4, zero_stage=2, recompute="full", precision="fp32")
TINY = problem()


def record(home: Home, search_id: str, *outcomes: TrialResult, of: Problem = TINY, status: str = "finished") -> None:
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search(search_id, of, {})
    for outcome in outcomes:
        tracker.start_trial(outcome.trial_id, outcome.layout)
        tracker.finish_trial(outcome)
    tracker.finish_search(status, {})


def test_searches_are_listed_with_their_trials_and_best_values(home: Home) -> None:
    good: dict[str, float | None] = {"tokens_per_s": 10.0, "joules_per_token": 2.0}
    record(
        home,
        "alpha-1",
        TrialResult("alpha-1-0", CONFIG, Status.OK, None, good, {"joules_per_token": Method.ESTIMATED}),
        TrialResult("alpha-1-1", CONFIG, Status.OOM, "rank 0: out of memory"),
    )
    record(home, "alpha-2")
    latest, first = map(describe, Results(home.tracking_uri).searches())
    assert (latest.id, latest.trials, latest.best) == ("alpha-2", {}, {})
    assert (first.id, first.name, first.status) == ("alpha-1", "tiny", "finished")
    assert first.trials == {"ok": 1, "oom": 1}
    assert first.best == good
    assert first.estimated == ("joules_per_token",)
    assert (first.model, first.accelerator, first.data) == ("tiny-llama", "cpu", "synthetic")
    assert abs((datetime.now(UTC) - first.started).total_seconds()) < 60


def test_finished_searches_of_the_same_are_read_one_by_one_the_latest_first(home: Home) -> None:
    good = TrialResult("alpha-1-0", CONFIG, Status.OK, None, {"tokens_per_s": 10.0})
    record(home, "alpha-1", good)
    record(home, "alpha-2")
    record(home, "stopped", status="stopped")
    record(home, "other", of=problem(model="tiny-gpt"))
    parameters = TINY.workload.shape.parameters
    found = Results(home.tracking_uri).finished({"parameters": parameters, "accelerator": "cpu"})
    assert next(found).id == "alpha-2"
    (last,) = found
    assert (last.id, [trial.trial_id for trial in last.trials]) == ("alpha-1", ["alpha-1-0"])
    assert list(Results(home.tracking_uri).finished({"parameters": parameters, "accelerator": "h200"})) == []


def test_the_gpu_for_which_others_waited_is_read_with_its_trial(home: Home) -> None:
    slow = Straggler(1, "node", "GPU-1", 0.03, SlowCause.HEAT, 0.999)
    trials = [TrialResult("a-0", CONFIG, Status.OK, straggler=slow), TrialResult("a-1", CONFIG, Status.OK)]
    record(home, "a", *trials)
    results = Results(home.tracking_uri)
    search = results.search("a")
    assert [trial.straggler for trial in search.trials] == [slow, None]
    kept = results.result_of(search.trials[0])
    assert kept is not None
    assert kept.straggler == slow
    assert search.trials[0].to_dict()["straggler"]["cause"] == "heat"


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


def test_a_record_says_what_for_and_when_a_trial_was_run(home: Home) -> None:
    trials = [
        TrialResult("alpha-0", CONFIG, Status.OK, None, {"tokens_per_s": 10.0}),
        TrialResult("alpha-1", CONFIG, Status.OK, None, {"tokens_per_s": 11.0}, purpose=Purpose.FINALIST),
        TrialResult("alpha-2", CONFIG, Status.CRASH, "node lost", purpose=Purpose.FINALIST, infrastructure=True),
    ]
    record(home, "alpha", *trials)
    read = Results(home.tracking_uri).search("alpha").trials
    assert [(one.purpose, one.infrastructure) for one in read] == [
        ("search", False),
        ("finalist", False),
        ("finalist", True),
    ]
    for one in read:
        assert one.started is not None
        assert one.ended is not None
        assert one.started <= one.ended


def test_the_spec_of_a_search_is_read_back(home: Home) -> None:
    record(home, "alpha")
    found = Results(home.tracking_uri)
    search = found.search("alpha")
    assert parse_spec(found.spec_of(search)) == TINY
    shutil.rmtree(home.path / "artifacts")
    with pytest.raises(InputError, match=r"search alpha has no spec\.yaml"):
        found.spec_of(search)


def test_asking_an_empty_directory_leaves_it_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTUNE_HOME", str(tmp_path / "state"))
    nothing = Results(Home.locate().tracking_uri)
    assert nothing.searches() == []
    with pytest.raises(InputError, match="there are none"):
        nothing.search("any")
    assert list(tmp_path.iterdir()) == []


def test_an_answer_needs_neither_ray_nor_torch(home: Home) -> None:
    record(home, "alpha", TrialResult("alpha-0", CONFIG, Status.OK, None, {"tokens_per_s": 10.0}))
    code = """
import sys
from service.answers import ranking
from service.record import results
search = results.Results(sys.argv[1]).search("alpha")
print(ranking.best(search).trial_id, [m for m in ("ray", "torch", "deepspeed", "optuna") if m in sys.modules])
"""
    command = [sys.executable, "-c", code, home.tracking_uri]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("alpha-0 []\n", "")
