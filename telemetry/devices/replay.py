"""A recorded trace played back as the devices that it was recorded from."""

from __future__ import annotations

import logging
import os
import socket
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.devices import DeviceInfo, Precedence, Vendor
from telemetry.samples import COUNTERS, MEANS
from telemetry.store import read_samples

logger = logging.getLogger(__name__)

TRACE = "WATTUNE_REPLAY"
"""The environment variable that names a trace, as `telemetry.store` writes it, to be played in place of devices."""

LOOP = "WATTUNE_REPLAY_LOOP"
"""The environment variable that, set to 1, has the trace start again whenever it ends."""

# What a replay has of its own, or not at all: when its counter was new is of another time.
_NOT_PLAYED = ("time_ns", "node", "device", "index", "kind", "energy_method", "energy_ns")

# A column's name and values, and where a row has one; without the last it has one in every row.
_Column = tuple[str, memoryview, memoryview | None]


class TraceEnded(RuntimeError):
    """Playback is past the end of a trace that is not looped."""


class Track:
    """The rows of one recorded device, which any number of `ReplayDevice` may play.

    `rows` are by `telemetry.samples.SCHEMA`; `span_ns` is the first and last time of the trace, where other devices'
    rows may be earlier or later. Raises ValueError if the track is to be looped and has a counter that decreases: its
    next lap would go on from a number that never was.
    """

    def __init__(self, rows: pa.Table, loop: bool = False, span_ns: tuple[int, int] | None = None) -> None:
        rows = rows.sort_by("time_ns")
        first = rows.slice(0, 1).to_pylist()[0]
        self.info = DeviceInfo(
            uuid=first["device"],
            index=first["index"] or 0,
            name=f"{first['device']} (replayed)",
            kind=first["kind"],
            energy_method=first["energy_method"],
        )
        time_ns = rows["time_ns"].to_numpy()
        begin_ns, end_ns = span_ns or (int(time_ns[0]), int(time_ns[-1]))
        period_ns = int(np.median(np.diff(time_ns))) if len(time_ns) > 1 else 0
        self.held_ns = 2 * period_ns
        self.lap_ns = end_ns - begin_ns + period_ns
        self.count = len(time_ns)
        self._since_ns: Sequence[int] = (time_ns - begin_ns).data
        names = [name for name in rows.column_names if name not in _NOT_PLAYED and rows[name].null_count < self.count]
        self.columns = [_column(rows, name) for name in names]
        self.states = [column for column in self.columns if column[0] not in (*COUNTERS, *MEANS)]
        counters = [name for name in names if name in COUNTERS]
        self.growth = _growth_per_lap(time_ns, rows.select(counters), self.lap_ns, self.info.uuid) if loop else None

    def latest(self, elapsed_ns: int) -> int:
        """The number of the last row that has passed, counted on over laps; -1 if none has."""
        lap = 0
        if self.growth is not None:
            lap, elapsed_ns = divmod(elapsed_ns, self.lap_ns)
        return lap * self.count + bisect_right(self._since_ns, elapsed_ns) - 1

    def passed_ns(self, number: int) -> int:
        """When a row passes, from the start of playback."""
        lap, place = divmod(number, self.count)
        return lap * self.lap_ns + self._since_ns[place]

    def row(self, number: int, columns: list[_Column]) -> dict[str, Any]:
        """A row's values, the counters carried on from lap to lap."""
        lap, place = divmod(number, self.count)
        row: dict[str, Any] = {
            name: values[place] if known is None or known[place] else None for name, values, known in columns
        }
        if lap and self.growth is not None:
            for name, growth in self.growth.items():
                if row.get(name) is not None:
                    row[name] += lap * growth
        return row


