"""The latest samples as Prometheus metrics, through Ray's own export."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from ray.util.metrics import Gauge

from telemetry.devices import DeviceInfo
from telemetry.samples import COUNTERS, SCHEMA

PREFIX = "wattune_"
"""Before each column's name; Ray puts `ray_` before that."""

COLUMNS = tuple(
    field.name
    for field in SCHEMA
    if field.name not in ("time_ns", "energy_ns", "index")
    and (pa.types.is_integer(field.type) or pa.types.is_floating(field.type))
)
"""The columns of `telemetry.samples.SCHEMA` that are exported: all that are measured."""

TAGS = ("node", "device", "index", "kind", "energy_method")


class MetricsExporter:
    """One metric a column and one series a device, shown by Ray's metrics endpoint of this node, in a Ray process.

    Every one is a gauge. Those of `telemetry.samples.COUNTERS` hold the running total, which PromQL's `rate` and
    `increase` take as they take a counter, resets included. Ray's counters would only know what was added since this
    process began, and stay in the endpoint with their last value when it has ended; its gauges leave it.
    """

    def __init__(self, node_id: str, infos: Sequence[DeviceInfo]) -> None:
        self._tags = {
            info.uuid: dict(
                zip(TAGS, (node_id, info.uuid, str(info.index), info.kind, info.energy_method), strict=True)
            )
            for info in infos
        }
        self._gauges = {column: Gauge(PREFIX + column, _describe(column), TAGS) for column in COLUMNS}
        self._shown: set[tuple[str, str]] = set()

    def publish(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Set each device's metrics to its row, by UUID; what a row does not have is no longer shown.

        Ray takes what was set last at its next report, every 10 s (`metrics_report_interval_ms`).
        """
        for device, tags in self._tags.items():
            row = rows.get(device, {})
            for column, gauge in self._gauges.items():
                value = row.get(column)
                if value is not None:
                    gauge.set(value, tags)
                    self._shown.add((device, column))
                elif (device, column) in self._shown:
                    gauge.set(math.nan, tags)  # Ray drops what is not a number, and would repeat the last value else
                    self._shown.discard((device, column))


def _describe(column: str) -> str:
    return f"{column} of telemetry/samples.py" + (", a running total: take its rate()" if column in COUNTERS else "")
