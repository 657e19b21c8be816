from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from service.cli import main
from service.client import Wattune
from service.errors import InputError
from service.home import Home
from service.record.tracking import Tracker
from service.result import TrialResult
from service.sampling.study import SearchStudy, study_exists
from telemetry.spool import boot_id
from tests.service.records import problem
from trainables.status import Status

PROBLEM = problem(space={"precision": "fp32", "micro_batch_size": [1, 2]}, objectives={"tokens_per_s": "maximize"})
NODE = "0123456789abcdef" * 3 + "01234567"


def recorded(home: Home, search: str, status: str) -> None:
    """A search with one trial, a study and telemetry."""
    study = SearchStudy(search, PROBLEM.legal.layouts, PROBLEM.goals, "random", 0, home.optuna_storage)
    layout = study.ask()
    assert layout is not None
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search(search, PROBLEM, {})
    tracker.start_trial("t", layout)
    tracker.finish_trial(TrialResult("t", layout, Status.OK, None, {"tokens_per_s": 1.0}))
    if status != "running":
        tracker.finish_search(status, {})
    recording(home, search).mkdir(parents=True)


def recording(home: Home, search: str) -> Path:
    return home.telemetry / boot_id() / f"{search}-{NODE}"


@pytest.mark.slow
def test_what_is_removed_is_listed_first_and_gone_for_good(home: Home) -> None:
    for search, status in (("done", "finished"), ("done-too", "finished"), ("broken", "failed"), ("alive", "running")):
        recorded(home, search, status)
    run = Wattune().trials("done")[0].run_id
    assert list(home.path.glob(f"artifacts/**/{run}"))
    called = CliRunner().invoke(main, ["gc", "--older-than", "1"])
    assert (called.exit_code, "no searches" in called.stdout) == (0, True)
    called = CliRunner().invoke(main, ["gc", "--older-than", "0"])
    assert (called.exit_code, "--yes" in called.stderr) == (2, True)
    assert {info.id for info in Wattune().searches()} == {"done", "done-too", "broken", "alive"}

    told = CliRunner().invoke(main, ["gc", "--older-than", "0", "--json"])
    assert {one["id"] for one in json.loads(told.stdout)} == {"done", "done-too"}
    assert {info.id for info in Wattune().searches()} == {"done", "done-too", "broken", "alive"}, "without --yes"

    called = CliRunner().invoke(main, ["gc", "--older-than", "0", "--yes"])
    assert (called.exit_code, called.stderr) == (0, "")
    assert "done-too" in called.stdout
    assert "broken" not in called.stdout
    assert {info.id for info in Wattune().searches()} == {"broken", "alive"}
    assert not list(home.path.glob(f"artifacts/**/{run}"))
    assert not study_exists("done", home.optuna_storage)
    assert not recording(home, "done").exists()
    assert recording(home, "broken").exists()

    with pytest.raises(InputError, match="alive is running: it is not removed"):
        Wattune().remove("alive")
    assert CliRunner().invoke(main, ["gc", "--older-than", "0", "--resumable", "--yes"]).exit_code == 0
    assert {info.id for info in Wattune().searches()} == {"alive"}