class ReplayDevice:
    """One recorded device, whether or not it is read in full. A reading is what passed since the one before.

    Of several rows it has the latest value of each column, so that what was recorded now and then is not missed. When
    no row has passed, states are as they were and counters and means are null: each of their values is given once.
    Nulls, counters and the faults of the day are as recorded. Rows older than two periods are not given: where the
    trace has a gap, nothing is read. Past the trace's end `read` raises TraceEnded; a looped trace starts again
    instead, its counters carried on at their mean rate, so that it has no seam.

    It goes by the track's name or another `uuid`. Playback begins now by `clock`, which counts ns.
    """

    def __init__(self, track: Track, uuid: str | None = None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.info = track.info if uuid is None else replace(track.info, uuid=uuid)
        self._track = track
        self._clock = clock
        self._began_ns = clock()
        self._given = -1

    def read(self, full: bool) -> dict[str, Any]:
        track = self._track
        elapsed_ns = self._clock() - self._began_ns
        if track.growth is None and elapsed_ns >= track.lap_ns:
            raise TraceEnded(f"the trace of {self.info.uuid} ended {track.lap_ns / 1e9:.1f} s after playback began")
        number, given = track.latest(elapsed_ns), self._given
        self._given = number
        if number < 0 or elapsed_ns - track.passed_ns(number) > track.held_ns:
            return {}
        if number == given:
            return track.row(number, track.states)
        reading = track.row(number, track.columns)
        while (number := number - 1) > given and elapsed_ns - track.passed_ns(number) <= track.held_ns:
            missing = [column for column in track.columns if reading[column[0]] is None]
            reading |= track.row(number, missing)
        return reading


def _column(rows: pa.Table, name: str) -> _Column:
    values = rows[name].combine_chunks()
    known = values.is_valid().to_numpy(zero_copy_only=False).data if values.null_count else None
    return name, values.fill_null(0).to_numpy(zero_copy_only=False).data, known


def _growth_per_lap(time_ns: np.ndarray, rows: pa.Table, lap_ns: int, device: str) -> dict[str, int]:
    """What each counter grows by in a lap at its mean rate over the trace."""
    if lap_ns <= 0:
        raise ValueError(f"the trace of {device} has a single row and cannot be looped")
    growth = {}
    for name in rows.column_names:
        known = rows[name].is_valid().to_numpy(zero_copy_only=False)
        values, times = rows[name].drop_null().to_numpy(), time_ns[known]
        if np.any(values[1:] < values[:-1]):
            raise ValueError(f"the trace of {device} cannot be looped: {name} decreases in it")
        grown, spanned_ns = int(values[-1]) - int(values[0]), int(times[-1] - times[0])
        growth[name] = grown * lap_ns // spanned_ns if spanned_ns else 0
    return growth


def load_tracks(path: Path, loop: bool = False) -> list[Track]:
    """Every device of a trace, by its first appearance. Those of one recorded node start and end together.

    Raises OSError if there is no such file, ValueError if it holds no samples or cannot be looped.
    """
    table = read_samples(path)
    if not table.num_rows:
        raise ValueError(f"{path} holds no sample to play")
    tracks = []
    for node in pc.unique(table["node"]).to_pylist():
        rows = table.filter(pc.field("node") == node)
        span_ns = (pc.min(rows["time_ns"]).as_py(), pc.max(rows["time_ns"]).as_py())
        tracks += [
            Track(rows.filter(pc.field("device") == device), loop, span_ns)
            for device in pc.unique(rows["device"]).to_pylist()
        ]
    return tracks


def discover(process_root: int) -> list[ReplayDevice]:
    """The devices of the trace that the environment names; none if it names none. Raises as `load_tracks`.

    This machine's name is added to theirs: a trace may be played on several, and is not mistaken for what is there.
    """
    trace = os.environ.get(TRACE)
    if not trace:
        return []
    logger.warning("telemetry is played back from %s: nothing here is measured", trace)
    here = socket.gethostname()
    tracks = load_tracks(Path(trace), loop=os.environ.get(LOOP) == "1")
    return [ReplayDevice(track, f"{track.info.uuid}@{here}") for track in tracks]


VENDOR = Vendor(kind="replay", discover=discover, precedence=Precedence.RECORDED)
"""Its devices are of the kinds that were recorded."""
