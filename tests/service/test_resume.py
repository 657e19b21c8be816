"""A search whose driver is killed goes on where it was: nothing lost, nothing twice, nobody left behind."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from click.testing import CliRunner
from mlflow import MlflowClient

from service.answers.ranking import pareto
from service.cli import main
from service.client import Wattune
from service.errors import InputError
from service.home import Home
from service.problem import Problem
from service.record import store
from service.record.heartbeat import Heartbeat
from service.record.results import Results, SearchRecord
from service.record.tracking import Tracker
from service.result import Purpose, TrialResult
from service.sampling.agenda import SearchAgenda, settled
from service.sampling.study import SearchStudy
from service.search import results_of, resume
from service.spec import load_spec, parse_spec
from service.step import Step
from tests.service.records import PLENTY
from trainables.status import Status

SPEC: dict[str, Any] = {
    "name": "resumed",
    "model": "tiny-llama",
    "data": "synthetic",
    "sequence_length": 64,
    "global_batch_size": 8,
    "cluster": {"nodes": 1, "gpus_per_node": 2, "accelerator": "cpu"},
    "space": {"engine": ["megatron"], "zero_stage": [0, 1, 2], "micro_batch_size": [1, 2, 4], "precision": "fp32"},
    "measurement": {"window_s": 0.5, "window_min_steps": 3, "warmup_max_s": 0.5, "deadline_s": 120},
    "budget": {"trials": 5},
    "finalists": {"count": 0},
    "sentinel_every": 0,
}
WATTUNE = [sys.executable, "-m", "service.cli"]
RESULT = " of at most 5;"  # the line after each trial with a result


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return path


def recorded(home: Home, search: str) -> tuple[SearchRecord, Problem]:
    """A search as it is recorded, and its problem."""
    results = Results(home.tracking_uri)
    record = results.search(search)
    return record, parse_spec(results.spec_of(record))


@pytest.fixture
def broken_off(home: Home, spec_file: Path) -> tuple[str, list[TrialResult]]:
    """What a driver leaves that was killed: one trial recorded, one in the spool only, one under way."""
    spec = load_spec(spec_file)
    study = SearchStudy("s1", spec.legal.layouts, spec.goals, "tpe", 0, home.optuna_storage)
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("s1", spec, {})
    results = []
    for i, (status, cause) in enumerate([(Status.OK, None), (Status.CRASH, "a worker died"), (Status.OK, None)]):
        layout = study.ask()
        assert layout is not None
        tracker.start_trial(f"t{i}", layout)
        results.append(TrialResult(f"t{i}", layout, status, cause, {"tokens_per_s": 10.0 + i} if not cause else {}))
    study.tell(results[0].layout, results[0])
    tracker.finish_trial(results[0])
    tracker._spool(results[1], None, {"started_ms": 1, "finished_ms": 2, "config": {}, "tags": {}})
    tracker.update_search({"search_time_s": 100.0, "gpu_hours": 0.5})
    (home.spool("s1") / "driver.lock").touch()
    return "s1", results


def test_the_record_is_taken_up_where_it_was(home: Home, broken_off: tuple[str, list[TrialResult]]) -> None:
    search, results = broken_off
    assert Wattune().status(search).status == "interrupted"
    assert [info.status for info in Wattune().searches()] == ["interrupted"]
    tracker = Tracker(home.tracking_uri, home)
    summary = tracker.resume_search(*recorded(home, search))
    assert summary == {"search_time_s": 100.0, "gpu_hours": 0.5}
    record = Results(home.tracking_uri).search(search)
    assert [(t.trial_id, t.status) for t in record.trials] == [("t0", "ok"), ("t1", "crash"), ("t2", "stopped")]
    assert list((home.spool(search) / "unsent").iterdir()) == []
    client = MlflowClient(home.tracking_uri)
    assert [client.get_run(t.run_id).info.status for t in record.trials] == ["FINISHED", "FAILED", "KILLED"]
    with home.driving(search):
        assert Wattune().status(search).status == "queued"
        tracker.start_trial("t3", results[2].layout)
        assert Wattune().status(search).status == "running"
        tracker.finish_trial(TrialResult("t3", results[2].layout, Status.OK))
        tracker.finish_search("finished", {"search_time_s": 120.0})
    parent = client.get_run(record.run_id)
    assert (parent.info.status, parent.data.metrics["search_time_s"]) == ("FINISHED", 120.0)
    assert Wattune().status(search).status == "finished"


def test_the_record_says_what_each_trial_was_for_and_which_are_run_again(
    home: Home, broken_off: tuple[str, list[TrialResult]]
) -> None:
    """Finalists that were measured are not measured again, and a layout that the machines failed is."""
    search, results = broken_off
    tracker = Tracker(home.tracking_uri, home)
    tracker.resume_search(*recorded(home, search))
    later = [
        replace(results[2], trial_id="t3", status=Status.CRASH, metrics={}, infrastructure=True),
        replace(results[0], trial_id="t4", purpose=Purpose.SENTINEL),
        replace(results[0], trial_id="t5", purpose=Purpose.FINALIST),
    ]
    for result in later:
        tracker.start_trial(result.trial_id, result.layout, result.purpose)
        tracker.finish_trial(result)
    found = results_of(Results(home.tracking_uri).search(search))
    assert [(r.trial_id, r.purpose, r.infrastructure) for r in found] == [
        ("t0", "search", False),
        ("t1", "search", False),
        ("t3", "search", True),
        ("t4", "sentinel", False),
        ("t5", "finalist", False),
    ]

    spec = parse_spec(yaml.safe_dump(SPEC | {"finalists": {"count": 4, "repeats": 3}, "sentinel_every": 5}))
    study = SearchStudy(search, spec.legal.layouts, spec.goals, "tpe", 0, home.optuna_storage)
    study.recall([result for result in settled(found) if result.purpose == "search"])
    assert study.ask() == results[2].layout, "handed out, with no result that counts"
    agenda = SearchAgenda(study, spec, results=found)
    steps = [agenda.next("t6", PLENTY), agenda.next("t7", PLENTY)]
    assert steps == [Step(results[0].layout, Purpose.FINALIST)] * 2, "of one layout, measured once of three times"
    assert agenda.next("t8", PLENTY) is None


def test_what_cannot_be_resumed_is_refused(
    home: Home, broken_off: tuple[str, list[TrialResult]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, _ = broken_off

    def refused(*words: str, of: str = search) -> None:
        called = CliRunner().invoke(main, ["resume", of, "--tracking-uri", home.tracking_uri])
        assert (called.exit_code, called.stdout) == (2, "")
        assert called.stderr.count("\n") == 1
        assert all(word in called.stderr for word in words), called.stderr

    refused("unknown", of="another")
    with home.driving(search):
        refused(search, "running")
    (home.spool(search) / "driver.lock").touch(exist_ok=False)
    record = Results(home.tracking_uri).search(search)
    client = MlflowClient(home.tracking_uri)
    client.set_tag(record.run_id, store.HEARTBEAT, str(Heartbeat(time.time(), "another", 1)))
    refused(search, "running", "on another", "ago")
    client.set_tag(record.run_id, store.HEARTBEAT, str(record.heartbeat))
    assert Wattune().status(search).status == "interrupted", "a refusal changes nothing"
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("WATTUNE_HOME", str(tmp_path / "elsewhere"))
        refused(search, "elsewhere", "WATTUNE_HOME")
    tracker = Tracker(home.tracking_uri, home)
    tracker.resume_search(*recorded(home, search))
    tracker.finish_search("finished", {})
    refused(search, "finished")


def test_a_result_that_the_store_does_not_take_is_not_run_again(
    home: Home, broken_off: tuple[str, list[TrialResult]]
) -> None:
    search, _ = broken_off
    kept = home.spool(search) / "unsent" / "t1"
    (kept / "start.json").write_text("broken")
    with pytest.raises(InputError, match="t1 is not recorded"):
        Tracker(home.tracking_uri, home).resume_search(*recorded(home, search))
    assert kept.exists()


def run_and_kill(home: Home, *arguments: str, word: str, times: int) -> None:
    """`wattune` in a process of its own, killed once it has printed `word` so often."""
    output = home.path / "output.txt"
    with output.open("w") as sink:
        process = subprocess.Popen([*WATTUNE, *arguments], stdout=sink, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 180
    while output.read_text().count(word) < times:
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)
    process.kill()
    process.wait()


def left_of(home: Home) -> list[str]:
    """The processes that were started for searches of this state directory.

    Without Ray's agents, which take about a minute to see that their node is gone, and hold nothing.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"WATTUNE_HOME={home.path}\0".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended, or is not ours
            continue
    return [command for command in found if not command.startswith(("ray::DashboardAgent", "ray::RuntimeEnvAgent"))]


