"""Figures by slices as they would be measured, going by how far the slices of a search's finalists were off.

Only for the choice of what is measured next: what is recorded, shown or told to later searches stays as it was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from service.metrics import OFF, Method
from service.result import Purpose, TrialResult


def corrected(results: Sequence[TrialResult]) -> list[TrialResult]:
    """The results, in which what slices said counts as measured, less what it was off for finalists on average.

    Of a metric that says nothing of how far it was off, such as the share of time that GPUs are slowed for heat, as it
    is. All as they are while no finalist was explored by slices.
    """
    off = mean_off(results)
    return [_measured(result, off) for result in results] if off else list(results)


def mean_off(results: Iterable[TrialResult]) -> dict[str, float]:
    """Metric -> by what share slices were above what was measured, on average over finalists; see `metrics.OFF`."""
    found: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.metrics.items():
            if result.purpose == Purpose.FINALIST and name.startswith(OFF) and value is not None:
                found.setdefault(name.removeprefix(OFF), []).append(value)
    return {name: fmean(values) for name, values in found.items()}


def _measured(result: TrialResult, off: Mapping[str, float]) -> TrialResult:
    sliced = {name for name, method in result.methods.items() if method == Method.SLICE}
    metrics = {
        name: value / (1 + off[name]) if value is not None and name in sliced and name in off else value
        for name, value in result.metrics.items()
    }
    methods = {name: method for name, method in result.methods.items() if name not in sliced}
    return replace(result, metrics=metrics, methods=methods)
