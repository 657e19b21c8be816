"""MLflow's runs as they are read, in most places without MLflow.

Importing any part of MLflow takes seconds of CPU time, for which whoever asks for an answer would wait. So the tables
of a SQLite file are read as they are, and a server is asked by its REST API. What cannot be read so is left to MLflow's
own client: another database, tables that are not known here, a server that wants more than a user or a token.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote, unquote, urlsplit

from service.home import Home
from service.record import store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from requests import Response, Session

_LOCKED_S = 5.0  # how long a SQLite file may be locked by who writes it
_ANSWER_S = 120.0  # MLflow's own bound on an answer
_PAGE = 1000  # runs in one answer
_SETTINGS = ("MLFLOW_TRACKING_", "MLFLOW_WORKSPACE")  # how variables begin that say how a server is asked
_USER, _PASSWORD, _TOKEN = (f"MLFLOW_TRACKING_{name}" for name in ("USERNAME", "PASSWORD", "TOKEN"))
_UNEXPECTED = (sqlite3.Error, OSError, LookupError, TypeError, ValueError)  # OSError: also what `requests` raises

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A run of the experiment. Times are in ms since 1970; `ended_ms` is None while it runs."""

    id: str
    name: str
    started_ms: int
    ended_ms: int | None
    tags: dict[str, str]
    params: dict[str, str]
    metrics: dict[str, float]


class Runs:
    """The runs at `tracking_uri`. Never writes, and never creates a database that is not there.

    Every method raises `InputError` if the store cannot be read.
    """

    def __init__(self, tracking_uri: str) -> None:
        self._uri = tracking_uri

    def experiment(self) -> str | None:
        """Id of the experiment; None where nothing was ever recorded."""
        return self._ask(lambda reader: reader.experiment())

    def find(self, tags: Mapping[str, str], params: Mapping[str, Any] | None = None) -> list[Run]:
        """Every run with these tags and parameters, oldest first."""
        return self._ask(lambda reader: reader.find(tags, params or {}))

    def artifact(self, run_id: str, path: str) -> bytes | None:
        """A run's artifact; None if it has none of this path that is in reach."""
        return self._ask(lambda reader: reader.artifact(run_id, path))

    def _ask(self, question: Callable[[_Reader], T]) -> T:
        if self._quick is not None:
            with suppress(*_UNEXPECTED):
                return question(self._quick)
        return question(self._client)

    @cached_property
    def _quick(self) -> _Reader | None:
        """What reads the store without MLflow, if anything does."""
        if file := store.sqlite_file(self._uri):
            return _File(file)
        settings = {name for name in os.environ if name.startswith(_SETTINGS)}
        plain = settings <= {"MLFLOW_TRACKING_URI", _USER, _PASSWORD, _TOKEN}
        return _Server(self._uri) if plain and store.is_server(self._uri) and store.reachable(self._uri) else None

    @cached_property
    def _client(self) -> _Reader:
        return _Client(self._uri)


class _Reader(Protocol):
    """One way to read a store; the methods are those of `Runs`. `_File` and `_Server` raise one of `_UNEXPECTED`."""

    def experiment(self) -> str | None: ...

    def find(self, tags: Mapping[str, str], params: Mapping[str, Any]) -> list[Run]: ...

    def artifact(self, run_id: str, path: str) -> bytes | None: ...


