"""The record of searches, read from MLflow alone: no Ray, no torch, wherever the tracking store can be reached."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
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
from service.result import Purpose, TrialResult

if TYPE_CHECKING:
    import pyarrow as pa

_NAMED = 5  # how many known searches an error message lists


@dataclass(frozen=True)
class TrialRecord:
    """One trial as recorded. A metric that is missing is absent from `metrics`.

    `status` is a `trainables.status.Status`, or `running`, or `stopped` when the search ended before the trial.
    `methods` says how metrics were obtained where that is not plain: of energy and throttling, and what is extrapolated
    from depth proxies or short trials. `infrastructure`: whether a failure was the machines', after which the layout is
    run again. `beside`: whether other trials of the search ran on its nodes meanwhile, None in records made before it
    was kept. `ended` is None while the trial runs.
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
    beside: bool | None = None
    started: datetime | None = None
    ended: datetime | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; the layout is under `config`."""
        values = asdict(self)
        del values["layout"]
        times = {name: time and time.isoformat() for name, time in (("started", self.started), ("ended", self.ended))}
        return values | times | {"config": self.layout.to_dict()}


@dataclass(frozen=True)
class SearchRecord:
    """One search as recorded. `params` are its facts (model, data, ...); `objectives` maps metric to direction.

    `status` is what its driver last wrote: `queued` until a gang is up, `running`, `finished`, `stopped` or `failed`.
    Whether a driver that did not write the latter three is alive, `heartbeat` tells; older records have none.
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
    tags, params = run.tags, run.params
    return SearchRecord(
        id=tags[store.SEARCH_ID],
        name=run.name,
        status=tags[store.STATUS],
        started=_time(run.started_ms),
        objectives={metric: Direction(way) for metric, way in json.loads(tags[store.OBJECTIVES]).items()},
        constraints=tuple(json.loads(tags[store.CONSTRAINTS])),
        params={k: store.from_param(v) for k, v in params.items() if not k.startswith(store.ENVIRONMENT)},
        environment={
            k.removeprefix(store.ENVIRONMENT): v for k, v in params.items() if k.startswith(store.ENVIRONMENT)
        },
        notices=tuple(tags.get(store.NOTICES, "").splitlines()),
        run_id=run.id,
        # A run is there for a moment before its parameters are.
        trials=tuple(_trial(child) for child in children if "engine" in child.params),
        heartbeat=Heartbeat.parse(tags[store.HEARTBEAT]) if store.HEARTBEAT in tags else None,
    )


def _trial(run: Run) -> TrialRecord:
    tags = run.tags
    return TrialRecord(
        trial_id=tags[store.TRIAL_ID],
        label=run.name,
        layout=Layout.from_dict({k: store.from_param(v) for k, v in run.params.items()}),
        status=tags[store.STATUS],
        cause=tags.get(store.CAUSE),
        metrics={k: v for k, v in run.metrics.items() if "/" not in k and math.isfinite(v)},
        methods={k.removeprefix(store.METHOD): Method(v) for k, v in tags.items() if k.startswith(store.METHOD)},
        run_id=run.id,
        purpose=Purpose(tags.get(store.PURPOSE, Purpose.SEARCH)),
        infrastructure=tags.get(store.INFRASTRUCTURE) == "true",
        beside={"true": True, "false": False}.get(tags.get(store.BESIDE, "")),
        started=_time(run.started_ms),
        ended=_time(run.ended_ms) if run.ended_ms else None,
    )


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)
