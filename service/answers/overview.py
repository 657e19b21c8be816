"""What a reader of a search must know: its line in a listing, and what its ranking leaves open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from service.answers.candidates import Candidate, finalists
from service.answers.ranking import compared, leaders, told, undecided
from service.goals import Comparison
from service.metrics import OFF, Doubt, Method
from service.record.results import SearchRecord
from service.record.standing import Standing
from service.record.store import GOING_ON
from service.result import Purpose
from trainables.status import Status

_FROM = {
    Doubt.SLICED: " from ranks that ran alone",
    Doubt.EXTRAPOLATED: " from models of fewer layers",
    Doubt.ESTIMATED: "",
}

LATE = 0.1
"""Share of a step in which GPUs wait for the CPUs that launch for them, from which on slices of a layout are told to be
unsure. Where GPUs did so in full, slices were 12 to 16% off on average, and 38% at most (docs/slices.md)."""


@dataclass(frozen=True)
class SearchInfo:
    """One line of a listing.

    `trials` counts explored trials by status, `repeats` all others by purpose. `best` has the best value of each
    objective; those in `estimated`, `extrapolated` and `sliced` are not measured, and `undecided` says, a notice each,
    between which layouts it is not plain whose is the best. `cause` is one line on what only the cluster knows of a
    search that was submitted to it: why it failed, or has no record yet. `standing`: its place in the queue of its
    cluster, where it is `queued`. `tags` and `note`: what people said of it.
    """

    id: str
    name: str
    status: str
    started: datetime
    trials: dict[str, int]
    repeats: dict[str, int]
    best: dict[str, float]
    estimated: tuple[str, ...]
    extrapolated: tuple[str, ...]
    sliced: tuple[str, ...]
    undecided: tuple[str, ...]
    model: str
    accelerator: str
    data: str
    cause: str | None = None
    standing: Standing | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self) | {"started": self.started.isoformat()}

    def method(self, metric: str) -> Method | None:
        """How an objective's values came about, if they are not measured."""
        if metric in self.estimated:
            return Method.ESTIMATED
        if metric in self.extrapolated:
            return Method.EXTRAPOLATED
        return Method.SLICE if metric in self.sliced else None


def describe(search: SearchRecord) -> SearchInfo:
    """The search as one line of a listing: `queued` also while it has given its gangs back and waits for others."""
    waits = search.standing is not None and search.status in GOING_ON
    comparison = compared(search)
    best = {metric: one.metrics[metric] for metric, one in leaders(comparison).items()}
    doubts = {metric: comparison.doubt(metric) for metric in best}
    return SearchInfo(
        id=search.id,
        name=search.name,
        status="queued" if waits else search.status,
        started=search.started,
        trials=dict(Counter(trial.status for trial in search.trials if trial.purpose == Purpose.SEARCH)),
        repeats=dict(Counter(trial.purpose for trial in search.trials if trial.purpose != Purpose.SEARCH)),
        best=best,
        estimated=tuple(metric for metric, doubt in doubts.items() if doubt is Doubt.ESTIMATED),
        extrapolated=tuple(metric for metric, doubt in doubts.items() if doubt is Doubt.EXTRAPOLATED),
        sliced=tuple(metric for metric, doubt in doubts.items() if doubt is Doubt.SLICED),
        undecided=tuple(contests(comparison)),
        standing=search.standing if waits else None,
        tags=search.tags,
        note=search.note,
        **{fact: str(search.params.get(fact) or "") for fact in ("model", "accelerator", "data")},
    )


def unrecorded(search_id: str, status: str, started: datetime, cause: str) -> SearchInfo:
    """A search of which there is no record, as one line of a listing."""
    return SearchInfo(search_id, search_id, status, started, {}, {}, {}, (), (), (), (), "", "", "", cause)


def contests(comparison: Comparison[Candidate]) -> list[str]:
    """A notice for each objective on which it is undecided which layout is the best."""
    return [told(metric, pair) for metric, pair in undecided(comparison).items()]


