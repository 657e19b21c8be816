"""A search that goes on is told from one whose driver is dead, on its machine and on any other."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from service.client import Wattune
from service.home import Home
from service.record import heartbeat, store
from service.record.heartbeat import BEAT_S, SILENT_S, Heartbeat, silent
from service.record.results import Results
from service.record.tracking import Tracker
from tests.service.records import problem

HERE = Heartbeat.now()
ELSEWHERE = replace(HERE, host="another")


def aged(beat: Heartbeat, seconds: float) -> Heartbeat:
    return replace(beat, time=time.time() - seconds)


@pytest.mark.parametrize("driven", [None, True, False])
@pytest.mark.parametrize("beat", [None, HERE, ELSEWHERE])
@pytest.mark.parametrize("age_s", [0.0, SILENT_S + 5])
def test_a_lock_decides_where_it_can_be_seen_and_else_the_heartbeat(
    driven: bool | None, beat: Heartbeat | None, age_s: float
) -> None:
    dead = silent(beat and aged(beat, age_s), driven)
    if driven:
        assert not dead, "a lock is held by a process that lives"
    elif driven is False and beat is not ELSEWHERE:
        assert dead, "the kernel took it from one that died"
    elif beat is None:
        assert not dead, "nothing is known"
    else:
        assert dead == (age_s > SILENT_S)


def test_clocks_may_differ_by_a_minute_and_a_beat_be_lost() -> None:
    assert not silent(aged(ELSEWHERE, 60 + 2 * BEAT_S - 1), None)
    assert not silent(aged(ELSEWHERE, -60), None)


def going_on(home: Home) -> tuple[Tracker, str]:
    """A search under way, and the run that is its record."""
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("s1", problem(), {})
    return tracker, Results(home.tracking_uri).search("s1").run_id


def test_a_dead_driver_of_another_machine_is_told_by_its_silence(home: Home) -> None:
    _, run = going_on(home)
    client = MlflowClient(home.tracking_uri)
    for status in store.GOING_ON:
        client.set_tag(run, store.STATUS, status)
        for age_s, said in ((5.0, status), (SILENT_S + 5, "interrupted")):
            client.set_tag(run, store.HEARTBEAT, str(aged(ELSEWHERE, age_s)))
            assert Wattune().status("s1").status == said
            assert [info.status for info in Wattune().searches()] == [said]
    client.set_tag(run, store.STATUS, "finished")
    assert Wattune().status("s1").status == "finished"


def test_a_record_of_before_there_were_heartbeats_is_read_as_before(home: Home) -> None:
    _, run = going_on(home)
    client = MlflowClient(home.tracking_uri)
    client.delete_tag(run, store.HEARTBEAT)
    client.set_tag(run, store.STATUS, "running")
    assert Results(home.tracking_uri).search("s1").heartbeat is None
    assert Wattune().status("s1").status == "running"
    lock = home.spool("s1") / "driver.lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert Wattune().status("s1").status == "interrupted"


def test_the_heart_beats_beside_the_driver_and_outlasts_a_store_that_is_away(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    tracker, _ = going_on(home)
    first = Results(home.tracking_uri).search("s1").heartbeat
    assert first is not None
    assert (first.host, first.pid) == (socket.gethostname(), os.getpid())

    def beats_again(after: float) -> float:
        give_up = time.monotonic() + 60
        while (beat := Results(home.tracking_uri).search("s1").heartbeat) is None or beat.time <= after:
            assert time.monotonic() < give_up
        return beat.time

    with tracker.beating():
        beats_again(first.time)
        database = home.path / "mlflow.db"
        with database.open("r+b") as file:
            with contextlib.closing(sqlite3.connect(database, timeout=60)) as alone:
                alone.execute("BEGIN IMMEDIATE")  # or what is kept might have half a beat in it
                kept = file.read()
                file.seek(0)
                file.write(b"no database" + bytes(4096))
                file.flush()
            time.sleep(0.3)
            file.seek(0)
            file.write(kept)
        beats_again(time.time())
    assert capfd.readouterr() == ("", "")
