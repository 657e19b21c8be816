"""One trial as a picture: what its GPUs did over time, as the mean of all and the range between them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import pyarrow as pa

from service.answers.page import draw, figures
from service.answers.page.devices import of_trace
from service.answers.page.evidence import POINTS, Trace, trace_of
from service.answers.page.table import Lacking
from service.answers.page.theme import ALONE
from service.result import TrialResult

PARTS = POINTS // 2
"""Parts of the window, of each of which a line has a point."""

WHO: dict[str, Callable[[Sequence[float]], float]] = {
    "highest of all": max,
    "mean of all": statistics.fmean,
    "lowest of all": min,
}


def picture(result: TrialResult, samples: pa.Table) -> bytes | None:
    """PNG of a trial with samples by `telemetry.samples.SCHEMA`, None if they hold no power, clock or temperature.

    It is as large with a thousand GPUs as with two.
    """
    table = of_trace(together(trace_of(samples, result)))
    if isinstance(table, Lacking):
        return None
    return draw.png(figures.over_time(table, ALONE), ALONE)


def together(trace: Trace) -> Trace:
    """The trace with what all devices did in place of each one: of each part of the window the mean, the highest and
    the lowest of the means of single devices. One device alone stays as it is."""
    if len(trace.series) < 2:
        return trace
    times = [time for columns in trace.series.values() for points in columns.values() for time, _ in points]
    began, ended = min(times), max(times)
    part_s = (ended - began) / PARTS or 1.0
    parts: dict[str, dict[int, dict[str, list[tuple[float, float]]]]] = {}
    for name, columns in trace.series.items():
        for column, points in columns.items():
            for time, value in points:
                part = min(int((time - began) / part_s), PARTS - 1)
                parts.setdefault(column, {}).setdefault(part, {}).setdefault(name, []).append((time, value))
    series: dict[str, dict[str, list[tuple[float, float]]]] = {who: {} for who in WHO}
    for column, by_part in parts.items():
        for _, by_device in sorted(by_part.items()):
            means = [statistics.fmean(value for _, value in points) for points in by_device.values()]
            when = statistics.fmean(time for points in by_device.values() for time, _ in points)
            for who, of in WHO.items():
                series[who].setdefault(column, []).append((when, of(means)))
    return Trace(trace.label, series, trace.steps_s, trace.guessed)
