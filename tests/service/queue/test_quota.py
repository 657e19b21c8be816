"""What is left of a user's GPU-hours, by the record."""

from __future__ import annotations

import pytest

from service.home import Home, user
from service.queue.quota import Quota
from service.record.tracking import Tracker
from tests.service.records import problem


@pytest.fixture
def recorded(home: Home, monkeypatch: pytest.MonkeyPatch) -> Home:
    """Two searches of ada, of 1.5 GPU-hours together, and one of bob."""
    for number, (name, hours) in enumerate([("ada", 1.0), ("ada", 0.5), ("bob", 7.0)]):
        monkeypatch.setenv("WATTUNE_USER", name)
        tracker = Tracker(home.tracking_uri, home)
        tracker.start_search(f"s{number}", problem(), {})
        tracker.update_search({"gpu_hours": hours / 2})
        tracker.update_search({"gpu_hours": hours})
    return home


def test_the_hours_of_all_searches_of_a_user_count(recorded: Home) -> None:
    ada = Quota("ada", 2.0, None, recorded.tracking_uri)
    assert (ada.used(), ada.exceeded()) == (1.5, None)
    assert Quota("nobody", 2.0, None, recorded.tracking_uri).used() == 0
    assert Quota("ada", 1.5, None, recorded.tracking_uri).exceeded() == (
        "quota: user ada has used 1.5 of 1.5 GPU-hours, all that this cluster's WATTUNE_POLICY allows"
    )
    assert "of 1 GPU-hours of 30 days" in (Quota("bob", 1.0, 30, recorded.tracking_uri).exceeded() or "")
    assert Quota("nobody", 0.0, None, recorded.tracking_uri).exceeded(), "who is to have none"


def test_what_is_longer_ago_than_the_period_does_not_count(recorded: Home) -> None:
    assert Quota("ada", 1.0, 1e-9, recorded.tracking_uri).used() == 0


def test_a_record_that_cannot_be_read_ends_no_search(home: Home) -> None:
    assert Quota("ada", 1.0, None, "sqlite:////nowhere/mlflow.db").exceeded() is None


def test_searches_are_those_of_who_submitted_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATTUNE_USER", raising=False)
    monkeypatch.setenv("LOGNAME", "grace")
    assert user() == "grace"
    monkeypatch.setenv("WATTUNE_USER", "ada")
    assert user() == "ada"