def notices(search: SearchRecord, metrics: Sequence[str] = ()) -> list[str]:
    """What a reader of the ranking must know: what the search had to tell, what could not be compared or told apart,
    and what is estimated.

    Covers the search's objectives and constraints, and `metrics` where `best` was asked for others.
    """
    comparison = compared(search)
    ok = comparison.results
    lines = [*search.notices, *_beside(search), *_repeats(search), *_off(search)]
    if search.params.get("accelerator") != "cpu":
        lines += _late(comparison)
    for name in dict.fromkeys([*search.objectives, *metrics]):
        having = [one for one in ok if name in one.metrics]
        doubt = comparison.doubt(name)
        left_out = Counter(Doubt.of(one.methods.get(name)) for one in having if comparison.value(one, name) is None)
        if doubt is None:
            lines += [f"{name} was not measured by any trial: ranked without it"] if ok else []
        elif doubt is not Doubt.MEASURED:
            lines.append(f"{name} is {doubt}{_FROM[doubt]}, not measured")
        if short := sum(one.methods.get(name) == Method.SHORT for one in having):
            lines.append(f"{name} is extrapolated from steps of fewer microbatches on {short} of {len(ok)} trials")
        for more, count in left_out.items():
            lines.append(f"{name} is {more} on {count} of {len(ok)} trials: these are not ranked")
        if having and len(having) < len(ok):
            lines.append(f"{name} is missing on {len(ok) - len(having)} of {len(ok)} trials: these are not ranked")
    for limit in search.goals.limits:
        if ok and comparison.doubt(limit.metric) is None:
            lines.append(f"constraint {limit.text} was not applied: no trial has this metric")
    asked = dict.fromkeys([*search.objectives, *(limit.metric for limit in search.goals.limits), *metrics])
    lines += [_borrowed(one, name) for one in ok for name in asked if name in one.borrowed]
    return list(dict.fromkeys([*lines, *contests(comparison)]))


def _borrowed(one: Candidate, metric: str) -> str:
    """The notice on a figure that a layout's repeats lack."""
    cause = one.why_missing(metric)
    why = f": {cause}" if cause else ""
    return f"{metric} of {one.label} is that of its first trial alone, as its repeats have none{why}"


def _beside(search: SearchRecord) -> list[str]:
    """Notices on trials that others ran beside: of what measures alone, these are other searches."""
    lines = []
    for purpose, name, others in (
        (Purpose.SEARCH, "trials that explored", "others"),
        (Purpose.FINALIST, "repeats", "another search"),
        (Purpose.CALIBRATION, "trials", "another search"),
    ):
        trials = [trial for trial in search.trials if trial.purpose == purpose and trial.status == Status.OK]
        if beside := sum(trial.beside is True for trial in trials):
            lines.append(f"{beside} of {len(trials)} {name} had {others} beside them on a node, which may disturb")
    return lines


def _repeats(search: SearchRecord) -> list[str]:
    """Notices on what was measured again, and on repeats that failed."""
    repeats = finalists(search.trials)
    good = {layout: sum(trial.status == Status.OK for trial in trials) for layout, trials in repeats.items()}
    counts = sorted({count for count in good.values() if count})
    lines = []
    if counts:
        times = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
        confirmed = sum(count > 0 for count in good.values())
        layouts = f"{confirmed} layout{'s' * (confirmed > 1)}"
        lines.append(f"measured again: {layouts}, {times} times each")
    for layout, trials in repeats.items():
        if failed := Counter(trial.status for trial in trials if trial.status != Status.OK):
            how = ", ".join(f"{count} {status}" for status, count in failed.items())
            lines.append(f"{layout.label}: of {len(trials)} repeats, {how}")
    return lines


def _late(comparison: Comparison[Candidate]) -> list[str]:
    """Notices on the best layouts by slices whose GPUs wait for the CPU: in full that is as late as it is just then."""
    lines = []
    for one in leaders(comparison).values():
        span_s, idle_s = one.metrics.get("breakdown_span_s"), one.metrics.get("breakdown_idle_s", 0.0)
        share = idle_s / span_s if span_s and one.methods.get("breakdown_idle_s") == Method.SLICE else 0.0
        if share >= LATE:
            lines.append(
                f"{one.label} was explored by slices, whose GPUs waited for the CPU for {share:.0%} of a step: "
                "in full such layouts were up to a third faster or slower"
            )
    return lines


def _off(search: SearchRecord) -> list[str]:
    """How far slices were off, as far as layouts that they explored were measured in full."""
    lines = []
    for metric in search.objectives:
        found = [trial.metrics.get(OFF + metric) for trial in search.trials if trial.purpose == Purpose.FINALIST]
        if errors := [error for error in found if error is not None]:
            low, high = min(errors), max(errors)
            span = f"{low:+.1%}" if low == high else f"{low:+.1%} to {high:+.1%}"
            lines.append(f"{metric} by slices was off by {span} on what was measured in full")
    return lines
