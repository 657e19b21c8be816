"""The record of searches, read from MLflow alone: no Ray, no torch, wherever the tracking store can be reached."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from io import BytesIO
from typing import TYPE_CHECKING, Any

from search_spaces.layout import Layout
from service.errors import InputError
from service.goals import Goals, parse_condition
from service.metrics import Direction, Method
from service.record import store
from service.record.heartbeat import Heartbeat
from service.record.runs import Run, Runs
from service.record.standing import Standing
from service.result import Purpose, Straggler, TrialResult

if TYPE_CHECKING:
    import pyarrow as pa

_NAMED = 5  # how many known searches an error message lists


@dataclass(frozen=True)
class TrialRecord:
    """One trial as recorded. A metric that is missing is absent from `metrics`.

    `status` is a `trainables.status.Status`, or `running`, or `stopped` when the search ended before the trial.
    `methods` says how metrics were obtained where that is not plain: of energy and throttling, and what is extrapolated
    from depth proxies or short trials. `infrastructure`: whether a failure was the machines', after which the layout is
    run again. `straggler`: the rank for which the others waited, if one stood out. `beside`: whether other trials of
    the search ran on its nodes meanwhile, or another search had workers there, None in records made before it was kept.
    `ended` is None while the trial runs. `facts` are those of the search which `store.FACTS` names.
    """

    trial_id: str
    label: str
    layout: Layout
    status: str
    cause: str | None
    metrics: dict[str, float]
    methods: dict[str, Method]
    run_id: str
    purpose: Purpose = Purpose.SEARCH
    infrastructure: bool = False
    straggler: Straggler | None = None
    beside: bool | None = None
    started: datetime | None = None
    ended: datetime | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; the layout is under `config`."""
        values = asdict(self)
        del values["layout"]
        times = {name: time and time.isoformat() for name, time in (("started", self.started), ("ended", self.ended))}
        return values | times | {"config": self.layout.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrialRecord:
        """Inverse of `to_dict`, also after a round trip through JSON. Raises as `Layout.from_dict` does, `KeyError` for
        what is not there and ValueError for what is nothing of its kind."""
        times = {name: datetime.fromisoformat(values[name]) if values[name] else None for name in ("started", "ended")}
        return cls(
            **{name: value for name, value in values.items() if name != "config"}
            | times
            | {
                "layout": Layout.from_dict(values["config"]),
                "metrics": {name: float(value) for name, value in values["metrics"].items()},
                "methods": {name: Method(how) for name, how in values["methods"].items()},
                "purpose": Purpose(values["purpose"]),
                "straggler": Straggler.from_dict(slow) if (slow := values.get("straggler")) else None,
            }
        )


@dataclass(frozen=True)
class SearchRecord:
    """One search as recorded. `params` are its facts (model, data, ...); `objectives` maps metric to direction.

    `status` is what its driver last wrote: `queued` until a gang is up, `running`, `finished`, `stopped` or `failed`.
    Whether a driver that did not write the latter three is alive, `heartbeat` tells; older records have none.
    `standing` is where it stands in the queue of its cluster while it has no gang, None if it does not wait. `tags` and
    `note` are what people said of it.
    """

    id: str
    name: str
    status: str
    started: datetime
    objectives: dict[str, Direction]
    constraints: tuple[str, ...]
    params: dict[str, Any]
    environment: dict[str, str]
    notices: tuple[str, ...]
    run_id: str
    trials: tuple[TrialRecord, ...]
    heartbeat: Heartbeat | None = None
    standing: Standing | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    note: str | None = None

    @cached_property
    def goals(self) -> Goals:
        """The objectives and the constraints. Raises `InputError` for a constraint that is none."""
        return Goals(self.objectives, tuple(map(parse_condition, self.constraints)))


class Results:
    """Reads the record at `tracking_uri`. Never writes, and never creates a database that is not there."""

    def __init__(self, tracking_uri: str) -> None:
        self.tracking_uri = tracking_uri
        self._runs = Runs(tracking_uri)

    def searches(self) -> list[SearchRecord]:
        """All searches, the latest first. Raises `InputError` if the store cannot be read."""
        children: dict[str, list[Run]] = {}
        for run in self._runs.find({store.ROLE: store.TRIAL}):
            children.setdefault(run.tags[store.PARENT], []).append(run)
        parents = self._runs.find({store.ROLE: store.SEARCH})
        return [_search(run, children.get(run.id, [])) for run in reversed(parents)]

    def finished(self, params: Mapping[str, Any]) -> Iterator[SearchRecord]:
        """The searches that ran to their end and have these `params`, the latest first; each is read when it is next.

        Raises `InputError` if the store cannot be read.
        """
        for run in reversed(self._runs.find({store.ROLE: store.SEARCH, store.STATUS: "finished"}, params)):
            yield _search(run, self._runs.find({store.PARENT: run.id}))

    def search(self, key: str) -> SearchRecord:
        """The search with this id, or with the only id that starts so. Raises `InputError` for none or several."""
        parents = {run.tags[store.SEARCH_ID]: run for run in self._runs.find({store.ROLE: store.SEARCH})}
        matches = store.matching(key, parents)
        if len(matches) > 1:
            raise InputError(f"search {key!r} is ambiguous: {_some(matches)}")
        if not matches:
            known = f"known: {_some(list(parents))}" if parents else "there are none"
            raise InputError(f"search {key!r} is unknown at {store.shown(self.tracking_uri)}; {known}")
        parent = parents[matches[0]]
        return _search(parent, self._runs.find({store.PARENT: parent.id}))

    def spec_of(self, search: SearchRecord) -> str:
        """The YAML of the search's spec. Raises `InputError` if the search has none, or none that is in reach."""
        text = self._runs.artifact(search.run_id, store.SPEC)
        if text is None:
            raise InputError(f"search {search.id} has no {store.SPEC} that can be read from here")
        return text.decode()

    def result_of(self, trial: TrialRecord) -> TrialResult | None:
        """All that a trial came to, its ranks included; None if that is not in reach, or of a form unknown here.

        Raises `InputError` if the store cannot be read.
        """
        text = self._runs.artifact(trial.run_id, store.RESULT)
        with suppress(KeyError, TypeError, ValueError):
            return None if text is None else TrialResult.from_dict(json.loads(text))
        return None

    def samples_of(self, trial: TrialRecord) -> pa.Table | None:
        """What telemetry saw in a trial's windows, by `telemetry.samples.SCHEMA`; None as for `result_of`.

        Raises `InputError` if the store cannot be read.
        """
        from telemetry.store import read_samples

        content = self._runs.artifact(trial.run_id, store.SAMPLES)
        with suppress(ValueError):
            return None if content is None else read_samples(BytesIO(content))
        return None


def _some(ids: Sequence[str]) -> str:
    """The latest few of ids that are oldest first."""
    more = len(ids) - _NAMED
    return ", ".join(ids[::-1][:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _search(run: Run, children: Sequence[Run]) -> SearchRecord:
    tags = run.tags
    params = {k: store.from_param(v) for k, v in run.params.items() if not k.startswith(store.ENVIRONMENT)}
    facts = {name: params[name] for name in store.FACTS if name in params}
    return SearchRecord(
        id=tags[store.SEARCH_ID],
        name=run.name,
        status=tags[store.STATUS],
        started=_time(run.started_ms),
        objectives={metric: Direction(way) for metric, way in json.loads(tags[store.OBJECTIVES]).items()},
        constraints=tuple(json.loads(tags[store.CONSTRAINTS])),
        params=params,
        environment={
            k.removeprefix(store.ENVIRONMENT): v for k, v in run.params.items() if k.startswith(store.ENVIRONMENT)
        },
        notices=tuple(tags.get(store.NOTICES, "").splitlines()),
        run_id=run.id,
        # A run is there for a moment before its parameters are.
        trials=tuple(_trial(child, facts) for child in children if "engine" in child.params),
        heartbeat=Heartbeat.parse(tags[store.HEARTBEAT]) if store.HEARTBEAT in tags else None,
        standing=Standing.parse(tags.get(store.STANDING, "")),
        tags={key: value for key, value in sorted(tags.items()) if not key.startswith(store.RESERVED)},
        note=tags.get(store.NOTE) or None,
    )


def _trial(run: Run, facts: dict[str, Any]) -> TrialRecord:
    tags, layout = run.tags, Layout.from_dict({k: store.from_param(v) for k, v in run.params.items()})
    return TrialRecord(
        trial_id=tags[store.TRIAL_ID],
        label=layout.label,
        layout=layout,
        status=tags[store.STATUS],
        cause=tags.get(store.CAUSE),
        metrics={name: v for k, v in run.metrics.items() if (name := store.metric_name(k)) and math.isfinite(v)},
        methods={k.removeprefix(store.METHOD): Method(v) for k, v in tags.items() if k.startswith(store.METHOD)},
        run_id=run.id,
        purpose=Purpose(tags.get(store.PURPOSE, Purpose.SEARCH)),
        infrastructure=tags.get(store.INFRASTRUCTURE) == "true",
        straggler=Straggler.from_dict(json.loads(tags[store.STRAGGLER])) if store.STRAGGLER in tags else None,
        beside={"true": True, "false": False}.get(tags.get(store.BESIDE, "")),
        started=_time(run.started_ms),
        ended=_time(run.ended_ms) if run.ended_ms else None,
        facts=facts,
    )


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)
