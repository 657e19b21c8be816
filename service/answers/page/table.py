"""Tables with units: what figures are drawn from, and what stands beneath each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.metrics import MARKS, known

UNITS = {
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_gpu": "tokens/s",
    "step_time_s": "s",
    "joules_per_token": "J",
    "energy_per_step_j": "J",
    "mfu": "1",
    "throttle_ratio": "1",
}
"""Metric -> its unit alone, of those whose row in `service.metrics` says more, and whose name does not end with it."""

SUFFIXES = {"_w": "W", "_j": "J", "_s": "s", "_c": "degC", "_mhz": "MHz", "_gib": "GiB", "_ratio": "1"}
"""How names of metrics end -> the unit of what they hold."""


@dataclass(frozen=True)
class Column:
    """`key`: in rows; `title` and `unit`: over the column and on axes, None for what has no unit; `style`: Python's
    format of its numbers."""

    key: str
    title: str
    unit: str | None = None
    style: str = ",.4g"

    @property
    def heading(self) -> str:
        """Title and unit, such as ``power (W)``."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def text(self, row: Mapping[str, Any]) -> str:
        """The cell of a row; a dash where it has none. Its mark says how it came about where it is not measured."""
        value = row.get(self.key)
        if value is None:
            return "-"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return str(value)
        written = str(value) if isinstance(value, int) else format(value, self.style)
        return written + MARKS.get(row.get(f"{self.key}_method") or "", "")


@dataclass(frozen=True)
class Table:
    """`rows` are by key of the columns, and may hold more than is shown: methods under `KEY_method`. `note`: what a
    reader has to know of it."""

    columns: tuple[Column, ...]
    rows: Sequence[Mapping[str, Any]]
    note: str = ""

    def column(self, key: str) -> Column:
        """The column with this key. Raises `StopIteration` if there is none."""
        return next(column for column in self.columns if column.key == key)

    def has(self, key: str) -> bool:
        """Whether any row has a value there."""
        return any(row.get(key) is not None for row in self.rows)


@dataclass(frozen=True)
class Lacking:
    """Why there is no table, in one sentence."""

    reason: str


def unit_of(metric: str) -> str | None:
    """The unit of a metric, such as ``W``; ``1`` of a share; None if its name does not tell."""
    if metric in UNITS:
        return UNITS[metric]
    return next((unit for suffix, unit in SUFFIXES.items() if metric.endswith(suffix)), None)


def metric_column(metric: str, key: str | None = None, title: str | None = None) -> Column:
    """The column of a metric, titled by its name in words."""
    row = known(metric)
    words = metric
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if metric.endswith(suffix) and suffix != "_ratio" and metric not in ("tokens_per_s", "tokens_per_s_per_gpu"):
            words = metric.removesuffix(suffix)
            break
    names = {"tokens_per_s": "throughput", "tokens_per_s_per_gpu": "throughput per GPU", "mfu": "MFU"}
    names["joules_per_token"] = "energy per token"
    return Column(key or metric, title or names.get(metric, _in_words(words)), unit_of(metric), row.style)


def _in_words(name: str) -> str:
    """A name without underscores, abbreviations in capitals."""
    return " ".join(word.upper() if word in ("gpu", "sm", "hbm") else word for word in name.split("_"))
