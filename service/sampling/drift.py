"""Whether a machine stays what it was: one layout, the sentinel, measured again and again through a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.metrics import TABLE
from service.result import TrialResult

NOISE = {metric.name: metric.noise for metric in TABLE if metric.noise is not None}
"""How far figures of one layout lie apart on GPUs that do not drift, with room to spare, as shares.

Neighbouring trials on an H200 differed by at most 0.25% in tokens/s and 0.9% in J/token (`benchmarks/results`).
"""
CPU_NOISE = {metric: 10 * share for metric, share in NOISE.items()}
"""How far they lie apart on a CPU machine, whose cores other processes use as well."""


@dataclass(frozen=True)
class Drift:
    """How far a figure moved: its `first` value, and the one `farthest` from it."""

    first: float
    farthest: float

    @property
    def share(self) -> float:
        """Of the first value, with sign."""
        return self.farthest / self.first - 1


def drift(series: Sequence[Sequence[float]]) -> Drift | None:
    """The largest move within any of several series; None if none has two values."""
    moves = [Drift(values[0], value) for values in series if values and values[0] for value in values[1:]]
    return max(moves, key=lambda move: abs(move.share), default=None)


def drifts(runs: Sequence[TrialResult], one_place: bool = True) -> dict[str, Drift]:
    """Metric -> drift over the runs of the sentinel that ended well, in their order.

    Runs are held against the first one on the same devices, which are not looked at where there is `one_place` only;
    and those that others ran beside, against the first of these.
    """
    groups: dict[tuple[Any, ...], list[TrialResult]] = {}
    for run in runs:
        devices = () if one_place else tuple(window.devices for window in run.windows)
        groups.setdefault((run.beside, devices), []).append(run)
    moves = {
        metric: drift([[v for run in group if (v := run.metrics.get(metric)) is not None] for group in groups.values()])
        for metric in NOISE
    }
    return {metric: move for metric, move in moves.items() if move is not None}


def beyond_noise(moves: Mapping[str, Drift], accelerator: str) -> list[str]:
    """The metrics whose drift is more than repeated measurements of a steady machine differ by."""
    noise = CPU_NOISE if accelerator == "cpu" else NOISE
    return [metric for metric, move in moves.items() if abs(move.share) > noise[metric]]
