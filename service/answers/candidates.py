"""What is ranked: layouts as they were measured, once or several times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from search_spaces.layout import Layout
from search_spaces.placement import plain
from service.answers.placements import placements
from service.metrics import METRICS, Doubt, Method
from service.result import Purpose
from service.student import confidence_interval
from trainables.status import Status


class Trial(Protocol):
    """What a trial came to: a `service.result.TrialResult`, or a `service.record.results.TrialRecord` of one."""

    @property
    def trial_id(self) -> str: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def status(self) -> str: ...

    @property
    def cause(self) -> str | None: ...

    @property
    def purpose(self) -> Purpose: ...

    @property
    def infrastructure(self) -> bool: ...

    @property
    def metrics(self) -> Mapping[str, float | None]: ...

    @property
    def methods(self) -> Mapping[str, Method]: ...


T = TypeVar("T", bound=Trial)


@dataclass(frozen=True)
class Candidate:
    """A layout as it is ranked: one explored trial, or the mean of a finalist's trials.

    `intervals` has, for each metric that several trials have, half the width of the 95% confidence interval of its
    mean, in the metric's unit. `purpose` is that of the trials, to explore or to measure a finalist. `borrowed` are the
    metrics that none of a finalist's trials has, which are those of the trial that explored it.
    """

    layout: Layout
    metrics: dict[str, float]
    methods: dict[str, Method]
    trials: tuple[Trial, ...]
    purpose: Purpose = Purpose.SEARCH
    intervals: dict[str, float] = field(default_factory=dict)
    borrowed: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return self.layout.label

    @property
    def trial_id(self) -> str:
        """Id of the first of its trials."""
        return self.trials[0].trial_id

    @property
    def confirmed(self) -> bool:
        """Whether it was measured again as a finalist, or in pairs as a placement of one."""
        return self.purpose in (Purpose.FINALIST, Purpose.PLACEMENT)

    def beaten_by(self, other: Candidate) -> bool:
        """Whether the other is a placement of this layout that proved better than it, in pairs."""
        return other.purpose == Purpose.PLACEMENT and plain(other.layout) == self.layout != other.layout

    def why_missing(self, metric: str) -> str | None:
        """What the record says of the first of its trials that lacks a metric and says anything."""
        lacking = (trial.cause for trial in self.trials if trial.metrics.get(metric) is None)
        return next(filter(None, lacking), None)


def explored(trials: Iterable[Trial]) -> list[Candidate]:
    """The trials of the search itself that ended well, each as it was measured then."""
    return [
        Candidate(trial.layout, _present(trial), dict(trial.methods), (trial,))
        for trial in trials
        if trial.status == Status.OK and trial.purpose == Purpose.SEARCH
    ]


def candidates(trials: Sequence[Trial]) -> list[Candidate]:
    """All that is ranked: the explored trials and, in place of those of layouts that were measured again, the means.

    A metric that none of a layout's repeats has stays as it was explored. Trials of other purposes, failed ones and
    those that were stopped early take no part. Placements do that were kept (`service.answers.placements`).
    """
    repeats, once = finalists(trials), explored(trials)
    again = {layout: [trial for trial in runs if trial.status == Status.OK] for layout, runs in repeats.items()}
    first = {one.layout: one for one in once}
    means = [_completed(_mean(runs), first.get(layout)) for layout, runs in again.items() if runs]
    placed = [_mean(one.trials) for one in placements(trials) if one.kept]
    return [*(one for one in once if not again.get(one.layout)), *means, *placed]


def finalists(trials: Iterable[T]) -> dict[Layout, list[T]]:
    """The trials of each layout that was measured again, as far as they have ended.

    Failed ones are included, but not those that the machines failed, which are run again.
    """
    repeats: dict[Layout, list[T]] = {}
    for trial in trials:
        over = trial.status not in ("running", "stopped")
        if trial.purpose == Purpose.FINALIST and over and not trial.infrastructure:
            repeats.setdefault(trial.layout, []).append(trial)
    return repeats


def _mean(trials: Sequence[Trial]) -> Candidate:
    """Repeats of one layout as one candidate; each metric over the trials whose method is the least in doubt."""
    first, measured = trials[0], [_present(trial) for trial in trials]
    metrics, methods, intervals = {}, {}, {}
    for metric in dict.fromkeys(name for values in measured for name in values):
        having = [
            (Doubt.of(trial.methods.get(metric)), values[metric], trial.methods.get(metric))
            for trial, values in zip(trials, measured, strict=True)
            if metric in values
        ]
        least = min(doubt for doubt, _, _ in having)
        alike = [(value, method) for doubt, value, method in having if doubt is least]
        metrics[metric], half_width = confidence_interval([value for value, _ in alike])
        if half_width is not None:
            intervals[metric] = half_width
        if method := alike[0][1]:
            methods[metric] = method
    return Candidate(first.layout, metrics, methods, tuple(trials), first.purpose, intervals)


def _completed(mean: Candidate, once: Candidate | None) -> Candidate:
    """The mean of a finalist's trials, with the metrics of the trial that explored it where none of them has any."""
    if once is None:
        return mean
    borrowed = {name: value for name, value in once.metrics.items() if name in METRICS and name not in mean.metrics}
    how = {name: once.methods[name] for name in borrowed if name in once.methods}
    return replace(mean, metrics=mean.metrics | borrowed, methods=mean.methods | how, borrowed=tuple(borrowed))


def _present(trial: Trial) -> dict[str, float]:
    """The metrics that are not missing."""
    return {metric: value for metric, value in trial.metrics.items() if value is not None}
