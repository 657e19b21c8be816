from __future__ import annotations

import logging
import os
import pickle
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.exceptions import RayActorError

from telemetry.actor import Fleet, Telemetry, Work, find_telemetry, start_telemetry, stop_telemetry
from telemetry.devices.cpu import CpuDevice, cpu_uuid
from telemetry.samples import SCHEMA
from telemetry.stream import subscribe
from telemetry.windows.trial import WindowSummary

Start = Callable[..., Telemetry]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `Telemetry` of this machine's CPU, in this process; stops it at the end."""
    started: list[Telemetry] = []

    def start(root: Path | None = None, kept_s: float = 600.0) -> Telemetry:
        started.append(Telemetry("n", "recording", root, [CpuDevice(os.getpid())], kept_s))
        return started[-1]

    yield start
    for telemetry in started:
        telemetry.stop()


@pytest.fixture
def actors(ray_session: Any, tmp_path: Path) -> Iterator[Fleet]:
    actors = start_telemetry("search-1", tmp_path)
    yield actors
    stop_telemetry(actors)


def now() -> int:
    return time.monotonic_ns()


def test_one_actor_a_node_answers_for_a_window_stamped_elsewhere(actors: Fleet) -> None:
    assert set(actors) == {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    (node_id, actor), *_ = actors.items()
    facts: Any = ray.get(actor.describe.remote(), timeout=60)
    assert facts["node_id"] == node_id
    devices = [device["uuid"] for device in facts["devices"]]
    assert devices
    assert all(device["energy_method"] in ("counter", "estimated") for device in facts["devices"])
    time.sleep(0.6)

    start_ns = now()  # on this process' clock: it is the node's
    time.sleep(1.0)
    end_ns = now()
    summary: WindowSummary = ray.get(actor.window.remote(start_ns, end_ns, devices), timeout=30)
    assert summary.problems == ()
    assert summary.energy_j is not None
    assert summary.energy_j > 0
    assert summary.duration_s == pytest.approx((end_ns - start_ns) / 1e9)
    assert summary.energy_method == facts["devices"][0]["energy_method"]

    samples = ray.get(actor.samples.remote(start_ns, end_ns, devices), timeout=30)
    assert samples.num_rows == summary.sample_count
    assert len(devices) <= samples.num_rows <= 11 * len(devices)
    assert set(samples["node"].to_pylist()) == {node_id}
    assert ray.get(actor.samples.remote(start_ns, end_ns, ["GPU-elsewhere"]), timeout=30).num_rows == 0

    before_birth = ray.get(actor.window.remote(start_ns - 10**12, end_ns, devices), timeout=30)
    assert before_birth.energy_j is None
    assert before_birth.problems


def test_looking_for_nodes_that_joined_leaves_nothing_behind(actors: Fleet, tmp_path: Path) -> None:
    """Ray makes a subclass of an actor's class each time that it is asked to, and never lets go of it."""
    made, covered = len(Telemetry.__subclasses__()), dict(actors)
    actors.cover(tmp_path)
    assert (len(Telemetry.__subclasses__()), dict(actors)) == (made, covered)


def test_a_fleet_finds_elsewhere_what_it_does_not_hold(actors: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    (node_id, actor), *_ = actors.items()
    sent = pickle.loads(ray.cloudpickle.dumps(Fleet(actors.name)))
    assert list(sent) == []
    assert sent.awaited(node_id) == sent[node_id] == actor
    monkeypatch.setattr("telemetry.actor.JOINED_S", 0.5)
    with pytest.raises(RayActorError, match="node n has no telemetry"):
        sent.awaited("n")


def test_an_actor_that_is_killed_answers_again_for_what_was_before_and_subscribers_are_told(
    actors: Fleet, tmp_path: Path
) -> None:
    (node_id, actor), *_ = actors.items()
    assert find_telemetry()["search-1", node_id] == actor
    facts: Any = ray.get(actor.describe.remote(), timeout=60)
    devices = [device["uuid"] for device in facts["devices"]]
    stream = subscribe(actors, {node_id: 0}, period_s=0.5)
    received = [next(stream)]
    start_ns = now()
    while received[-1].cursor_ns < start_ns + 3 * 10**9:
        received.append(next(stream))
    os.kill(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
    killed_ns = now()

    end_ns = killed_ns - 2 * 10**9  # what may be lost is of the last two seconds
    summary: WindowSummary = ray.get(actor.window.remote(start_ns, end_ns, devices), timeout=60)
    assert summary.problems == ()
    assert summary.energy_j
    table = ray.get(actor.samples.remote(start_ns, killed_ns, devices))
    assert killed_ns - table["time_ns"][-1].as_py() < 2 * 10**9

    while received[-1].cursor_ns < killed_ns:
        received.append(next(stream))
    times = [time_ns for delivery in received for time_ns in delivery.batch["time_ns"].to_pylist()]
    assert times == sorted(set(times))
    (missing_ns,) = [delivery.missing_ns for delivery in received if delivery.missing_ns]
    assert missing_ns[0] < killed_ns < missing_ns[1]
    # Whoever comes later gets all that is on disk, and is told of the same hole, or of a longer one.
    replayed = []
    for delivery in subscribe(actors, {node_id: 0}):
        replayed.append(delivery)
        if delivery.cursor_ns >= received[-1].cursor_ns:
            break
    assert {time_ns for delivery in replayed for time_ns in delivery.batch["time_ns"].to_pylist()} >= {
        time_ns for time_ns in times if not missing_ns[0] - 2 * 10**9 < time_ns < missing_ns[1]
    }
    (missing_later_ns,) = [delivery.missing_ns for delivery in replayed if delivery.missing_ns]
    assert missing_later_ns[0] <= missing_ns[0] < missing_ns[1] == missing_later_ns[1]


def test_what_memory_has_dropped_is_answered_from_disk(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.actor.SPOOL_PERIOD_S", 0.2)
    began_ns = now()
    telemetry = start(tmp_path, kept_s=0.5)
    times: list[int] = []
    while len(times) < 12:
        time.sleep(0.2)
        times = telemetry.samples(began_ns, now(), [cpu_uuid()])["time_ns"].to_pylist()
    assert times[0] - began_ns < 10**9
    assert telemetry._buffer.after(0)[0].first_ns > times[0]  # the first are on disk alone
    cursor_ns, pulled = times[0] - 1, []
    while cursor_ns < times[-1]:
        piece = telemetry.pull(cursor_ns)
        assert piece.missing_ns is None or cursor_ns < times[0]
        pulled += [pa.ipc.read_record_batch(message, SCHEMA) for message in piece.messages]
        cursor_ns = piece.cursor_ns
    assert len(pulled) >= 3
    assert [time_ns for batch in pulled for time_ns in batch["time_ns"].to_pylist()][: len(times)] == times
    shutil.rmtree(tmp_path)
    assert telemetry.pull(cursor_ns).missing_ns is None  # all later ones are in memory


@pytest.mark.parametrize("trouble", ["no folder can be made", "the disk is full"])
def test_a_disk_that_fails_ends_spooling_with_one_line_and_gaps_are_told(
    trouble: str, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.actor.SPOOL_PERIOD_S", 0.2)
    root, limits = tmp_path, resource.getrlimit(resource.RLIMIT_FSIZE)
    if trouble == "the disk is full":  # as the kernel tells it: a write that takes half, then an error
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, limits[1]))
    else:
        root = tmp_path / "file"
        root.write_text("")
    try:
        with caplog.at_level(logging.ERROR):
            telemetry = start(root, kept_s=1)
            lines: list[str] = []
            give_up = time.monotonic() + 60
            while not lines and time.monotonic() < give_up:
                time.sleep(0.5)
                lines = [record.getMessage() for record in caplog.records if record.name == "telemetry.actor"]
            time.sleep(1.5)  # what follows is nowhere once memory has dropped it
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "telemetry.actor"]
    assert "is no longer written to" in line
    end_ns = now()
    assert telemetry.samples(end_ns - 8 * 10**8, end_ns, [cpu_uuid()]).num_rows
    pieces = [telemetry.pull(1)]
    while pieces[-1].more:
        pieces.append(telemetry.pull(pieces[-1].cursor_ns))
    gap = pieces[-1].missing_ns
    assert gap is not None
    assert gap[1] - end_ns < 2 * 10**9


def test_work_is_shown_while_it_is_told_of(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = start()
    monkeypatch.setattr("telemetry.actor.WORK_S", 0.5)
    works = [Work(cpu_uuid(), trial, "tp2", "window", 1000.0) for trial in ("a", "b")]
    for work in works:
        telemetry.working(work)
    assert telemetry.state().works == tuple(works)
    time.sleep(0.6)
    telemetry.working(works[0])
    assert telemetry.state().works == (works[0],)
    state = telemetry.state()
    assert [info.uuid for info in state.devices] == [cpu_uuid()]
    assert state.latest[cpu_uuid()]["energy_mj"] > 0


def test_a_subscriber_that_is_slow_misses_nothing(actors: Fleet) -> None:
    ((node_id, actor),) = actors.items()
    ray.get(actor.describe.remote(), timeout=60)
    times: list[int] = []
    for delivery in subscribe(actors, period_s=0.2):
        assert delivery.node_id == node_id
        assert delivery.missing_ns is None
        times += delivery.batch["time_ns"].to_pylist()
        if len(times) > 15:
            break
        time.sleep(0.5)
    devices = ray.get(actor.describe.remote())["devices"]
    held = ray.get(actor.samples.remote(times[0], times[-1], [device["uuid"] for device in devices]))
    assert times == held["time_ns"].to_pylist()
