"""Answers about searches, from MLflow alone: no Ray, no torch, from any process that reaches the tracking store."""

from __future__ import annotations

import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from search_spaces.config import TrialConfig
from service import store
from service.errors import InputError
from trainables import deepspeed_config, megatron_args

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_CONDITION = re.compile(r"^\s*(\w+)\s*(<=|>=|==|<|>)\s*(\S+)\s*$")
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_MEASURED = "measured"  # by a counter, by sampling, or integrated from samples
_METHODS = (_MEASURED, "extrapolated", "estimated")
_FROM = {"extrapolated": " from models of fewer layers", "estimated": ""}
_NAMED = 5  # how many known searches an error message lists


@dataclass(frozen=True)
class TrialRecord:
    """One trial as recorded. A metric that is missing is absent from `metrics`.

    `status` is one of `trainables.result.STATUSES`, or `running`, or `stopped` when the search ended before the trial.
    `methods` says how energy and throttle metrics were obtained: counter, integrated, sampled or estimated; and which
    metrics are extrapolated from depth proxies.
    """

    trial_id: str
    label: str
    config: dict[str, Any]
    status: str
    cause: str | None
    metrics: dict[str, float]
    methods: dict[str, str]
    run_id: str


@dataclass(frozen=True)
class SearchRecord:
    """One search as recorded. `params` are its facts (model, data, ...); `objectives` maps metric to direction."""

    id: str
    name: str
    status: str
    started: datetime
    objectives: dict[str, str]
    constraints: tuple[str, ...]
    params: dict[str, Any]
    environment: dict[str, str]
    notices: tuple[str, ...]
    run_id: str
    trials: tuple[TrialRecord, ...]


@dataclass(frozen=True)
class SearchInfo:
    """One line of a listing.

    `best` has the best value of each objective; those in `estimated` and `extrapolated` are not measured.
    """

    id: str
    name: str
    status: str
    started: datetime
    trials: dict[str, int]
    best: dict[str, float]
    estimated: tuple[str, ...]
    extrapolated: tuple[str, ...]
    model: str
    accelerator: str
    data: str

    def method(self, metric: str) -> str | None:
        """How an objective's values came about, if they are not measured."""
        if metric in self.estimated:
            return "estimated"
        return "extrapolated" if metric in self.extrapolated else None


class Results:
    """Reads the record at `tracking_uri`. Never writes, and never creates a database that is not there."""

    def __init__(self, tracking_uri: str) -> None:
        self.tracking_uri = tracking_uri

    def searches(self) -> list[SearchInfo]:
        """All searches, the latest first. Raises `InputError` if the store cannot be read."""
        children: dict[str, list[Run]] = {}
        for run in self._find({store.ROLE: store.TRIAL}):
            children.setdefault(run.data.tags[store.PARENT], []).append(run)
        parents = self._find({store.ROLE: store.SEARCH})
        return [describe(_search(run, children.get(run.info.run_id, []))) for run in reversed(parents)]

    def search(self, key: str) -> SearchRecord:
        """The search with this id, or with the only id that starts so. Raises `InputError` for none or several."""
        parents = {run.data.tags[store.SEARCH_ID]: run for run in self._find({store.ROLE: store.SEARCH})}
        matches = store.matching(key, parents)
        if len(matches) > 1:
            raise InputError(f"search {key!r} is ambiguous: {_some(matches)}")
        if not matches:
            known = f"known: {_some(list(parents))}" if parents else "there are none"
            raise InputError(f"search {key!r} is unknown at {store.shown(self.tracking_uri)}; {known}")
        parent = parents[matches[0]]
        return _search(parent, self._find({store.PARENT: parent.info.run_id}))

    @cached_property
    def _client(self) -> MlflowClient:
        return store.open_client(self.tracking_uri)

    def _find(self, tags: Mapping[str, str]) -> list[Run]:
        """Runs with these tags, oldest first; none where nothing was ever recorded."""
        database = store.sqlite_file(self.tracking_uri)
        if database is not None and not database.exists():
            return []
        client = self._client
        with store.readable(self.tracking_uri):
            experiment = client.get_experiment_by_name(store.EXPERIMENT)
            if experiment is None:
                return []
            return list(store.find_runs(client, experiment.experiment_id, tags))


def describe(search: SearchRecord) -> SearchInfo:
    """The search as one line of a listing."""
    best: dict[str, float] = {}
    for metric, direction in search.objectives.items():
        values = _comparable(search, metric)
        reached = [values[trial.trial_id] for trial in _admitted(search) if trial.trial_id in values]
        if reached:
            best[metric] = max(reached) if direction == "maximize" else min(reached)
    return SearchInfo(
        id=search.id,
        name=search.name,
        status=search.status,
        started=search.started,
        trials=dict(Counter(trial.status for trial in search.trials)),
        best=best,
        estimated=tuple(metric for metric in best if _method(search, metric) == "estimated"),
        extrapolated=tuple(metric for metric in best if _method(search, metric) == "extrapolated"),
        **{fact: str(search.params.get(fact, "")) for fact in ("model", "accelerator", "data")},
    )


