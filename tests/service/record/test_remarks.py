"""What people add to a record: tags, a note, and that a trial is to end; by the command line, and by the driver."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result
from mlflow import MlflowClient

from service.cli import main
from service.home import Home
from service.record import heartbeat, store
from service.record.results import Results
from service.record.tracking import Tracker
from tests.service.record.test_tracking import CONFIG, measured, start
from trainables.status import Status


@pytest.fixture
def tracker(home: Home) -> Tracker:
    return start(home)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def tags(home: Home) -> dict[str, str]:
    """Those of the search's run, as MLflow has them."""
    run_id = Results(home.tracking_uri).search("s1").run_id
    return dict(MlflowClient(home.tracking_uri).get_run(run_id).data.tags)


def test_a_search_has_the_tags_that_it_was_given(tracker: Tracker, home: Home) -> None:
    assert call("tag", "s1").stdout == ""
    given = call("tag", "s1", "team=infra", "goal=lower the bill = a bit", "odd=")
    assert given.stdout == "goal=lower the bill = a bit\nteam=infra\n"
    assert tags(home)["team"] == "infra", "people filter by it in MLflow's pages"
    assert call("tag", "s1", "goal=").stdout == "team=infra\n"
    assert json.loads(call("tag", "s1", "--json").stdout) == {"team": "infra"}
    (listed,) = json.loads(call("list", "--json").stdout)
    assert listed["tags"] == {"team": "infra"}
    heading, _, row = call("list").stdout.splitlines()
    assert heading.endswith("tags")
    assert row.endswith("team=infra")


def test_a_search_without_tags_is_listed_as_ever(tracker: Tracker) -> None:
    assert "tags" not in call("list").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["team"], "give KEY=VALUE"),
        (["=infra"], "give letters"),
        (["a b=c"], "give letters"),
        (["ok=1", "wattune.status=finished"], "is not for people"),
        (["mlflow.user=me"], "is not for people"),
        (["long=" + "x" * 5001], "5001 characters are more than 5000"),
    ],
)
def test_what_cannot_be_a_tag_is_refused_and_nothing_is_changed(
    tracker: Tracker, home: Home, arguments: list[str], said: str
) -> None:
    before = tags(home)
    refused = call("tag", "s1", *arguments)
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert tags(home) == before


def test_a_note_heads_the_description_and_outlives_the_search_s_own(tracker: Tracker, home: Home) -> None:
    link = tags(home)[store.DESCRIPTION]
    assert call("note", "s1", "Slow nodes: *repeat*.").stdout == "Slow nodes: *repeat*.\n"
    assert tags(home)[store.DESCRIPTION] == f"Slow nodes: *repeat*.\n\n{link}"
    call("note", "s1", "Repeated.")
    assert tags(home)[store.DESCRIPTION] == f"Repeated.\n\n{link}"
    tracker.attach_description(lambda: "The front.")
    assert tags(home)[store.DESCRIPTION] == f"Repeated.\n\n{link}\n\nThe front."
    assert call("status", "s1").stdout.splitlines()[-1] == "Repeated."
    assert json.loads(call("note", "s1", "--json").stdout) == {"note": "Repeated."}
    assert call("note", "s1", "").stdout == ""
    assert tags(home)[store.DESCRIPTION] == f"{link}\n\nThe front."
    assert json.loads(call("status", "s1", "--json").stdout)["note"] is None


def test_a_trial_under_way_is_cancelled_by_its_id_or_its_layout(
    tracker: Tracker, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    asked: list[tuple[str, str]] = []
    monkeypatch.setenv("WATTUNE_USER", "ada")
    other = replace(CONFIG, tensor_parallel_size=1, sequence_parallel=False)
    tracker.start_trial("t-0", CONFIG)
    tracker.start_trial("t-1", other)
    with home.driving("s1"), tracker.beating(cancel=lambda *one: asked.append(one)):
        assert call("cancel", "s1", CONFIG.label).stdout == f"t-0: {CONFIG.label}\n"
        assert json.loads(call("cancel", "s1", "t-1", "--json").stdout)["label"] == other.label
        until = time.monotonic() + 60
        while len(set(asked)) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert set(asked) == {("t-0", "cancelled by ada"), ("t-1", "cancelled by ada")}

        ambiguous = call("cancel", "s1", "t-")
        assert (ambiguous.exit_code, "is ambiguous; under way: t-0 (" in ambiguous.stderr) == (2, True)
        tracker.finish_trial(replace(measured("t-0"), status=Status.CANCELLED, cause="cancelled by ada", metrics={}))
        over = call("cancel", "s1", "t-0")
        assert (over.exit_code, "'t-0' is not under way; under way: t-1" in over.stderr) == (2, True)
    told = json.loads(call("status", "s1", "--json").stdout)
    assert told["trials"] == {"cancelled": 1, "running": 1}
    assert [(one["status"], one["cause"]) for one in told["failures"]] == [("cancelled", "cancelled by ada")]


def test_no_trial_is_cancelled_of_a_search_that_is_over(tracker: Tracker) -> None:
    tracker.finish_search("finished", {})
    refused = call("cancel", "s1", "t-0")
    assert refused.exit_code == 2
    assert refused.stderr == "wattune: search s1 is finished: no trial of it is under way\n"
