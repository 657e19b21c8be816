"""What a search would try, and what is predicted of it. Starts nothing and measures nothing."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import yaml

from search_spaces import cost, memory
from search_spaces.coefficients import is_unproven
from search_spaces.doubt import Doubt, doubt
from search_spaces.hardware import ACCELERATORS
from search_spaces.kinds import kinds
from search_spaces.layout import AXES, Layout
from service.answers.tables import render
from service.checks import unsliced
from service.goals import Comparison
from service.metrics import ALWAYS, Direction, heading, number
from service.problem import Measurement, Problem
from service.trials import short
from trainables.slice import FIRST

OF_TIME = ("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "joules_per_token", "energy_per_step_j")
"""Metrics that are off as step times are."""

ROWS = 10
"""Layouts that a table shows unless all are asked for."""

SAMPLED = 16
"""Layouts by which it is told what slices take."""

START_S = 3.0
"""Seconds that a rank alone takes beside its steps: its process, its model, and the power of waiting; on H200."""


@dataclass(frozen=True)
class Forecast:
    """What is predicted of a layout.

    `share`, `band`: see `search_spaces.memory`; None where the machine's memory is not known. `metrics`: those of
    `service.metrics` that can be predicted, of the whole model; none is in more doubt than another. `doubt`: by how
    much those of time may be off, None where there are none.
    """

    layout: Layout
    share: float | None
    band: memory.Band | None
    metrics: dict[str, float]
    doubt: Doubt | None = None
    methods: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The layout's fields and what is predicted of it, JSON-safe."""
        predicted = {"memory_share": self.share, "memory_band": self.band, "predicted": self.metrics}
        predicted |= dict.fromkeys(Doubt._fields) if self.doubt is None else self.doubt._asdict()
        return {"layout": self.layout.label} | self.layout.to_dict() | predicted


@dataclass(frozen=True)
class Slices:
    """What a layout takes when it is explored by slices, on one GPU: the fewest and the most kinds of ranks, and about
    how many seconds, without what a trainer's program takes to start; None where the time of a step is not predicted.
    """

    fewest: int
    most: int
    seconds: float | None


