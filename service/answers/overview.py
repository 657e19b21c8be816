"""What a reader of a search must know: its line in a listing, and what its ranking leaves open."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from service.answers.candidates import MEASURED, METHODS, candidates, doubt, finalists
from service.answers.ranking import Ranking, noise, parse_condition
from service.record.results import SearchRecord

_FROM = {"extrapolated": " from models of fewer layers", "estimated": ""}


@dataclass(frozen=True)
class SearchInfo:
    """One line of a listing.

    `trials` counts explored trials by status, `repeats` all others by purpose. `best` has the best value of each
    objective; those in `estimated` and `extrapolated` are not measured.
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
    model: str
    accelerator: str
    data: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self) | {"started": self.started.isoformat()}

    def method(self, metric: str) -> str | None:
        """How an objective's values came about, if they are not measured."""
        if metric in self.estimated:
            return "estimated"
        return "extrapolated" if metric in self.extrapolated else None


def describe(search: SearchRecord) -> SearchInfo:
    """The search as one line of a listing."""
    ranked = candidates(search)
    ranking = Ranking(search, [one for one in ranked if one.confirmed] or ranked)
    admitted, best = ranking.admitted(), {}
    for metric, direction in search.objectives.items():
        if ordered := ranking.ordered(admitted, metric, direction):
            best[metric] = ordered[0].metrics[metric]
    return SearchInfo(
        id=search.id,
        name=search.name,
        status=search.status,
        started=search.started,
        trials=dict(Counter(trial.status for trial in search.trials if trial.purpose == "search")),
        repeats=dict(Counter(trial.purpose for trial in search.trials if trial.purpose != "search")),
        best=best,
        estimated=tuple(metric for metric in best if ranking.method(metric) == "estimated"),
        extrapolated=tuple(metric for metric in best if ranking.method(metric) == "extrapolated"),
        **{fact: str(search.params.get(fact, "")) for fact in ("model", "accelerator", "data")},
    )


def notices(search: SearchRecord, metric: str | None = None) -> list[str]:
    """What a reader of the ranking must know: what the search had to tell, what could not be compared or told apart,
    and what is estimated.

    Covers the search's objectives and constraints, and `metric` where `best` was asked for another one.
    """
    ok = candidates(search)
    ranking = Ranking(search, ok)
    told = [*search.notices, *_repeats(search)]
    for name in dict.fromkeys([*search.objectives, *([metric] if metric else [])]):
        having = [one for one in ok if name in one.metrics]
        ranked = ranking.comparable(name)
        left_out = Counter(METHODS[doubt(one.methods.get(name))] for one in having if one not in ranked)
        if not having:
            told += [f"{name} was not measured by any trial: ranked without it"] if ok else []
        elif (method := ranking.method(name)) != MEASURED:
            told.append(f"{name} is {method}{_FROM[method]}, not measured")
        if short := sum(one.methods.get(name) == "short" for one in having):
            told.append(f"{name} is extrapolated from steps of fewer microbatches on {short} of {len(ok)} trials")
        for method, count in left_out.items():
            told.append(f"{name} is {method} on {count} of {len(ok)} trials: these are not ranked")
        if having and len(having) < len(ok):
            told.append(f"{name} is missing on {len(ok) - len(having)} of {len(ok)} trials: these are not ranked")
    for text in search.constraints:
        if ok and not ranking.comparable(parse_condition(text)[0]):
            told.append(f"constraint {text} was not applied: no trial has this metric")
    again = Ranking(search, [one for one in ok if one.confirmed])
    for name, direction in search.objectives.items():
        told += noise(again.ordered(again.admitted(), name, direction), name)
    return told


def _repeats(search: SearchRecord) -> list[str]:
    """Notices on what was measured again, and on repeats that failed."""
    repeats = finalists(search)
    good = {layout: sum(trial.status == "ok" for trial in trials) for layout, trials in repeats.items()}
    counts = sorted({count for count in good.values() if count})
    told = []
    if counts:
        times = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
        confirmed = sum(count > 0 for count in good.values())
        layouts = f"{confirmed} layout{'s' * (confirmed > 1)}"
        told.append(f"measured again: {layouts}, {times} times each; best answers from these alone")
    for layout, trials in repeats.items():
        if failed := Counter(trial.status for trial in trials if trial.status != "ok"):
            how = ", ".join(f"{count} {status}" for status, count in failed.items())
            told.append(f"{layout.label}: of {len(trials)} repeats, {how}")
    return told
