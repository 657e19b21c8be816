"""What a search came to, beside its best layouts: how it got there, what mattered, what failed, whether to trust it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from search_spaces.layout import Layout, axis_of
from search_spaces.space import varying
from service.answers import fanova
from service.answers.candidates import explored
from service.answers.findings import Found, findings
from service.answers.growth import Advance, advances, end_of, spent_gpu_hours
from service.answers.overview import notices
from service.answers.tables import render
from service.metrics import Method, heading, number
from service.record.results import SearchRecord, TrialRecord
from service.result import Purpose
from trainables.status import Status

if TYPE_CHECKING:
    from service.problem import Problem

ENOUGH_TRIALS = 8
"""Fewer trials say nothing of the importance of axes."""

TOGETHER = 0.9
"""Cramer's V (1946) from which on two axes are taken to change together. At 1 the one with fewer values is a function
of the other; of two that halve 30 trials alike but for one of them, it is 0.94."""

AND = " + "
"""What stands between the names of axes that count as one."""


@dataclass(frozen=True)
class SentinelRun:
    """One measurement of the layout by which the machine is watched, and how far it is off the first, as shares."""

    started: datetime
    metrics: dict[str, float]
    methods: dict[str, Method]
    change: dict[str, float]

    def cell(self, metric: str) -> str:
        """The figure and its change, for a table."""
        if metric not in self.metrics:
            return "-"
        moved = f" ({self.change[metric]:+.2%})" if metric in self.change else ""
        return number(metric, self.metrics[metric], self.methods.get(metric)) + moved


@dataclass(frozen=True)
class Failure:
    """Trials that came to no result in the same way; `cause` and `label` are those of the first."""

    status: str
    trials: int
    cause: str | None
    label: str


@dataclass(frozen=True)
class Refusal:
    """How many layouts a rule refused, and for what reason one of them."""

    rule: str
    layouts: int
    reason: str


@dataclass(frozen=True)
class Report:
    """`findings`: sentences of `service.answers.findings`.

    `trials`: purpose -> status -> how many; `gpu_hours`: all of them, GPUs times hours.

    `importance`: objective -> axis -> its share of what single axes explain, see `importance`, the most first; none for
    objectives that do not vary, or where too few trials ended well. `together` are the axes that cannot be told apart
    in these trials, in groups that share one name there, `A + B`. `refusals` is None where the search's spec is out of
    reach.
    """

    search_id: str
    findings: tuple[str, ...]
    trials: dict[str, dict[str, int]]
    gpu_hours: float
    advances: tuple[Advance, ...]
    importance: dict[str, dict[str, float]]
    together: tuple[tuple[str, ...], ...]
    sentinel: str | None
    sentinel_runs: tuple[SentinelRun, ...]
    failures: tuple[Failure, ...]
    refusals: tuple[Refusal, ...] | None
    notices: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        runs = [asdict(run) | {"started": run.started.isoformat()} for run in self.sentinel_runs]
        return asdict(self) | {"sentinel_runs": runs}


def report(search: SearchRecord, problem: Problem | None = None) -> Report:
    """All of it from the record; `problem` is that of the search's spec, for what its rules refused and its own
    layout."""
    layout, runs = _sentinel(search)
    mattered = importance(search)
    groups = dict.fromkeys(group for shares in mattered.values() for group in shares)
    refusals = None
    if problem is not None:
        space = problem.legal
        refusals = tuple(Refusal(rule, count, space.reasons[rule]) for rule, count in space.refused.items())
    return Report(
        search_id=search.id,
        findings=tuple(findings(found(search, problem))),
        trials=_counts(search.trials),
        gpu_hours=spent_gpu_hours(search),
        advances=tuple(advances(search)),
        importance={
            metric: {AND.join(group): share for group, share in shares.items()} for metric, shares in mattered.items()
        },
        together=tuple(group for group in groups if len(group) > 1),
        sentinel=layout,
        sentinel_runs=tuple(runs),
        failures=tuple(_failures(search.trials)),
        refusals=refusals,
        notices=tuple(notices(search)),
    )


def found(search: SearchRecord, problem: Problem | None) -> Found:
    """What findings are made of."""
    if problem is None:
        return Found(search)
    return Found(search, problem.baseline_layout, len(problem.legal.layouts))


def text(report: Report) -> str:
    """For a terminal: a section for each question, of which those with nothing to say are left out."""
    counts = [
        f"{purpose}: {', '.join(f'{count} {status}' for status, count in statuses.items())}"
        for purpose, statuses in report.trials.items()
    ]
    parts = [f"{report.search_id}; {'; '.join(counts) or 'no trials'}; {report.gpu_hours:.3g} GPU hours"]
    if report.findings:
        parts.append("\n".join(report.findings))
    if report.advances:
        rows = [[a.label, str(a.trials), f"{a.gpu_hours:.3f}", f"{a.hypervolume:.1%}"] for a in report.advances]
        parts.append(render(["the front grew by", "trials", "GPU hours", "hypervolume"], rows))
    if report.importance:
        axes = dict.fromkeys(axis for shares in report.importance.values() for axis in shares)
        rows = [[axis, *(f"{shares.get(axis, 0.0):.0%}" for shares in report.importance.values())] for axis in axes]
        alike = [f"{' and '.join(group)} change together: one share for all of them" for group in report.together]
        parts.append("\n".join([render(["what mattered", *map(heading, report.importance)], rows), *alike]))
    if len(report.sentinel_runs) > 1:
        metrics = list(report.sentinel_runs[0].metrics)
        rows = [[f"{run.started:%H:%M:%S} UTC", *(run.cell(m) for m in metrics)] for run in report.sentinel_runs]
        parts.append(f"sentinel: {report.sentinel}\n" + render(["at", *map(heading, metrics)], rows))
    failures = [f"{f.trials} {f.status}: {f.label}\n    {f.cause}" for f in report.failures]
    refused = [f"{r.layouts} refused by {r.rule}\n    {r.reason}" for r in report.refusals or ()]
    notes = [f"note: {notice}" for notice in report.notices]
    return "\n\n".join([*parts, *("\n".join(lines) for lines in (failures, refused, notes) if lines)])


def importance(search: SearchRecord) -> dict[str, dict[tuple[str, ...], float]]:
    """Objective -> axis -> its share of the variance over the space that single axes explain (Hutter et al. 2014).

    By `fanova`, on the explored trials that ended well, of the axes on which these differ. Axes that change together
    count as one, that with the most values first.
    """
    comparison = search.goals.among(explored(search.trials))
    shares = {}
    for metric in search.objectives:
        values = [(one.layout, comparison.value(one, metric)) for one in comparison.results]
        present = [(layout, value) for layout, value in values if value is not None]
        if len(present) >= ENOUGH_TRIALS and len({value for _, value in present}) > 1:
            shares[metric] = _importance(present)
    return shares


def _importance(values: Sequence[tuple[Layout, float]]) -> dict[tuple[str, ...], float]:
    """Axes that count as one -> their share, the most first, of the values of layouts."""
    axes = varying(layout for layout, _ in values)
    places = {axis: [settings.index(one.setting(axis)) for one, _ in values] for axis, settings in axes.items()}
    groups = _together(places)
    columns = []
    for group in groups:
        seen = list(zip(*(places[axis] for axis in group), strict=True))
        kinds = sorted(set(seen))
        columns.append([kinds.index(one) for one in seen])
    sizes, ordered = (
        [max(column) + 1 for column in columns],
        [axis_of(group[0], axes[group[0]]).ordered for group in groups],
    )
    shares = fanova.shares(list(zip(*columns, strict=True)), [value for _, value in values], sizes, ordered)
    return dict(sorted(zip(map(tuple, groups), shares, strict=True), key=lambda one: -one[1]))


def _together(places: Mapping[str, Sequence[int]]) -> list[list[str]]:
    """The axes in groups of those that change together, directly or by way of others, most values first."""
    groups: list[list[str]] = []
    for axis in places:
        near = [group for group in groups if any(cramers_v(places[axis], places[one]) >= TOGETHER for one in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(one for group in near for one in group), axis])
    return [sorted(group, key=lambda axis: -len(set(places[axis]))) for group in groups]


def cramers_v(one: Sequence[int], other: Sequence[int]) -> float:
    """How far two series of categories, each of two or more, go together: 0 not at all, 1 as one's function."""
    counts = np.zeros((max(one) + 1, max(other) + 1))
    np.add.at(counts, (list(one), list(other)), 1)
    expected = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / len(one)
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    return float(np.sqrt(chi_squared / len(one) / (min(counts.shape) - 1)))