@dataclass(frozen=True)
class Plan:
    """`forecasts`: of the legal layouts, in their order. `source`: what predicted speed and power rest on, None where
    nothing is known of the machine. `notices`: why that is in more doubt than elsewhere, and what a search would lack
    here. `slices`: None where layouts cannot be explored by them, for which `unsliced` are the reasons of a trainer's
    program that has layouts of several GPUs."""

    problem: Problem
    forecasts: tuple[Forecast, ...]
    source: str | None
    slices: Slices | None = None
    unsliced: tuple[str, ...] = ()
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

    def undecided(self, metric: str) -> list[Forecast]:
        """The promising layouts of which any may be the best on a predicted objective: what is foretold of them differs
        by less than such predictions are off."""
        ranked = self.best(metric)
        return [each for each in ranked if _close(ranked[0], each, metric)]

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-safe; `points` in the order of the legal layouts."""
        space, front = self.problem.legal, {forecast.layout for forecast in self.front}
        return {
            "combinations": space.combinations,
            "distinct": space.distinct,
            "refused": space.refused,
            "reasons": space.reasons,
            "chosen_axes": {axis: self.problem.axes[axis] for axis in self.problem.why},
            "chosen_for": dict(self.problem.why),
            "depth_proxy": self.problem.depth_proxy,
            "memory_bands": Counter(forecast.band for forecast in self.forecasts if forecast.band),
            "predicted_from": self.source,
            "slices": None if self.slices is None else asdict(self.slices),
            "unsliced": list(self.unsliced),
            "notices": list(self.notices),
            "points": [
                forecast.to_dict() | {"on_predicted_front": forecast.layout in front} for forecast in self.forecasts
            ],
        }


def make_plan(problem: Problem, calibration: cost.Coefficients | None, notices: Sequence[str] = ()) -> Plan:
    """Predict every legal layout of `problem`; `calibration` is None for machines of which nothing is known."""
    forecasts = tuple(_forecast(problem, layout, calibration) for layout in problem.legal.layouts)
    several = [one for one in forecasts if one.layout.num_gpus > 1]
    alone = problem
    if problem.why:  # a space that nobody wrote is without this where ranks are explored alone
        several = [one for one in several if not one.layout.async_tensor_parallel]
        alone = replace(problem, axes=problem.axes | {"async_tensor_parallel": [False]})
    faults = tuple(unsliced(alone)) if several else ()
    slices = _slices(problem, several) if several and not faults else None
    told = faults if problem.trainer is not None else ()
    if calibration is None or problem.shape is None:
        return Plan(problem, forecasts, None, slices, told, tuple(notices))
    doubts = _doubts(problem.cluster.accelerator, calibration)
    return Plan(problem, forecasts, calibration.told, slices, told, (*doubts, *notices))


def _slices(problem: Problem, several: Sequence[Forecast]) -> Slices:
    """By a few of the layouts of several GPUs, spread over them all."""
    some = several[:: -(-len(several) // SAMPLED)]
    counts = [len(kinds(one.layout, problem.workload.run)) for one in some]
    times = [one.metrics.get("step_time_s") for one in some]
    start_s = START_S if problem.trainer is None else 0.0
    alone = [
        count * (start_s + _steps_s(problem.measurement, one.layout, step_s))
        for one, count, step_s in zip(some, counts, times, strict=True)
        if step_s is not None
    ]
    return Slices(min(counts), max(counts), statistics.median(alone) if alone else None)


def _steps_s(measurement: Measurement, layout: Layout, step_s: float) -> float:
    """About the seconds that one kind of rank trains if its steps are alike, by the predicted time of the layout's."""
    sizes = short.sizes(layout, alone=True) if measurement.short_trials else ()
    each = [step_s * size / layout.global_batch_size for size in sizes] or [step_s]
    shortest_s = math.inf if layout.pipeline_parallel_size > 1 else FIRST / layout.gradient_accumulation_steps * step_s
    profiled_s = each[0] if measurement.breakdown else 0.0
    return min(each[0], shortest_s) + profiled_s + sum(max(short.ALONE_S, one_s) for one_s in each)


def _doubts(accelerator: str, calibration: cost.Coefficients) -> list[str]:
    if not is_unproven(accelerator, calibration):
        return []
    most = ACCELERATORS[accelerator].published_mfu
    return [
        f"never measured on {accelerator}: by its data sheet and what others published of it, an MFU of {most:.0%} at "
        "most; `wattune calibrate` fits it to your machine"
    ]


def _forecast(problem: Problem, layout: Layout, calibration: cost.Coefficients | None) -> Forecast:
    work = problem.workload
    if work.model is None:
        return Forecast(layout, None, None, {})
    metrics, off = {}, None
    if calibration is not None:
        prediction = cost.predict(layout, work, calibration)
        metrics = cost.metrics_of(prediction, layout, work)
        off = doubt(layout, work, problem.cluster.accelerator, calibration, prediction)
    whole = memory.glance(layout, work)
    share = memory.glance(layout, work.run).share if work.depths else whole.share
    if share is not None:
        metrics["peak_memory_gib"] = whole.peak_bytes / 2**30
    return Forecast(layout, share, memory.band_of(layout, work, share), metrics, off)


def _close(better: Forecast, other: Forecast, metric: str) -> bool:
    """Whether it is in doubt which of two is better on a metric of time, of which one is foretold to be."""
    if better.doubt is None or other.doubt is None:
        return False
    low, high = sorted((abs(better.metrics[metric]), abs(other.metrics[metric])))
    return high <= low * (1 + max(better.doubt.apart, other.doubt.faster))


def text(plan: Plan, every: bool = False) -> str:
    """For a terminal: counts, what each rule refuses, and the layouts worth a look, or `every` one."""
    space, parts = plan.problem.legal, [_counts(plan)]
    if plan.problem.why:
        parts.append(_chosen(plan.problem))
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
            ranked = plan.best(metric)
            parts.append(f"Predicted best on {metric}{_told(plan, metric)}:\n\n{_table(plan, ranked)}")
            parts.append(f"The first as a spec has it: {_in_words(ranked[0].layout, plan.problem)}")
    parts += ["\n".join(f"note: {notice}" for notice in plan.notices)] if plan.notices else []
    return "\n\n".join(parts)


