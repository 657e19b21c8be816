"""Samples on disk, and thinned for a chart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from telemetry.samples import GAUGES, MEANS, SCHEMA

LATER = ("energy_ns",)
"""Columns that files written by earlier versions lack."""


def write_samples(table: pa.Table, path: Path) -> None:
    """Write samples as Parquet (zstd). The file appears whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    pq.write_table(table.cast(SCHEMA), partial, compression="zstd")
    os.replace(partial, path)


def read_samples(path: Path | BinaryIO) -> pa.Table:
    """The samples that `write_samples` wrote, in a file or in memory. Raises ValueError if that holds something else.

    A column that came into the schema after the file was written is null.
    """
    try:
        table = pq.read_table(path)
        for place, field in enumerate(SCHEMA):
            if field.name in LATER and field.name not in table.column_names:
                table = table.add_column(place, field, pa.nulls(table.num_rows, field.type))
        return table.cast(SCHEMA)
    except (pa.ArrowInvalid, ValueError) as error:
        raise ValueError(f"{path} does not hold telemetry samples: {str(error).splitlines()[0]}") from error


def thin(table: pa.Table, points: int = 60) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """At most `points` (time_ns, value) pairs of every gauge and activity that has values, by device and column.

    The time that a device's samples span is cut into `points` equal parts; a point is the mean of a part's values at
    the mean of their times.
    """
    return {
        device: _thin_device(table.filter(pc.field("device") == device), points)
        for device in pc.unique(table["device"]).to_pylist()
    }


def _thin_device(rows: pa.Table, points: int) -> dict[str, list[tuple[int, float]]]:
    time_ns = rows["time_ns"].to_numpy()
    since = time_ns - time_ns.min()
    part = np.minimum(since * points // max(int(since.max()), 1), points - 1)
    series = {}
    for column in (*GAUGES, *MEANS):
        known = rows[column].is_valid().to_numpy()
        if known.any():
            values = rows[column].drop_null().to_numpy()
            series[column] = [
                (int(time_ns.min() + since[known][chosen].mean()), float(values[chosen].mean()))
                for chosen in (part[known] == number for number in np.unique(part[known]))
            ]
    return series
