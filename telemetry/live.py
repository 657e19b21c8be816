"""What the devices of a node are at now, from its latest samples."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from telemetry.devices import throttle_bits
from telemetry.sampler import FULL_PERIOD_S
from telemetry.samples import COUNTERS, MEANS, THROTTLE_CAUSES

HISTORY_NS = round((FULL_PERIOD_S + 2) * 1e9)
"""How far back samples have to reach: the last two readings of any counter, or nearly."""

NOW_NS = 2_000_000_000
"""The time that counts as now, where a counter is read so often."""

MIN_SHARE = 0.01
"""A cause that held the clock down for less of the time is not worth a word."""


def latest(table: pa.Table) -> dict[str, dict[str, Any]]:
    """The last sample of each device, with the counters and means that it lacks as they were last read.

    `table` has the samples of the last `HISTORY_NS`.
    """
    values = {}
    for device in pc.unique(table["device"]).to_pylist():
        rows = table.filter(pc.field("device") == device)
        row = rows.slice(rows.num_rows - 1).to_pylist()[0]
        for column in (*COUNTERS, *MEANS):
            known = rows[column].drop_null()
            if row[column] is None and len(known):
                row[column] = known[-1].as_py()
        values[device] = row
    return values


def throttled_by(table: pa.Table) -> dict[str, tuple[str, ...]]:
    """What holds each device's clock down now: the causes whose counters grow, or the driver's bits if it has none."""
    causes = {}
    for device in pc.unique(table["device"]).to_pylist():
        rows = table.filter(pc.field("device") == device)
        grows = {cause: _grows(rows, f"throttle_{cause}_ns") for cause in THROTTLE_CAUSES}
        if all(growing is None for growing in grows.values()):
            causes[device] = _by_reasons(rows)
        else:
            causes[device] = tuple(cause for cause, growing in grows.items() if growing)
    return causes


def _grows(rows: pa.Table, column: str) -> bool | None:
    """Whether a counter grew from the last reading but `NOW_NS`, or from the one before the last; None without two."""
    known = rows.select(["time_ns", column]).drop_null()
    times, values = known["time_ns"].to_pylist(), known[column].to_pylist()
    if len(times) < 2:
        return None
    since = max((i for i, time_ns in enumerate(times[:-1]) if time_ns <= times[-1] - NOW_NS), default=0)
    return bool(values[-1] - values[since] > MIN_SHARE * (times[-1] - times[since]))


def _by_reasons(rows: pa.Table) -> tuple[str, ...]:
    last = rows.slice(rows.num_rows - 1).to_pylist()[0]
    reasons = last["throttle_reasons"] or 0
    return tuple(cause for cause, mask in throttle_bits(last["kind"]).items() if reasons & mask)
