"""Tables of layouts: the front, the axes, what each layout does, microbatches, memory, predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from search_spaces.layout import Layout
from search_spaces.memory import RankMemory, estimate
from search_spaces.space import varying
from service.answers.candidates import Candidate, explored
from service.answers.findings import alike
from service.answers.page.evidence import Evidence
from service.answers.page.table import Column, Lacking, Table, metric_column
from service.answers.report import importance
from service.goals import Comparison

LAYOUT = Column("layout", "layout")
OUTCOME = Column("outcome", "outcome")
HOW = Column("how", "how")
TRIALS = Column("trials", "trials")

WORDS = {"slice": "by slices", "short": "short", "extrapolated": "extrapolated", "estimated": "estimated"}
"""Method -> what figures and tables call a value that came about so; any other is measured."""

MEASURED = "measured"

AXES_SHOWN = 8
"""Axes of parallel coordinates, at most: those that matter most."""

SWEEPS_SHOWN = 6
"""Lines of the microbatch sweep, at most."""

FIGURES = (
    ("tokens_per_s", None),
    ("joules_per_token", None),
    ("mean_power_w", "peak_power_w"),
    ("mean_gpu_temp_c", "peak_gpu_temp_c"),
    ("mean_sm_clock_mhz", "min_sm_clock_mhz"),
)
"""What each layout does: a mean, and the extreme beside it. Of the clock that is the lowest sample of any GPU."""

PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "constant", "slack")


def front(evidence: Evidence) -> Table | Lacking:
    """Each ranked layout's objectives with their intervals, its outcome, and what was predicted of it."""
    comparison = evidence.comparison
    ranked = comparison.ranked(comparison.results)
    if not ranked:
        return Lacking("No trial came to a result.")
    metrics = objectives(comparison)
    if len(metrics) < 2:
        return Lacking("There is no front to draw: only one objective was measured, or varies between layouts.")
    on_front = {id(one) for one in evidence.front}
    rows = []
    for one in ranked:
        outcome = "on the front" if id(one) in on_front else "dominated"
        if not comparison.admits(one):
            outcome = "breaks a constraint"
        row: dict[str, Any] = {"layout": one.label, "outcome": outcome, "trials": len(one.trials)}
        for metric in metrics:
            row |= _figure(one, metric)
            row[f"{metric}_predicted"] = evidence.predicted.get(one.layout, {}).get(metric)
        row["how"] = how(one, metrics)
        rows.append(row)
    columns = [LAYOUT, OUTCOME, HOW, TRIALS]
    for metric in metrics:
        column = metric_column(metric)
        columns.append(column)
        for part, title in (("low", "95% from"), ("high", "95% to"), ("predicted", "predicted")):
            if any(row.get(f"{metric}_{part}") is not None for row in rows):
                columns.append(Column(f"{metric}_{part}", title, column.unit, column.style))
    return Table(tuple(columns), rows)


def objectives(comparison: Comparison[Candidate]) -> list[str]:
    """Those that were measured and differ between layouts, in their order."""
    ranked = comparison.ranked(comparison.results)
    return [metric for metric in comparison.objectives if len({one.metrics[metric] for one in ranked}) > 1]


def axes(evidence: Evidence) -> Table | Lacking:
    """The explored layouts by the axes that matter most, and their objectives."""
    comparison = evidence.search.goals.among(explored(evidence.search.trials))
    ranked = comparison.ranked(comparison.results)
    differing = varying([one.layout for one in ranked])
    if len(ranked) < 2 or not differing:
        return Lacking("The layouts that came to a result do not differ in any axis.")
    shares = next(iter(importance(evidence.search).values()), {})
    matter = [name for group in shares for name in group if name in differing]
    chosen = list(dict.fromkeys([*matter, *differing]))[:AXES_SHOWN]
    metrics = objectives(comparison) or list(comparison.objectives)
    on_front = {one.layout for one in evidence.front}
    rows = [
        {"layout": one.label, "outcome": "on the front" if one.layout in on_front else "dominated"}
        | {axis: setting(one.layout, axis) for axis in chosen}
        | {metric: one.metrics[metric] for metric in metrics}
        | {f"{metric}_method": _method(one, metric) for metric in metrics}
        for one in ranked
    ]
    settings = [Column(axis, axis.replace("_", " ")) for axis in chosen]
    left = [axis for axis in differing if axis not in chosen]
    note = f"Left out, as they matter least: {', '.join(left)}." if left else ""
    return Table((LAYOUT, OUTCOME, *settings, *map(metric_column, metrics)), rows, note)