def pareto(search: SearchRecord) -> list[TrialRecord]:
    """The trials that no other beats on all objectives at once, best on the first objective first.

    Only trials that ended well and keep the search's constraints take part. An objective that no trial has is left out;
    a trial that lacks one which others have cannot be on the front. Equal trials are all on it. See `notices`.
    """
    objectives = _ranked(search)
    trials = [trial for trial in _admitted(search) if all(trial.trial_id in values for values, _ in objectives)]
    if not objectives or not trials:
        return []
    costs = np.array([[sign * values[trial.trial_id] for values, sign in objectives] for trial in trials])
    return [trials[i] for i in pareto_front(costs)]


def pareto_front(costs: np.ndarray) -> list[int]:
    """Rows of `costs` [n, objectives], all to be minimised, that no other row dominates; in lexicographic order.

    Row a dominates row b if it is nowhere larger and somewhere smaller. In lexicographic order whatever dominates
    a row comes before it, so each row need only be held against the front so far.
    """
    order = np.lexsort(costs.T[::-1])
    front = np.empty_like(costs)
    members: list[int] = []
    for i in order:
        others, row = front[: len(members)], costs[i]
        if not ((others <= row).all(axis=1) & (others < row).any(axis=1)).any():
            front[len(members)] = row
            members.append(int(i))
    return members


def best(
    search: SearchRecord,
    maximize: str | None = None,
    minimize: str | None = None,
    where: Sequence[str] = (),
) -> TrialRecord:
    """The best trial on one metric among those for which every condition of `where` ('metric<=number') holds.

    Without a metric, the best point of the Pareto front on the search's first objective. Ties are settled by the
    other objectives in their order. Raises `InputError` for an unknown metric, a malformed condition, or if no trial
    is left.
    """
    if maximize and minimize:
        raise InputError("best: give one of maximize and minimize")
    objectives = _ranked(search)
    required = len(objectives)
    if metric := maximize or minimize:
        _check_known(search, metric)
        objectives = [(_comparable(search, metric), -1.0 if maximize else 1.0), *objectives]
        required = 1
    trials = [
        trial
        for trial in _admitted(search, where)
        if required and all(trial.trial_id in values for values, _ in objectives[:required])
    ]
    if not trials:
        among = f" with {' and '.join(where)}" if where else ""
        raise InputError(f"search {search.id}: no trial to choose from{among}; {_count(search.trials)}")

    def cost(trial: TrialRecord) -> list[float]:
        return [sign * values[trial.trial_id] if trial.trial_id in values else math.inf for values, sign in objectives]

    return min(trials, key=cost)


def notices(search: SearchRecord, metric: str | None = None) -> list[str]:
    """What a reader of the ranking must know: what could not be compared, and what is estimated.

    Covers the search's objectives and constraints, and `metric` where `best` was asked for another one.
    """
    ok = _ok(search)
    told = []
    for name in dict.fromkeys([*search.objectives, *([metric] if metric else [])]):
        having = [trial for trial in ok if name in trial.metrics]
        ranked = _comparable(search, name)
        left_out = Counter(_METHODS[_doubt(trial, name)] for trial in having if trial.trial_id not in ranked)
        if not having:
            told += [f"{name} was not measured by any trial: ranked without it"] if ok else []
        elif (method := _method(search, name)) != _MEASURED:
            told.append(f"{name} is {method}{_FROM[method]}, not measured")
        for method, count in left_out.items():
            told.append(f"{name} is {method} on {count} of {len(ok)} trials: these are not ranked")
        if having and len(having) < len(ok):
            told.append(f"{name} is missing on {len(ok) - len(having)} of {len(ok)} trials: these are not ranked")
    for text in search.constraints:
        if ok and not _comparable(search, _condition(text)[0]):
            told.append(f"constraint {text} was not applied: no trial has this metric")
    return told


def export(search: SearchRecord, trial: TrialRecord) -> dict[str, Any]:
    """All that is needed to launch the trial's configuration and to judge it, JSON-safe."""
    return {
        "search_id": search.id,
        "search": search.name,
        "trial_id": trial.trial_id,
        "workload": search.params,
        "config": trial.config,
        **_launch(TrialConfig.from_dict(trial.config)),
        "metrics": trial.metrics,
        "methods": trial.methods,
    }


