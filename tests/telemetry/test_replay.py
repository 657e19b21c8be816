from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from telemetry import devices
from telemetry.devices import replay
from telemetry.devices.replay import ReplayDevice, TraceEnded, Track, load_tracks
from telemetry.sampler import Sampler
from telemetry.samples import SCHEMA, SampleBuffer
from telemetry.store import write_samples
from telemetry.windows.trial import summarise

SECOND = 1_000_000_000
TENTH = SECOND // 10
RECORDED = 77_000_000 * SECOND  # when the trace was made, by its node's clock


class Clock:
    """Nanoseconds that pass when told to."""

    def __init__(self) -> None:
        self.now_ns = 5 * SECOND

    def __call__(self) -> int:
        return self.now_ns


def rows(count: int = 20, device: str = "GPU-a", late_ns: int = 0, **columns: Any) -> list[dict[str, Any]]:
    """A reading each tenth of a second at 500 W."""
    return [
        {
            "time_ns": RECORDED + late_ns + number * TENTH,
            "node": "n",
            "device": device,
            "index": 3,
            "kind": "nvidia",
            "energy_method": "counter",
            "energy_mj": 7_000_000_000 + 50_000 * number,
            "power_w": 500.0 + number,
            "gpu_temp_c": None if number == 2 else 60.0,
            "throttle_reasons": 2**40,
        }
        | columns
        for number in range(count)
    ]


def trace(tmp_path: Path, *recorded: list[dict[str, Any]]) -> Path:
    path = tmp_path / "trace.parquet"
    table = pa.Table.from_pylist([row for rows in recorded for row in rows], schema=SCHEMA)
    write_samples(table.sort_by("time_ns"), path)
    return path


def device_of(recorded: list[dict[str, Any]], clock: Clock, loop: bool = False) -> ReplayDevice:
    return ReplayDevice(Track(pa.Table.from_pylist(recorded, schema=SCHEMA), loop), clock=clock)


def test_each_recorded_device_plays_what_it_was(tmp_path: Path) -> None:
    clock = Clock()
    path = trace(tmp_path, rows(), rows(device="GPU-b", late_ns=4_000_000, energy_method="estimated", index=None))
    first, second = (ReplayDevice(track, clock=clock) for track in load_tracks(path))
    assert (first.info.uuid, first.info.index, first.info.kind) == ("GPU-a", 3, "nvidia")
    assert (first.info.energy_method, second.info.energy_method) == ("counter", "estimated")
    assert (second.info.uuid, second.info.index) == ("GPU-b", 0)
    assert second.read(full=False) == {}  # its first row is 4 ms after the trace's first
    clock.now_ns += 4_000_000
    assert second.read(full=False)["power_w"] == 500.0
    assert first.read(full=False) == {
        "energy_mj": 7_000_000_000,
        "power_w": 500.0,
        "gpu_temp_c": 60.0,
        "throttle_reasons": 2**40,
    }


def test_a_reading_is_the_row_of_its_time_nulls_included() -> None:
    clock = Clock()
    device = device_of(rows(600), clock)
    for elapsed_ns, number in [(0, 0), (TENTH, 1), (TENTH * 2, 2), (TENTH * 3 + 5, 3), (59 * SECOND, 590)]:
        clock.now_ns = 5 * SECOND + elapsed_ns
        reading = device.read(full=False)
        assert (reading["power_w"], reading["energy_mj"]) == (500.0 + number, 7_000_000_000 + 50_000 * number)
        assert reading["gpu_temp_c"] == (None if number == 2 else 60.0)


def test_a_row_read_again_has_its_states_but_no_counter_twice() -> None:
    clock = Clock()
    device = device_of(rows(20, tensor_activity=0.5), clock)
    first = device.read(full=False)
    assert (first["energy_mj"], first["tensor_activity"]) == (7_000_000_000, 0.5)
    clock.now_ns += TENTH - 1
    assert device.read(full=False) == {"power_w": 500.0, "gpu_temp_c": 60.0, "throttle_reasons": 2**40}
    clock.now_ns += 1
    assert device.read(full=False)["energy_mj"] == 7_000_050_000


