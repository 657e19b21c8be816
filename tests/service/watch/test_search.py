from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from service.cli import main
from service.client import Wattune
from service.home import Home
from service.record.tracking import Tracker
from service.result import TrialResult
from service.watch import search as watch
from tests.service.records import problem
from trainables.status import Status

PROBLEM = problem(space={"precision": "fp32", "micro_batch_size": [1, 2, 4]}, objectives={"tokens_per_s": "maximize"})
FIRST, SECOND, THIRD = PROBLEM.legal.layouts[:3]


@pytest.fixture
def tracker(home: Home, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    monkeypatch.setattr(watch, "PERIOD_S", 0.01)
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("s1", PROBLEM, {})
    return tracker


def ok(trial_id: str, layout: Any, speed: float) -> TrialResult:
    return TrialResult(trial_id, layout, Status.OK, None, {"tokens_per_s": speed})


def killed_driver(home: Home) -> None:
    """What a driver leaves that was killed: a lock that nobody holds."""
    home.spool("s1").mkdir(parents=True, exist_ok=True)
    (home.spool("s1") / "driver.lock").touch()


def test_events_come_as_they_happen(home: Home, tracker: Tracker) -> None:
    with home.driving("s1"):
        happening = Wattune().watch("s1")
        said = [next(happening)]
        tracker.start_trial("a", FIRST)
        said += [next(happening) for _ in range(2)]
        tracker.finish_trial(ok("a", FIRST, 100.0))
        said += [next(happening) for _ in range(2)]
        tracker.start_trial("b", SECOND)
        tracker.finish_trial(TrialResult("b", SECOND, Status.CRASH, "a node was lost", infrastructure=True))
        said += [next(happening) for _ in range(2)]
        tracker.start_trial("c", SECOND)
        tracker.finish_trial(ok("c", SECOND, 200.0))
        said += [next(happening) for _ in range(3)]
    killed_driver(home)
    said.append(next(happening))
    with home.driving("s1"):
        said.append(next(happening))
        tracker.finish_search("finished", {})
        said += list(happening)
    assert [(event.kind, event.text) for event in said] == [
        ("status", "queued"),
        ("status", "running"),
        ("start", FIRST.label),
        ("result", f"ok     {FIRST.label}: 100 tokens/s"),
        ("front", f"100 tokens/s: {FIRST.label}"),
        ("start", SECOND.label),
        ("fault", f"crash  {SECOND.label}: a node was lost"),
        ("start", SECOND.label),
        ("result", f"ok     {SECOND.label}: 200 tokens/s"),
        ("front", f"200 tokens/s: {SECOND.label}"),
        ("fault", "interrupted"),
        ("status", "running"),
        ("status", "finished"),
    ]


def test_a_record_that_is_out_of_reach_for_a_while_is_told_once(home: Home, tracker: Tracker) -> None:
    database = home.path / "mlflow.db"
    killed_driver(home)
    happening = Wattune().watch("s1")
    assert next(happening).text == "interrupted", "its driver is dead"
    content = database.read_bytes()
    database.write_bytes(b"this is no database any more, and long enough to tell that it is none" * 10)
    event = next(happening)
    assert (event.kind, event.text.startswith("the record is out of reach: ")) == ("fault", True)
    database.write_bytes(content)
    tracker.finish_search("stopped", {})
    assert [(event.kind, event.text) for event in happening] == [("status", "stopped")]


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that takes what is posted, and refuses events of trials that start; its URL, and what came."""
    came: list[dict[str, Any]] = []

    class Taking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if came[-1]["kind"] == "start" else 200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Taking)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", came
    server.shutdown()
    server.server_close()


def test_the_command_prints_json_lines_and_posts_them(
    tracker: Tracker, webhook: tuple[str, list[dict[str, Any]]]
) -> None:
    tracker.start_trial("a", FIRST)
    tracker.finish_trial(ok("a", FIRST, 100.0))
    tracker.finish_search("failed", {})
    url, came = webhook
    called = CliRunner().invoke(main, ["watch", "s1", "--json", "--webhook", url])
    assert called.exit_code == 3
    lines = [json.loads(line) for line in called.stdout.splitlines()]
    assert [line["kind"] for line in lines] == ["start", "result", "front", "status"]
    assert lines[1]["details"]["trial"]["metrics"] == {"tokens_per_s": 100.0}
    assert came == lines
    assert called.stderr.splitlines() == [
        "note: webhook: HTTPError for a start event",
        "wattune: search s1 failed; `wattune resume` goes on with it",
    ]


def test_what_cannot_be_watched_is_refused(tracker: Tracker) -> None:
    for arguments, word in ((["nowhere"], "unknown"), (["s1", "--webhook", "example"], "webhook")):
        called = CliRunner().invoke(main, ["watch", *arguments])
        assert (called.exit_code, called.stdout, called.stderr.count("\n")) == (2, "", 1)
        assert word in called.stderr