def setting(layout: Layout, axis: str) -> Any:
    """A layout's value of an axis, as a cell."""
    value = layout.setting(axis)
    if value is None:
        return "default"
    return str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value


def figures(evidence: Evidence) -> Table | Lacking:
    """Speed, energy, power, heat and clock of each layout that is shown: means, and extremes over all GPUs."""
    if not evidence.shown:
        return Lacking("No trial came to a result.")
    names = [name for pair in FIGURES for name in pair if name]
    names = [name for name in names if any(name in one.metrics for one in evidence.shown)]
    on_front = {id(one) for one in evidence.front}
    rows = []
    for one in evidence.shown:
        row: dict[str, Any] = {"layout": one.label, "trials": len(one.trials), "how": how(one, names[:2])}
        row["outcome"] = "on the front" if id(one) in on_front else "dominated"
        for name in names:
            row |= _figure(one, name)
        rows.append(row)
    return Table((LAYOUT, OUTCOME, HOW, TRIALS, *map(metric_column, names)), rows, _left_out(evidence))


def sweep(evidence: Evidence) -> Table | Lacking:
    """What layouts that differ in the microbatch alone do, the largest groups first."""
    groups = alike(evidence.found, "micro_batch_size")
    if not groups:
        return Lacking("No two layouts that came to a result differ in the microbatch alone.")
    metrics = [name for name in ("tokens_per_s", "joules_per_token", "peak_memory_gib") if name in _having(groups)]
    best = {id(one): place for place, one in enumerate(evidence.shown)}
    groups.sort(key=lambda group: (-len(group), min(best.get(id(one), SWEEPS_SHOWN + 99) for one in group)))
    rows = []
    for group in groups[:SWEEPS_SHOWN]:
        name = " ".join(word for word in group[0].label.split() if not word.startswith("mbs"))
        for one in group:
            row: dict[str, Any] = {"layout": name, "micro_batch_size": one.layout.micro_batch_size}
            for metric in metrics:
                row |= _figure(one, metric)
            rows.append(row)
    left = len(groups) - SWEEPS_SHOWN
    note = f"{left} more groups of layouts are left out, of fewer sizes or slower." if left > 0 else ""
    size = Column("micro_batch_size", "microbatch", "sequences")
    return Table((LAYOUT, size, *map(metric_column, metrics)), rows, note)


def memory(evidence: Evidence) -> Table | Lacking:
    """Predicted memory of the fullest GPU by part, beside what was measured there, in GiB."""
    if evidence.problem is None:
        return Lacking("The search's spec cannot be read from here, so memory cannot be predicted.")
    if evidence.problem.shape is None:
        return Lacking("Nothing is known of the trainer's model, so memory cannot be predicted.")
    work, rows = evidence.problem.workload, []
    for one in evidence.shown:
        if (measured := one.metrics.get("peak_memory_gib")) is None:
            continue
        predicted = estimate(one.layout, work)
        fullest = max(predicted.ranks, key=predicted.reserved)
        parts = _gib(predicted.ranks[fullest], predicted.reserved(fullest))
        total = math.fsum(parts.values())
        row = {"layout": one.label, "rank": fullest, "predicted": total, "off": 100 * (total / measured - 1)}
        rows.append(row | parts | {"measured": measured, "measured_method": _method(one, "peak_memory_gib")})
    if not rows:
        return Lacking("No trial's memory was measured: there was no GPU.")
    parts_columns = [Column(part, part, "GiB", ",.2f") for part in PARTS]
    columns = (LAYOUT, Column("rank", "pipeline rank"), *parts_columns, Column("predicted", "predicted", "GiB", ",.1f"))
    columns += (Column("measured", "measured", "GiB", ",.1f"), Column("off", "prediction off", "%", "+.1f"))
    return Table(columns, rows, _left_out(evidence))


