"""The record of searches, read from MLflow alone: no Ray, no torch, wherever the tracking store can be reached."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.layout import Layout
from service.errors import InputError
from service.goals import Goals, parse_condition
from service.metrics import Direction, Method
from service.record import store
from service.record.heartbeat import Heartbeat
from service.result import Purpose

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_NAMED = 5  # how many known searches an error message lists


@dataclass(frozen=True)
class TrialRecord:
    """One trial as recorded. A metric that is missing is absent from `metrics`.

    `status` is a `trainables.status.Status`, or `running`, or `stopped` when the search ended before the trial.
    `methods` says how metrics were obtained where that is not plain: of energy and throttling, and what is extrapolated
    from depth proxies or short trials. `infrastructure`: whether a failure was the machines', after which the layout is
    run again. `ended` is None while the trial runs.
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

    def searches(self) -> list[SearchRecord]:
        """All searches, the latest first. Raises `InputError` if the store cannot be read."""
        children: dict[str, list[Run]] = {}
        for run in self._find({store.ROLE: store.TRIAL}):
            children.setdefault(run.data.tags[store.PARENT], []).append(run)
        parents = self._find({store.ROLE: store.SEARCH})
        return [_search(run, children.get(run.info.run_id, [])) for run in reversed(parents)]

    def finished(self, params: Mapping[str, Any]) -> Iterator[SearchRecord]:
        """The searches that ran to their end and have these `params`, the latest first; each is read when it is next.

        Raises `InputError` if the store cannot be read.
        """
        for run in reversed(self._find({store.ROLE: store.SEARCH, store.STATUS: "finished"}, params)):
            yield _search(run, self._find({store.PARENT: run.info.run_id}))

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

    def spec_of(self, search: SearchRecord) -> str:
        """The YAML of the search's spec. Raises `InputError` if the search has none, or none that is in reach."""
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        with store.readable(self.tracking_uri), tempfile.TemporaryDirectory() as folder:
            if not any(file.path == store.SPEC for file in self._client.list_artifacts(search.run_id)):
                raise InputError(f"search {search.id} has no {store.SPEC} that can be read from here")
            return Path(self._client.download_artifacts(search.run_id, store.SPEC, folder)).read_text()

    @cached_property
    def _client(self) -> MlflowClient:
        return store.open_client(self.tracking_uri)

    def _find(self, tags: Mapping[str, str], params: Mapping[str, Any] | None = None) -> list[Run]:
        """Runs with these tags and parameters, oldest first; none where nothing was ever recorded."""
        database = store.sqlite_file(self.tracking_uri)
        if database is not None and not database.exists():
            return []
        client = self._client
        with store.readable(self.tracking_uri):
            experiment = client.get_experiment_by_name(store.EXPERIMENT)
            if experiment is None:
                return []
            return list(store.find_runs(client, experiment.experiment_id, tags, params))


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
        started=_time(run.info.start_time),
        objectives={metric: Direction(way) for metric, way in json.loads(tags[store.OBJECTIVES]).items()},
        constraints=tuple(json.loads(tags[store.CONSTRAINTS])),
        params={k: store.from_param(v) for k, v in params.items() if not k.startswith(store.ENVIRONMENT)},
        environment={
            k.removeprefix(store.ENVIRONMENT): v for k, v in params.items() if k.startswith(store.ENVIRONMENT)
        },
        notices=tuple(tags.get(store.NOTICES, "").splitlines()),
        run_id=run.info.run_id,
        # A run is there for a moment before its parameters are.
        trials=tuple(_trial(child) for child in children if "engine" in child.data.params),
        heartbeat=Heartbeat.parse(tags[store.HEARTBEAT]) if store.HEARTBEAT in tags else None,
    )


def _trial(run: Run) -> TrialRecord:
    tags = run.data.tags
    return TrialRecord(
        trial_id=tags[store.TRIAL_ID],
        label=run.info.run_name,
        layout=Layout.from_dict({k: store.from_param(v) for k, v in run.data.params.items()}),
        status=tags[store.STATUS],
        cause=tags.get(store.CAUSE),
        metrics={k: v for k, v in run.data.metrics.items() if "/" not in k and math.isfinite(v)},
        methods={k.removeprefix(store.METHOD): Method(v) for k, v in tags.items() if k.startswith(store.METHOD)},
        run_id=run.info.run_id,
        purpose=Purpose(tags.get(store.PURPOSE, Purpose.SEARCH)),
        infrastructure=tags.get(store.INFRASTRUCTURE) == "true",
        started=_time(run.info.start_time),
        ended=_time(run.info.end_time) if run.info.end_time else None,
    )


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)