def _in_words(layout: Layout, problem: Problem) -> str:
    """The microbatch of a layout, and what of it is not the default, as the spec's `space` or `baseline` names it."""
    usual = {name: axis.default if axis.matters(layout) else layout.setting(name) for name, axis in AXES.items()}
    usual |= {"num_gpus": problem.cluster.size, "micro_batch_size": None}
    usual |= {} if problem.trainer is None else {"engine": layout.engine}
    settings = {name: layout.setting(name) for name in (*AXES, *dict(layout.own))}
    told = {name: value for name, value in settings.items() if name not in usual or value != usual[name]}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}
    return yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=math.inf).strip()


def _told(plan: Plan, metric: str) -> str:
    """How many layouts it is open between."""
    count = len(plan.undecided(metric)) if metric in OF_TIME else 1
    return "" if count == 1 else f", of which {count} are too close to tell apart"


def _chosen(problem: Problem) -> str:
    """The axes that follow from model and cluster, and why."""
    rows = [[axis, ", ".join(map(_value, problem.axes[axis])), why] for axis, why in problem.why.items()]
    return render(["axis", "values (space: auto)", "why"], rows)


def _value(value: Any) -> str:
    """As YAML has it, but of lists the length alone."""
    if isinstance(value, tuple):
        return f"[{len(value)} stages]"
    return value if isinstance(value, str) else json.dumps(value)


def _counts(plan: Plan) -> str:
    problem, space = plan.problem, plan.problem.legal
    cluster = problem.cluster
    lines = [
        f"{problem.name}: {problem.global_batch_size:,} sequences of {problem.sequence_length:,} tokens a step, on "
        f"{cluster.nodes:,} x {cluster.gpus_per_node} {cluster.accelerator}",
        f"{space.combinations} combinations of the axes, {space.distinct} distinct layouts, {len(space.layouts)} legal",
    ]
    if doubtful := sum(forecast.band == "borderline" for forecast in plan.forecasts):
        lines.append(f"memory: {doubtful} of the legal ones may run out of it (borderline: {problem.borderline})")
    if plan.slices is not None:
        lines.append(_sliced(plan.slices, problem))
    lines += [f"slices: not of this trainer's program: {fault}" for fault in plan.unsliced]
    if problem.depth_proxy:
        shallow, deep = problem.depth_proxy
        lines.append(
            f"depth proxies: each trial is run with {deep} and with {shallow} layers, "
            f"and its figures are extrapolated to {problem.workload.shape.layers}"
        )
    return "\n".join(lines)


def _sliced(slices: Slices, problem: Problem) -> str:
    fewest, most, trainer = slices.fewest, slices.most, problem.trainer
    ranks = f"{fewest} to {most} kinds" if fewest < most else f"{most} kind{'s' * (most > 1)}"
    took = "" if slices.seconds is None else f", in about {slices.seconds:.0f} s"
    start = "" if trainer is None else f", beside {trainer.name}'s start, if its ranks meet in torch.distributed alone"
    how = " (measurement.explore: slices)" if problem.measurement.explore == "gang" else ""
    return f"slices: one GPU explores a layout by {ranks} of its ranks{took}{start}{how}"


def _table(plan: Plan, forecasts: Sequence[Forecast], every: bool = False) -> str:
    """One row a layout; `may be off` is what is foretold of time, and `share` what its trials need of what torch can
    reserve on a GPU."""
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
    if shown[0].doubt is not None:
        headings.append("may be off")
        for row, forecast in zip(rows, shown, strict=True):
            row.append("" if forecast.doubt is None else f"{forecast.doubt.off:.0%}")
    if shown[0].share is not None:
        headings.append("share")
        for row, forecast in zip(rows, shown, strict=True):
            row.append(f"{forecast.share:.0%}")
    left = len(forecasts) - len(shown)
    return render(headings, rows) + (f"\n... and {left} more: --all" if left else "")
