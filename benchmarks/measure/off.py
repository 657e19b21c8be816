"""How far figures are off those that were measured, as the benchmarks of slices tell it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

COMPARED = ("step_time_s", "joules_per_token", "mean_power_w", "peak_memory_gib")
"""The metrics that are held against measured ones."""

Errors = Mapping[str, float]
"""Metric -> a figure over the measured one, less 1; only of metrics that both have."""


def errors(figures: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, float]:
    """`Errors` of some figures."""
    return {name: figures[name] / measured[name] - 1 for name in COMPARED if figures.get(name) and measured.get(name)}


def percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.2%}"


def worst_first(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of some rows with `error`, which are `Errors`, by that of the step time."""
    return sorted((row for row in rows if row["error"]), key=lambda row: -abs(row["error"]["step_time_s"]))


def over(rows: Iterable[Errors], of: Callable[[list[float]], float], names: Iterable[str] = COMPARED) -> list[str]:
    """The mean, or the largest, or what else `of` makes of the sizes of each metric's errors; "" where it has none."""
    rows = list(rows)
    columns = [[abs(row[name]) for row in rows if name in row] for name in names]
    return [f"{of(column):.2%}" if column else "" for column in columns]


def lines_of(rows: Iterable[dict[str, Any]], named: Callable[[dict[str, Any]], list[str]]) -> list[list[str]]:
    """Cells of a table: of each row that has errors how it is `named`, and these, worst first; then the mean and the
    largest of their sizes."""
    ok = worst_first(rows)
    lines = [[*named(row), *(percent(row["error"].get(name)) for name in COMPARED)] for row in ok]
    before = [""] * (len(named(ok[0])) - 1)
    for name, of in (("mean", statistics.fmean), ("largest", max)):
        lines.append([*before, name, *over([row["error"] for row in ok], of)])
    return lines
