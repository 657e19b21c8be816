"""MLflow's runs as its tables, its REST API and its client have them, which is the same."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sqlite3
import threading
from collections.abc import Iterator

import pytest
from mlflow.server import app, handlers
from werkzeug.serving import make_server

from service.errors import InputError
from service.home import Home
from service.record import runs, store
from service.record.runs import Run, Runs
from service.record.tracking import Tracker
from service.result import TrialResult
from tests.service.records import CONFIG, problem
from trainables.status import Status


@pytest.fixture
def recorded(home: Home) -> Home:
    """A state directory with two searches, one of which has two trials, the second under way."""
    for search_id in ("s1", "s2"):
        tracker = Tracker(home.tracking_uri, home)
        tracker.start_search(search_id, problem(), {"python": "3.11"})
    measured: dict[str, float | None] = {"tokens_per_s": 1 / 3, "joules_per_token": 2e-4}
    result = TrialResult("t0", CONFIG, Status.OK, 'it\'s "fine"', measured, losses=(3.0, 2.5))
    for trial_id in ("t0", "t1"):
        tracker.start_trial(trial_id, CONFIG)
    tracker.finish_trial(result)
    return home


def by_client(home: Home, **tags: str) -> list[Run]:
    reader = runs._Client(home.tracking_uri)
    return reader.find({getattr(store, tag): value for tag, value in tags.items()}, {})


@contextlib.contextmanager
def served(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of MLflow's own server on the record, in this process."""
    monkeypatch.setattr(handlers, "_tracking_store", None)
    handlers._get_tracking_store(home.tracking_uri, home.artifacts)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_tables_are_read_as_mlflow_reads_them(recorded: Home) -> None:
    read = Runs(recorded.tracking_uri)
    trials = read.find({store.ROLE: store.TRIAL})
    assert trials == by_client(recorded, ROLE=store.TRIAL)
    assert [run.tags[store.TRIAL_ID] for run in trials] == ["t0", "t1"]
    assert trials[0].metrics["tokens_per_s"] == 1 / 3
    assert (trials[0].ended_ms is None, trials[1].ended_ms is None) == (False, True)
    alike = {"accelerator": "cpu", "parameters": problem().workload.shape.parameters}
    assert [run.tags[store.SEARCH_ID] for run in read.find({store.ROLE: store.SEARCH}, alike)] == ["s1", "s2"]
    assert read.find({store.ROLE: store.SEARCH}, alike | {"accelerator": "h200"}) == []
    assert read.experiment() == runs._Client(recorded.tracking_uri).experiment()


def test_a_deleted_run_is_read_no_more(recorded: Home) -> None:
    first, _ = Runs(recorded.tracking_uri).find({store.ROLE: store.TRIAL})
    store.open_client(recorded.tracking_uri).delete_run(first.id)
    (left,) = Runs(recorded.tracking_uri).find({store.ROLE: store.TRIAL})
    assert left.tags[store.TRIAL_ID] == "t1"


def test_a_server_answers_as_its_tables_do(recorded: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Runs(recorded.tracking_uri)
    with served(recorded, monkeypatch) as url:
        for page in (1000, 1):
            monkeypatch.setattr(runs, "_PAGE", page)
            server = Runs(url)
            assert server.find({store.ROLE: store.TRIAL}) == tables.find({store.ROLE: store.TRIAL})
            (search,) = server.find({store.SEARCH_ID: "s1"}, {"accelerator": "cpu"})
        assert server.experiment() == tables.experiment()
        assert server.artifact(search.id, store.SPEC) == tables.artifact(search.id, store.SPEC)
        assert "_client" not in vars(server)
        shutil.rmtree(recorded.path / "artifacts")
        assert server.artifact(search.id, store.SPEC) is None


def test_what_only_mlflow_can_ask_is_left_to_its_client(recorded: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_INSECURE_TLS", "true")
    with served(recorded, monkeypatch) as url:
        server = Runs(url)
        assert server.find({store.ROLE: store.TRIAL}) == by_client(recorded, ROLE=store.TRIAL)
        assert "_client" in vars(server)


def test_tables_that_are_not_known_are_left_to_mlflow(recorded: Home) -> None:
    expected = Runs(recorded.tracking_uri).find({store.ROLE: store.TRIAL})
    read = Runs(recorded.tracking_uri)
    read._quick = runs._File(recorded.path / "optuna.db")  # a file without these tables
    sqlite3.connect(recorded.path / "optuna.db").close()
    assert read.find({store.ROLE: store.TRIAL}) == expected


def test_nothing_is_made_of_what_is_no_record(home: Home) -> None:
    (home.path / "mlflow.db").unlink()
    empty = Runs(home.tracking_uri)
    assert (empty.experiment(), empty.find({store.ROLE: store.SEARCH})) == (None, [])
    assert not (home.path / "mlflow.db").exists()
    (home.path / "mlflow.db").write_text("this is no database" * 100)
    with pytest.raises(InputError, match="not a database"):
        Runs(home.tracking_uri).find({store.ROLE: store.SEARCH})