def _launch(config: TrialConfig) -> dict[str, Any]:
    """The layout as its framework takes it, and what of it the framework has no word for."""
    if config.engine == "deepspeed":
        return {
            "deepspeed": deepspeed_config.configuration(config),
            "not_expressible": deepspeed_config.not_expressible(config),
        }
    return {"megatron_lm": megatron_args.arguments(config), "not_expressible": megatron_args.not_expressible(config)}


def _ok(search: SearchRecord) -> list[TrialRecord]:
    return [trial for trial in search.trials if trial.status == "ok"]


def _comparable(search: SearchRecord, metric: str) -> dict[str, float]:
    """Trial id -> value over the trials that ended well; only those of the method that is the least in doubt."""
    having = [trial for trial in _ok(search) if metric in trial.metrics]
    least = min((_doubt(trial, metric) for trial in having), default=0)
    return {trial.trial_id: trial.metrics[metric] for trial in having if _doubt(trial, metric) == least}


def _doubt(trial: TrialRecord, metric: str) -> int:
    """Place in `_METHODS` of how the trial's figure came about."""
    method = trial.methods.get(metric)
    return _METHODS.index(method) if method in _METHODS else 0


def _method(search: SearchRecord, metric: str) -> str:
    """The one of `_METHODS` that the comparable values of a metric have in common."""
    return _METHODS[min((_doubt(trial, metric) for trial in _ok(search) if metric in trial.metrics), default=0)]


def _ranked(search: SearchRecord) -> list[tuple[dict[str, float], float]]:
    """For each objective that can be ranked: its comparable values, and the sign that makes smaller better."""
    signed = [(_comparable(search, m), -1.0 if way == "maximize" else 1.0) for m, way in search.objectives.items()]
    return [(values, sign) for values, sign in signed if values]


def _admitted(search: SearchRecord, where: Sequence[str] = ()) -> list[TrialRecord]:
    """Trials that ended well for which the search's constraints hold, as far as measured, and all of `where`."""
    trials = _ok(search)
    for text in where:
        _check_known(search, _condition(text)[0])
    for text in [*search.constraints, *where]:
        metric, holds, bound = _condition(text)
        values = _comparable(search, metric)
        if values:
            trials = [t for t in trials if t.trial_id in values and holds(values[t.trial_id], bound)]
    return trials


def _condition(text: str) -> tuple[str, Callable[[float, float], bool], float]:
    match = _CONDITION.match(text)
    try:
        if match and not math.isnan(bound := float(match[3])):
            return match[1], _HOLDS[match[2]], bound
    except ValueError:
        pass
    raise InputError(f"condition {text!r} is not 'METRIC<=NUMBER'; operators: {' '.join(_HOLDS)}")


def _check_known(search: SearchRecord, metric: str) -> None:
    known = sorted({name for trial in _ok(search) for name in trial.metrics})
    if metric not in known:
        recorded = f"recorded: {', '.join(known)}" if known else f"{_count(search.trials)}"
        raise InputError(f"search {search.id} has no metric {metric!r}; {recorded}")


def _count(trials: Sequence[TrialRecord]) -> str:
    counts = Counter(trial.status for trial in trials)
    return "its trials: " + (", ".join(f"{n} {status}" for status, n in counts.items()) or "none")


def _some(ids: Sequence[str]) -> str:
    """The latest few of ids that are oldest first."""
    more = len(ids) - _NAMED
    return ", ".join(ids[::-1][:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _search(run: Run, children: Sequence[Run]) -> SearchRecord:
    tags, params = run.data.tags, run.data.params
    return SearchRecord(
        id=tags[store.SEARCH_ID],
        name=run.info.run_name,
        status=tags[store.STATUS],
        started=datetime.fromtimestamp(run.info.start_time / 1000, UTC),
        objectives=json.loads(tags[store.OBJECTIVES]),
        constraints=tuple(json.loads(tags[store.CONSTRAINTS])),
        params={k: store.from_param(v) for k, v in params.items() if not k.startswith(store.ENVIRONMENT)},
        environment={
            k.removeprefix(store.ENVIRONMENT): v for k, v in params.items() if k.startswith(store.ENVIRONMENT)
        },
        notices=tuple(tags.get(store.NOTICES, "").splitlines()),
        run_id=run.info.run_id,
        trials=tuple(_trial(child) for child in children),
    )


def _trial(run: Run) -> TrialRecord:
    tags = run.data.tags
    return TrialRecord(
        trial_id=tags[store.TRIAL_ID],
        label=run.info.run_name,
        config={k: store.from_param(v) for k, v in run.data.params.items() if not k.startswith(store.ENVIRONMENT)},
        status=tags[store.STATUS],
        cause=tags.get(store.CAUSE),
        metrics={k: v for k, v in run.data.metrics.items() if "/" not in k and math.isfinite(v)},
        methods={k.removeprefix(store.METHOD): v for k, v in tags.items() if k.startswith(store.METHOD)},
        run_id=run.info.run_id,
    )