@pytest.mark.slow
def test_a_search_killed_three_times_ends_as_one_left_alone(
    home: Home, spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its first trial, in its third, and once more with all but one done."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    arguments = ["run", str(spec_file), "--search-id", "broken"]
    for word, times in ((" start ", 1), (RESULT, 2), (RESULT, 2)):
        run_and_kill(home, *arguments, word=word, times=times)
        deadline = time.monotonic() + 30
        while left := left_of(home):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
        assert Wattune().status("broken").status == "interrupted"
        arguments = ["resume", "broken"]
    done = subprocess.run([*WATTUNE, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of them done" in done.stdout
    assert "trial 5 of at most 5" in done.stdout

    record = Results(home.tracking_uri).search("broken")
    assert record.status == "finished"
    assert {trial.status for trial in record.trials} == {"ok", "stopped"}
    finished = [trial.label for trial in record.trials if trial.status == "ok"]
    assert len(finished) == len(set(finished)) == 5
    assert {trial.label for trial in record.trials} == set(finished), "what was under way was run again"
    assert pareto(record)
    study = optuna.load_study(study_name="broken", storage=home.optuna_storage)
    # One that was being asked for when its driver died is told as failed, and asked for anew.
    states = [trial.state.name for trial in study.trials if set(trial.params) == {"zero_stage", "micro_batch_size"}]
    assert states == ["COMPLETE"] * 5
    assert all(trial.state.name in ("COMPLETE", "FAIL") for trial in study.trials)
    assert not home.spool("broken").exists()
    with pytest.raises(InputError, match="finished"):
        resume("broken")
