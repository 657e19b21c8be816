"""A recorded trace played back as the devices that it was recorded from."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.devices.base import DeviceInfo
from telemetry.store import read_samples

logger = logging.getLogger(__name__)

TRACE = "WATTUNE_REPLAY"
"""The environment variable that names a trace, as `telemetry.store` writes it, to be played in place of devices."""

LOOP = "WATTUNE_REPLAY_LOOP"
"""The environment variable that, set to 1, has the trace start again whenever it ends."""

_OF_THE_SAMPLER = ("time_ns", "node", "device", "index", "kind", "energy_method")
_CHUNK_ROWS = 256


class TraceEnded(RuntimeError):
    """Playback is past the end of a trace that is not looped."""


class ReplayDevice:
    """One recorded device. A reading is the row recorded at or last before the same time of the trace.

    Rows keep what they hold: nulls, counters, the faults of the day. A row older than two periods is not repeated:
    where the trace has a gap, nothing is read. Past the trace's end `read` raises TraceEnded; a looped trace starts
    again instead, its counters carried on at their mean rate, so that it has no seam.

    `rows` are the device's, by `telemetry.samples.SCHEMA`; `span_ns` the first and last time of the trace, where other
    devices' rows may be earlier or later. Playback begins now by `clock`, which counts ns. Raises ValueError if a
    looped trace has a counter that decreases: its next lap would go on from a number that never was.
    """

    def __init__(
        self,
        rows: pa.Table,
        loop: bool = False,
        span_ns: tuple[int, int] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
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
        self._since_ns = time_ns - begin_ns
        self._held_ns = 2 * period_ns
        self._lap_ns = end_ns - begin_ns + period_ns
        self._rows = rows.select(
            [name for name in rows.column_names if name not in _OF_THE_SAMPLER and rows[name].null_count < len(rows)]
        )
        self._growth = _growth_per_lap(time_ns, self._rows, self._lap_ns, self.info.uuid) if loop else None
        self._chunk: tuple[int, list[dict[str, Any]]] = (-1, [])
        self._clock = clock
        self._began_ns = clock()

    def read(self, full: bool) -> dict[str, Any]:
        elapsed_ns = self._clock() - self._began_ns
        lap = 0
        if self._growth is not None:
            lap, elapsed_ns = divmod(elapsed_ns, self._lap_ns)
        elif elapsed_ns >= self._lap_ns:
            raise TraceEnded(f"the trace of {self.info.uuid} ended {self._lap_ns / 1e9:.1f} s after playback began")
        number = int(np.searchsorted(self._since_ns, elapsed_ns, side="right")) - 1
        if number < 0 or elapsed_ns - self._since_ns[number] > self._held_ns:
            return {}
        row = self._row(number)
        if lap and self._growth is not None:
            return row | {
                name: value + lap * growth for name, growth in self._growth.items() if (value := row[name]) is not None
            }
        return row

    def _row(self, number: int) -> dict[str, Any]:
        """A new dict of a row's values; rows are decoded some hundreds at a time."""
        chunk, place = divmod(number, _CHUNK_ROWS)
        if chunk != self._chunk[0]:
            self._chunk = (chunk, self._rows.slice(chunk * _CHUNK_ROWS, _CHUNK_ROWS).to_pylist())
        return dict(self._chunk[1][place])


def _growth_per_lap(time_ns: np.ndarray, rows: pa.Table, lap_ns: int, device: str) -> dict[str, int]:
    """What each counter grows by in a lap at its mean rate over the trace."""
    if lap_ns <= 0:
        raise ValueError(f"the trace of {device} has a single row and cannot be looped")
    growth = {}
    for name in rows.column_names:
        if rows.schema.field(name).type != pa.uint64() or name == "throttle_reasons":
            continue
        known = rows[name].is_valid().to_numpy(zero_copy_only=False)
        values, times = rows[name].drop_null().to_numpy(), time_ns[known]
        if np.any(values[1:] < values[:-1]):
            raise ValueError(f"the trace of {device} cannot be looped: {name} decreases in it")
        grown, spanned_ns = int(values[-1]) - int(values[0]), int(times[-1] - times[0])
        growth[name] = grown * lap_ns // spanned_ns if spanned_ns else 0
    return growth


def load(path: Path, loop: bool = False, clock: Callable[[], int] = time.monotonic_ns) -> list[ReplayDevice]:
    """Every device of a trace, by its first appearance. Those of one recorded node start and end together.

    Raises OSError if there is no such file, ValueError if it holds no samples or cannot be looped.
    """
    table = read_samples(path)
    if not table.num_rows:
        raise ValueError(f"{path} holds no sample to play")
    devices = []
    for node in pc.unique(table["node"]).to_pylist():
        rows = table.filter(pc.field("node") == node)
        span_ns = (pc.min(rows["time_ns"]).as_py(), pc.max(rows["time_ns"]).as_py())
        devices += [
            ReplayDevice(rows.filter(pc.field("device") == device), loop, span_ns, clock)
            for device in pc.unique(rows["device"]).to_pylist()
        ]
    return devices


def discover() -> list[ReplayDevice]:
    """The devices of the trace that the environment names; none if it names none. Raises as `load`."""
    trace = os.environ.get(TRACE)
    if not trace:
        return []
    logger.warning("telemetry is played back from %s: nothing here is measured", trace)
    return load(Path(trace), loop=os.environ.get(LOOP) == "1")