class _File:
    """The tables of a SQLite file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def experiment(self) -> str | None:
        if not self._exists():
            return None
        with self._tables() as tables:
            row = tables.execute("SELECT experiment_id FROM experiments WHERE name = ?", [store.EXPERIMENT]).fetchone()
        return None if row is None else str(row[0])

    def find(self, tags: Mapping[str, str], params: Mapping[str, Any]) -> list[Run]:
        if not self._exists():
            return []
        wanted = [("tags", key, value) for key, value in tags.items()]
        wanted += [("params", key, store.to_param(value)) for key, value in params.items()]
        conditions = [f"run_uuid IN (SELECT run_uuid FROM {table} WHERE key = ? AND value = ?)" for table, *_ in wanted]
        experiment = "experiment_id = (SELECT experiment_id FROM experiments WHERE name = ?)"
        clause = " AND ".join([experiment, "lifecycle_stage = 'active'", *conditions])
        values = [store.EXPERIMENT, *(part for _, *pair in wanted for part in pair)]
        columns = "run_uuid, name, start_time, end_time"
        with self._tables() as tables:
            found = tables.execute(f"SELECT {columns} FROM runs WHERE {clause} ORDER BY start_time, run_uuid", values)
            runs = {run: Run(run, name, started, ended, {}, {}, {}) for run, name, started, ended in found}
            chosen = f"WHERE run_uuid IN (SELECT run_uuid FROM runs WHERE {clause})"
            for run, key, value in tables.execute(f"SELECT run_uuid, key, value FROM tags {chosen}", values):
                runs[run].tags[key] = value
            for run, key, value in tables.execute(f"SELECT run_uuid, key, value FROM params {chosen}", values):
                runs[run].params[key] = value
            latest = f"SELECT run_uuid, key, value FROM latest_metrics {chosen} AND NOT is_nan"
            for run, key, value in tables.execute(latest, values):
                runs[run].metrics[key] = value
        return list(runs.values())

    def artifact(self, run_id: str, path: str) -> bytes | None:
        with self._tables() as tables:
            (uri,) = tables.execute("SELECT artifact_uri FROM runs WHERE run_uuid = ?", [run_id]).fetchone()
        place = urlsplit(uri)
        if place.scheme not in ("", "file"):
            raise OSError(f"{uri} is no folder of this machine")
        file = Path(unquote(place.path), path)
        return file.read_bytes() if file.exists() else None

    def _exists(self) -> bool:
        """Raises `FileNotFoundError` where its folder does not either, unless that is the state directory."""
        folder = self._file.absolute().parent
        if not folder.is_dir() and not Home.locate().is_to_hold(self._file):
            raise FileNotFoundError(folder)
        return self._file.exists()

    @contextmanager
    def _tables(self) -> Iterator[sqlite3.Connection]:
        """The tables at one moment, whatever is written meanwhile."""
        uri = f"file:{quote(str(self._file))}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=_LOCKED_S)) as tables:
            tables.execute("BEGIN")
            yield tables


class _Server:
    """MLflow's REST API."""

    def __init__(self, uri: str) -> None:
        self._url = uri.rstrip("/")

    def experiment(self) -> str | None:
        url = f"{self._url}/api/2.0/mlflow/experiments/get-by-name"
        answer = self._session.get(url, params={"experiment_name": store.EXPERIMENT}, timeout=_ANSWER_S)
        if answer.status_code == 404 and answer.json().get("error_code") == "RESOURCE_DOES_NOT_EXIST":
            return None
        return str(_answered(answer)["experiment"]["experiment_id"])

    def find(self, tags: Mapping[str, str], params: Mapping[str, Any]) -> list[Run]:
        if (experiment := self.experiment()) is None:
            return []
        query: dict[str, Any] = {
            "experiment_ids": [experiment],
            "filter": store.having(tags, params),
            "order_by": ["attributes.start_time ASC"],
            "max_results": _PAGE,
        }
        runs: list[Run] = []
        while True:
            url = f"{self._url}/api/2.0/mlflow/runs/search"
            page = _answered(self._session.post(url, json=query, timeout=_ANSWER_S))
            runs += [_run_of(run) for run in page.get("runs", [])]
            if not (token := page.get("next_page_token")):
                return runs
            query["page_token"] = token

    def artifact(self, run_id: str, path: str) -> bytes | None:
        answer = self._session.get(
            f"{self._url}/get-artifact", params={"run_uuid": run_id, "path": path}, timeout=_ANSWER_S
        )
        answer.raise_for_status()
        return answer.content

    @cached_property
    def _session(self) -> Session:
        import requests

        session = requests.Session()
        if _USER in os.environ and _PASSWORD in os.environ:
            session.auth = (os.environ[_USER], os.environ[_PASSWORD])
        elif token := os.environ.get(_TOKEN):
            session.headers["Authorization"] = f"Bearer {token}"
        return session


def _answered(answer: Response) -> dict[str, Any]:
    answer.raise_for_status()
    return dict(answer.json())


def _run_of(run: Mapping[str, Any]) -> Run:
    """A run as MLflow's REST API has it, which leaves out what is empty."""
    info, data = run["info"], run["data"]
    ended = info.get("end_time")
    return Run(
        info["run_id"],
        info["run_name"],
        int(info["start_time"]),
        int(ended) if ended else None,
        {tag["key"]: tag["value"] for tag in data.get("tags", [])},
        {param["key"]: param["value"] for param in data.get("params", [])},
        {metric["key"]: float(metric["value"]) for metric in data.get("metrics", [])},
    )


class _Client:
    """MLflow's own client, for any store."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def experiment(self) -> str | None:
        client = self._client
        with store.readable(self._uri):
            found = client.get_experiment_by_name(store.EXPERIMENT)
        return None if found is None else found.experiment_id

    def find(self, tags: Mapping[str, str], params: Mapping[str, Any]) -> list[Run]:
        if (experiment := self.experiment()) is None:
            return []
        with store.readable(self._uri):
            runs = list(store.find_runs(self._client, experiment, tags, params))
        return [
            Run(i.run_id, i.run_name, i.start_time, i.end_time, data.tags, data.params, data.metrics)
            for i, data in ((run.info, run.data) for run in runs)
        ]

    def artifact(self, run_id: str, path: str) -> bytes | None:
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        client = self._client
        with store.readable(self._uri), tempfile.TemporaryDirectory() as folder:
            if not any(file.path == path for file in client.list_artifacts(run_id)):
                return None
            return Path(client.download_artifacts(run_id, path, folder)).read_bytes()

    @cached_property
    def _client(self) -> MlflowClient:
        return store.open_client(self._uri)
