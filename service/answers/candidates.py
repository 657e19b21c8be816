"""What is ranked: layouts as they were measured, once or several times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from search_spaces.layout import Layout
from service.record.results import SearchRecord, TrialRecord

CONFIDENCE = 0.95
MEASURED = "measured"  # by a counter, by sampling, integrated from samples, or in a short trial
METHODS = (MEASURED, "extrapolated", "estimated")


@dataclass(frozen=True)
class Candidate:
    """A layout as it is ranked: one explored trial, or the mean of a finalist's trials.

    `intervals` has, for each metric that several trials have, half the width of the 95% confidence interval of its
    mean, in the metric's unit. `purpose` is that of the trials, `search` or `finalist`.
    """

    label: str
    layout: Layout
    metrics: dict[str, float]
    methods: dict[str, str]
    trials: tuple[TrialRecord, ...]
    purpose: str = "search"
    intervals: dict[str, float] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(tuple(trial.trial_id for trial in self.trials))

    @property
    def trial_id(self) -> str:
        """Id of the first of its trials."""
        return self.trials[0].trial_id

    @property
    def confirmed(self) -> bool:
        """Whether it was measured again as a finalist."""
        return self.purpose == "finalist"


def explored(search: SearchRecord) -> list[Candidate]:
    """The trials of the search itself that ended well, each as it was measured then."""
    return [
        Candidate(trial.label, trial.layout, trial.metrics, trial.methods, (trial,))
        for trial in search.trials
        if trial.status == "ok" and trial.purpose == "search"
    ]


def candidates(search: SearchRecord) -> list[Candidate]:
    """All that is ranked: the explored trials and, in place of those of layouts that were measured again, the means.

    Trials of other purposes, failed ones and those that were stopped early take no part.
    """
    repeats = finalists(search)
    again = {layout: [trial for trial in trials if trial.status == "ok"] for layout, trials in repeats.items()}
    once = [one for one in explored(search) if not again.get(one.layout)]
    return [*once, *(_mean(trials) for trials in again.values() if trials)]


def finalists(search: SearchRecord) -> dict[Layout, list[TrialRecord]]:
    """The trials of each layout that was measured again, as far as they have ended.

    Failed ones are included, but not those that the machines failed, which are run again.
    """
    repeats: dict[Layout, list[TrialRecord]] = {}
    for trial in search.trials:
        if trial.purpose == "finalist" and trial.status not in ("running", "stopped") and not trial.infrastructure:
            repeats.setdefault(trial.layout, []).append(trial)
    return repeats


def confidence_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of some measurements and half the width of its 95% confidence interval, None of a single one.

    By Student's t, as few measurements are all that there are.
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    from scipy.special import stdtrit

    t = stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)
    return mean, float(t * np.std(values, ddof=1) / math.sqrt(len(values)))


def _mean(trials: Sequence[TrialRecord]) -> Candidate:
    """Repeats of one layout as one candidate; each metric over the trials whose method is the least in doubt."""
    first = trials[0]
    metrics, methods, intervals = {}, {}, {}
    for metric in dict.fromkeys(name for trial in trials for name in trial.metrics):
        having = [trial for trial in trials if metric in trial.metrics]
        least = min(doubt(trial.methods.get(metric)) for trial in having)
        alike = [trial for trial in having if doubt(trial.methods.get(metric)) == least]
        metrics[metric], half_width = confidence_interval([trial.metrics[metric] for trial in alike])
        if half_width is not None:
            intervals[metric] = half_width
        if method := alike[0].methods.get(metric):
            methods[metric] = method
    label = first.layout.label
    return Candidate(label, first.layout, metrics, methods, tuple(trials), first.purpose, intervals)


def doubt(method: str | None) -> int:
    """Place in `METHODS` of how a figure came about."""
    return METHODS.index(method) if method in METHODS else 0