def _sentinel(search: SearchRecord) -> tuple[str | None, list[SentinelRun]]:
    """The layout that was measured again and again, and its measurements, the one that explored it first."""
    watching = [trial for trial in search.trials if trial.purpose == Purpose.SENTINEL]
    if not watching:
        return None, []
    layout = watching[0].layout
    same = [t for t in search.trials if t.status == Status.OK and t.layout == layout]
    runs: list[SentinelRun] = []
    for trial in sorted((t for t in same if t.purpose in (Purpose.SEARCH, Purpose.SENTINEL)), key=end_of):
        first = runs[0].metrics if runs else trial.metrics
        kept = {metric: trial.metrics[metric] for metric in search.objectives if metric in trial.metrics}
        change = {metric: value / first[metric] - 1 for metric, value in kept.items() if first.get(metric)}
        runs.append(SentinelRun(trial.started or search.started, kept, trial.methods, change))
    return layout.label, runs


def _failures(trials: Sequence[TrialRecord]) -> list[Failure]:
    """By status, and apart from each other if the machines were to blame or not."""
    groups: dict[tuple[str, bool], list[TrialRecord]] = {}
    for trial in trials:
        if trial.status not in (Status.OK, "running"):
            groups.setdefault((trial.status, trial.infrastructure), []).append(trial)
    return [
        Failure(f"{status} of the machines" if machines else status, len(alike), alike[0].cause, alike[0].label)
        for (status, machines), alike in groups.items()
    ]


def _counts(trials: Sequence[TrialRecord]) -> dict[str, dict[str, int]]:
    purposes = dict.fromkeys(trial.purpose for trial in trials)
    return {one: dict(Counter(trial.status for trial in trials if trial.purpose == one)) for one in purposes}
