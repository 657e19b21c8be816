"""Where a search stands in the queue of its cluster, from its driver to who lists it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from click.testing import CliRunner

from service.cli import main
from service.home import Home
from service.record import heartbeat
from service.record.standing import Standing
from service.record.tracking import Tracker
from tests.service.records import problem
from tests.service.test_jobs import wait_until

STARTS = datetime(2026, 1, 1, 14, 5, tzinfo=UTC)


@pytest.mark.parametrize("starts", [STARTS.timestamp(), None])
def test_a_standing_is_written_and_read_and_told(starts: float | None) -> None:
    standing = Standing(2, 3, starts)
    assert Standing.parse(str(standing)) == standing
    assert standing.told == ("2 of 3" if starts is None else "2 of 3, about 14:05 UTC")
    assert Standing.parse("") is None


def test_a_search_whose_gangs_others_have_is_queued_until_it_has_its_turn(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.1)
    spec = problem()
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("s1", spec, {})
    tracker.start_trial("t1", spec.legal.layouts[0])

    def listed() -> dict[str, Any]:
        (info,) = json.loads(CliRunner().invoke(main, ["list", "--json"]).stdout)
        assert info["id"] == "s1"
        return dict(info)

    standing: Standing | None = Standing(2, 3, STARTS.timestamp())
    with home.driving("s1"):
        assert (listed()["status"], listed()["standing"]) == ("running", None)
        with tracker.beating(lambda: standing):
            wait_until(lambda: listed()["status"] == "queued", 60)
            assert listed()["standing"] == {"place": 2, "of": 3, "starts": STARTS.timestamp()}
            assert "queued 2 of 3, about 14:05 UTC" in CliRunner().invoke(main, ["status", "s1"]).stdout
            standing = None
            wait_until(lambda: listed()["status"] == "running", 60)
            assert listed()["standing"] is None
            standing = Standing(1, 1, None)
            wait_until(lambda: listed()["status"] == "queued", 60)
        tracker.finish_search("finished", {})
        assert (listed()["status"], listed()["standing"]) == ("finished", None)
