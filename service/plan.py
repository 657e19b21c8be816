"""What a search would try, and what is predicted of it. Starts nothing and measures nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from search_spaces import cost, memory
from search_spaces.coefficients import is_unproven
from search_spaces.hardware import ACCELERATORS
from search_spaces.layout import Layout
from service.answers.tables import render
from service.goals import Comparison
from service.metrics import ALWAYS, Direction, heading, number
from service.problem import Problem

ROWS = 10
"""Layouts that a table shows unless all are asked for."""


@dataclass(frozen=True)
class Forecast:
    """What is predicted of a layout.

    `share`, `band`: see `search_spaces.memory`; None where the machine's memory is not known. `metrics`: those of
    `service.metrics` that can be predicted, of the whole model; none is in more doubt than another.
    """

    layout: Layout
    share: float | None
    band: memory.Band | None
    metrics: dict[str, float]
    methods: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The layout's fields and what is predicted of it, JSON-safe."""
        predicted = {"memory_share": self.share, "memory_band": self.band, "predicted": self.metrics}
        return {"layout": self.layout.label} | self.layout.to_dict() | predicted


@dataclass(frozen=True)
class Plan:
    """`forecasts`: of the legal layouts, in their order. `source`: what predicted speed and power rest on, None where
    nothing is known of the machine. `notices`: why that is in more doubt than elsewhere, and what a search would lack
    here."""

    problem: Problem
    forecasts: tuple[Forecast, ...]
    source: str | None
    notices: tuple[str, ...] = ()

    @cached_property
    def _compared(self) -> Comparison[Forecast]:
        return self.problem.goals.among(self.forecasts)

    @property
    def objectives(self) -> dict[str, Direction]:
        """Those of the problem's objectives that are predicted."""
        return self._compared.objectives

    @cached_property
    def promising(self) -> list[Forecast]:
        """The layouts that are predicted to fit and to keep the constraints."""
        return [one for one in self._compared.admitted if one.share is None or one.share <= 1]

    @cached_property
    def front(self) -> list[Forecast]:
        """The promising layouts that are predicted to be dominated by no other."""
        return self._compared.front(self.promising)

    def best(self, metric: str) -> list[Forecast]:
        """The promising layouts, the best on a predicted objective first."""
        return sorted(self.promising, key=lambda forecast: self.objectives[metric].cost(forecast.metrics[metric]))

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-safe; `points` in the order of the legal layouts."""
        space, front = self.problem.legal, {forecast.layout for forecast in self.front}
        return {
            "combinations": space.combinations,
            "distinct": space.distinct,
            "refused": space.refused,
            "reasons": space.reasons,
            "depth_proxy": self.problem.depth_proxy,
            "memory_bands": Counter(forecast.band for forecast in self.forecasts if forecast.band),
            "predicted_from": self.source,
            "notices": list(self.notices),
            "points": [
                forecast.to_dict() | {"on_predicted_front": forecast.layout in front} for forecast in self.forecasts
            ],
        }


def make_plan(problem: Problem, calibration: cost.Coefficients | None, notices: Sequence[str] = ()) -> Plan:
    """Predict every legal layout of `problem`; `calibration` is None for machines of which nothing is known."""
    forecasts = tuple(_forecast(problem, layout, calibration) for layout in problem.legal.layouts)
    if calibration is None or problem.shape is None:
        return Plan(problem, forecasts, None, tuple(notices))
    doubts = _doubts(problem.cluster.accelerator, calibration)
    return Plan(problem, forecasts, calibration.source, (*doubts, *notices))


def _doubts(accelerator: str, calibration: cost.Coefficients) -> list[str]:
    if not is_unproven(accelerator, calibration):
        return []
    most = ACCELERATORS[accelerator].published_mfu
    return [
        f"never measured on {accelerator}: by its data sheet, and below the largest MFU published of it, {most:.0%}; "
        "`wattune calibrate` fits it to your machine"
    ]


def _forecast(problem: Problem, layout: Layout, calibration: cost.Coefficients | None) -> Forecast:
    work = problem.workload
    if work.model is None:
        return Forecast(layout, None, None, {})
    metrics = {} if calibration is None else cost.predicted_metrics(layout, work, calibration)
    whole = memory.estimate(layout, work)
    share = memory.estimate(layout, work.run).share if work.depths else whole.share
    if share is not None:
        metrics["peak_memory_gib"] = whole.peak_bytes / 2**30
    return Forecast(layout, share, memory.band_of(layout, work, share), metrics)


def text(plan: Plan, every: bool = False) -> str:
    """For a terminal: counts, what each rule refuses, and the layouts worth a look, or `every` one."""
    space, parts = plan.problem.legal, [_counts(plan)]
    if space.refused:
        rows = [[rule, str(count), space.reasons[rule]] for rule, count in space.refused.items()]
        parts.append(render(["refused by", "layouts", "for example"], rows))
    if plan.source is not None:
        parts.append(f"Predicted, not measured. Source: {plan.source}.")
    if every or not plan.objectives:
        parts.append(_table(plan, plan.forecasts, every))
    elif not plan.front:
        parts.append("No legal layout is predicted to keep the constraints.")
    else:
        parts.append(f"Predicted front of {', '.join(plan.objectives)}:\n\n{_table(plan, plan.front)}")
        for metric in plan.objectives:
            parts.append(f"Predicted best on {metric}:\n\n{_table(plan, plan.best(metric))}")
    parts += ["\n".join(f"note: {notice}" for notice in plan.notices)] if plan.notices else []
    return "\n\n".join(parts)


def _counts(plan: Plan) -> str:
    problem, space = plan.problem, plan.problem.legal
    lines = [
        f"{problem.name}: {space.combinations} combinations of the axes, {space.distinct} distinct layouts, "
        f"{len(space.layouts)} legal"
    ]
    if doubtful := sum(forecast.band == "borderline" for forecast in plan.forecasts):
        lines.append(f"memory: {doubtful} of the legal ones may run out of it (borderline: {problem.borderline})")
    if problem.depth_proxy:
        shallow, deep = problem.depth_proxy
        lines.append(
            f"depth proxies: each trial is run with {deep} and with {shallow} layers, "
            f"and its figures are extrapolated to {problem.workload.shape.layers}"
        )
    return "\n".join(lines)


def _table(plan: Plan, forecasts: Sequence[Forecast], every: bool = False) -> str:
    """One row a layout; `share` is what its trials need of what torch can reserve on a GPU."""
    shown = forecasts if every else forecasts[:ROWS]
    metrics = [metric for metric in dict.fromkeys([*plan.objectives, *ALWAYS]) if metric in shown[0].metrics]
    headings = ["layout", "microbatches", *map(heading, metrics)]
    rows = [
        [
            forecast.layout.label,
            str(forecast.layout.gradient_accumulation_steps),
            *(number(metric, forecast.metrics[metric]) for metric in metrics),
        ]
        for forecast in shown
    ]
    if shown[0].share is not None:
        headings.append("share")
        for row, forecast in zip(rows, shown, strict=True):
            row.append(f"{forecast.share:.0%}")
    left = len(forecasts) - len(shown)
    return render(headings, rows) + (f"\n... and {left} more: --all" if left else "")