def test_of_several_rows_each_column_has_its_latest_value() -> None:
    """Counters in every fourth row, read each 0.15 s: every value comes, once, and at most two periods late."""
    recorded = rows(60)
    for number, row in enumerate(recorded):
        row["energy_mj"] = row["energy_mj"] if number % 4 == 0 else None
    clock = Clock()
    device = device_of(recorded, clock)
    seen = []
    for _ in range(39):
        reading = device.read(full=False)
        elapsed_ns = clock.now_ns - 5 * SECOND
        assert reading["power_w"] == 500.0 + elapsed_ns // TENTH
        assert reading["throttle_reasons"] == 2**40
        if (energy_mj := reading.get("energy_mj")) is not None:
            seen.append((energy_mj - 7_000_000_000) // 50_000)
            assert seen[-1] * TENTH <= elapsed_ns < (seen[-1] + 2) * TENTH
        clock.now_ns += 3 * TENTH // 2
    assert seen == list(range(0, 58, 4))


def test_a_value_is_not_given_long_after_it_passed() -> None:
    """As a poll that comes late would not have read what a device said before."""
    recorded = rows(60)
    for number, row in enumerate(recorded):
        row["energy_mj"] = row["energy_mj"] if number == 10 else None
    clock = Clock()
    device = device_of(recorded, clock)
    clock.now_ns += SECOND + 3 * TENTH
    assert device.read(full=False)["energy_mj"] is None
    clock = Clock()
    device = device_of(recorded, clock)
    clock.now_ns += SECOND + 2 * TENTH
    assert device.read(full=False)["energy_mj"] == 7_000_500_000


def test_a_gap_of_the_trace_stays_one() -> None:
    clock = Clock()
    device = device_of([row for row in rows(60) if not 20 < (row["time_ns"] - RECORDED) // TENTH < 50], clock)
    clock.now_ns += 2 * SECOND + TENTH  # a poll late
    assert device.read(full=False)["power_w"] == 520.0
    clock.now_ns += SECOND
    assert device.read(full=False) == {}
    clock.now_ns += 2 * SECOND
    assert device.read(full=False)["power_w"] == 551.0


def test_past_its_end_a_trace_says_so() -> None:
    clock = Clock()
    device = device_of(rows(20), clock)
    clock.now_ns += 2 * SECOND - 1
    assert device.read(full=False)["power_w"] == 519.0
    clock.now_ns += 1
    with pytest.raises(TraceEnded, match=r"trace of GPU-a ended 2\.0 s after playback began"):
        device.read(full=False)


def test_a_loop_has_no_seam() -> None:
    clock = Clock()
    device = device_of(rows(20), clock, loop=True)
    samples = []
    for number in range(100):
        clock.now_ns = 5 * SECOND + number * TENTH
        reading = device.read(full=False)
        assert reading["energy_mj"] == 7_000_000_000 + 50_000 * number
        assert (reading["power_w"], reading["throttle_reasons"]) == (500.0 + number % 20, 2**40)
        common = {"time_ns": clock.now_ns, "node": "n", "device": "GPU-a", "energy_method": "counter"}
        samples.append(common | reading | {"power_w": 500.0})
    played = pa.Table.from_pylist(samples, schema=SCHEMA)
    summary = summarise(played, 6 * SECOND, 14 * SECOND, ["GPU-a"])
    assert summary.energy_j == pytest.approx(4000)
    assert (summary.energy_ratio, summary.problems) == (pytest.approx(1), ())


def test_looped_devices_of_a_node_stay_together(tmp_path: Path) -> None:
    clock = Clock()
    path = trace(tmp_path, rows(20), rows(15, device="GPU-b"))
    first, second = (ReplayDevice(track, clock=clock) for track in load_tracks(path, loop=True))
    clock.now_ns += 10 * 2 * SECOND + TENTH
    assert first.read(full=False)["power_w"] == second.read(full=False)["power_w"] == 501.0
    clock.now_ns += 18 * TENTH  # where the trace has nothing of the second
    assert (first.read(full=False)["power_w"], second.read(full=False)) == (519.0, {})


def test_counters_that_are_not_known_throughout_are_carried_on_all_the_same() -> None:
    recorded = rows(20, throttle_power_cap_ns=None)
    recorded[0]["energy_mj"] = recorded[19]["energy_mj"] = None
    clock = Clock()
    device = device_of(recorded, clock, loop=True)
    clock.now_ns += 2 * SECOND - TENTH
    device.read(full=False)
    clock.now_ns += TENTH
    assert device.read(full=False)["energy_mj"] is None
    clock.now_ns += TENTH
    assert device.read(full=False)["energy_mj"] == 7_000_000_000 + 50_000 * 21


def test_rows_of_two_laps_are_carried_on_each_by_its_own() -> None:
    """A read that spans the seam finds the counter in the lap before."""
    recorded = rows(20)
    recorded[0]["energy_mj"] = None
    clock = Clock()
    device = device_of(recorded, clock, loop=True)
    clock.now_ns += 4 * SECOND
    reading = device.read(full=False)
    assert (reading["power_w"], reading["energy_mj"]) == (500.0, 7_000_000_000 + 50_000 * 39)


def test_only_counters_are_carried_on() -> None:
    """Of the other whole numbers none grows: the latest XID's is a name, the reasons are bits."""
    clock = Clock()
    device = device_of([row | {"xid": 13 + number // 10} for number, row in enumerate(rows(20))], clock, loop=True)
    clock.now_ns += 4 * SECOND
    assert (device.read(full=False)["xid"], device.read(full=False)["throttle_reasons"]) == (13, 2**40)


def test_many_devices_play_one_track() -> None:
    clock = Clock()
    track = Track(pa.Table.from_pylist(rows(20), schema=SCHEMA))
    one, two = ReplayDevice(track, "GPU-1", clock), ReplayDevice(track, "GPU-2", clock)
    assert (one.info.uuid, two.info.uuid, two.info.name) == ("GPU-1", "GPU-2", "GPU-a (replayed)")
    assert one.read(full=False) == two.read(full=False) != {}


def test_a_trace_that_cannot_be_looped_is_refused_and_plays_once() -> None:
    recorded = rows(20)
    recorded[12]["energy_mj"] = 5
    with pytest.raises(ValueError, match="GPU-a cannot be looped: energy_mj decreases"):
        device_of(recorded, Clock(), loop=True)
    clock = Clock()
    device = device_of(recorded, clock)
    clock.now_ns += 12 * TENTH
    assert device.read(full=False)["energy_mj"] == 5
    with pytest.raises(ValueError, match="GPU-a has a single row"):
        device_of(rows(1), Clock(), loop=True)


def test_a_trace_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no sample to play"):
        load_tracks(trace(tmp_path))
    with pytest.raises(FileNotFoundError):
        load_tracks(tmp_path / "missing.parquet")


def test_the_environment_puts_a_trace_in_place_of_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trace(tmp_path, rows(5))
    monkeypatch.delenv(replay.TRACE, raising=False)
    assert not any(isinstance(device, ReplayDevice) for device in devices.discover())
    monkeypatch.setenv(replay.TRACE, str(path))
    (once,) = devices.discover()
    monkeypatch.setenv(replay.LOOP, "1")
    (looped,) = devices.discover()
    assert looped.info.uuid == f"GPU-a@{socket.gethostname()}"
    time.sleep(0.55)
    with pytest.raises(TraceEnded):
        once.read(full=False)
    assert looped.read(full=False)["energy_mj"] >= 7_000_000_000 + 50_000 * 5


def test_a_played_trace_is_sampled_like_a_device(tmp_path: Path) -> None:
    """Under the sampler's own clock; after the end samples are null."""
    (device,) = map(ReplayDevice, load_tracks(trace(tmp_path, rows(5))))
    buffer = SampleBuffer(1000)
    sampler = Sampler([device], buffer, "here", period_s=0.05)
    sampler.start()
    time.sleep(0.9)
    sampler.stop()
    played = buffer.between(0, 2**62)
    assert set(played["device"].to_pylist()) == {"GPU-a"}
    energy = played["energy_mj"].to_pylist()
    known = [value for value in energy if value is not None]
    assert known == sorted(known)
    assert known
    assert set(known) <= {7_000_000_000 + 50_000 * number for number in range(5)}
    assert energy[-1] is None