def _gib(rank: RankMemory, reserved: float) -> dict[str, float]:
    """A rank's parts in GiB. What of the slack does not fit the GPU is given back, and left out."""
    parts = {part: getattr(rank, part) / 2**30 for part in PARTS}
    return parts | {"slack": (reserved - rank.needed) / 2**30}


def predictions(evidence: Evidence) -> Table | Lacking:
    """What the cost model foretold of each layout, and what was measured."""
    if not evidence.predicted:
        return Lacking("Nothing was predicted: nothing is known of these machines ahead of a search.")
    rows = []
    for one in evidence.comparison.results:
        foretold = evidence.predicted.get(one.layout, {})
        row: dict[str, Any] = {"layout": one.label, "engine": one.layout.engine, "how": how(one, ["tokens_per_s"])}
        for metric in ("tokens_per_s", "joules_per_token"):
            if metric in foretold and evidence.comparison.value(one, metric) is not None:
                row |= {f"{metric}_predicted": foretold[metric]} | _figure(one, metric)
                row[f"{metric}_off"] = 100 * (foretold[metric] / one.metrics[metric] - 1)
        if len(row) > 3:
            rows.append(row)
    if not rows:
        return Lacking("No layout has a figure that was predicted too.")
    columns = [LAYOUT, HOW]
    for metric in ("tokens_per_s", "joules_per_token"):
        if any(metric in row for row in rows):
            column = metric_column(metric)
            columns += [Column(f"{metric}_predicted", f"predicted {column.title}", column.unit, column.style), column]
            columns.append(Column(f"{metric}_off", "prediction off", "%", "+.1f"))
    return Table(tuple(columns), rows, f"Predictions rest on: {evidence.source}." if evidence.source else "")


def how(one: Candidate, metrics: Sequence[str]) -> str:
    """How a layout's figures came about, by the most doubtful of some."""
    methods = [WORDS[method] for metric in metrics if (method := _method(one, metric)) in WORDS]
    return max(methods, key=list(WORDS.values()).index, default=MEASURED)


def _method(one: Candidate, metric: str) -> str | None:
    method = one.methods.get(metric)
    return None if method is None else method.value


def _figure(one: Candidate, metric: str) -> dict[str, Any]:
    """A metric's value with its method and, of means, the ends of its interval; nothing if it is missing."""
    if (value := one.metrics.get(metric)) is None:
        return {}
    row: dict[str, Any] = {metric: value, f"{metric}_method": _method(one, metric)}
    if (half := one.intervals.get(metric)) is not None:
        row |= {f"{metric}_low": value - half, f"{metric}_high": value + half}
    return row


def _having(groups: Sequence[Sequence[Candidate]]) -> set[str]:
    return {name for group in groups for one in group for name in one.metrics}


def _left_out(evidence: Evidence) -> str:
    if evidence.left_out <= 0:
        return ""
    return f"{evidence.left_out} more layouts are left out: those on the front and the best of the others are shown."


def short(labels: Sequence[str]) -> Mapping[str, str]:
    """Label -> the label without the words that all have; the whole one where that leaves nothing or is ambiguous."""
    words = [set(label.split()) for label in labels]
    common = set.intersection(*words) if len(set(labels)) > 1 else set()
    shorter = {label: " ".join(word for word in label.split() if word not in common) for label in labels}
    unclear = len(set(shorter.values())) < len(shorter) or "" in shorter.values()
    return {label: label for label in labels} if unclear else shorter
