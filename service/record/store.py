"""The shape of the record in MLflow, shared by its writer (`tracking`) and its readers (`results`).

One experiment, `wattune`; one parent run per search and one nested child run per trial. Tags under `wattune.` say
what a run is. Final metrics have plain names, those that are rarely asked for a group's name before them, as
`metric_key` has it; any other key with a slash is a series: `step/loss` and, in older records, `power_w/gpu0`.
Parameters under `env.` are the environment, those under `model.` the model's dimensions; all others are the
configuration and, of a trial, `FACTS` of its search. What is trained on is an input of every run, as MLflow has
datasets.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import sqlite3
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from service.errors import InputError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "wattune"
ROLE = "wattune.role"
SEARCH = "search"
TRIAL = "trial"
SEARCH_ID = "wattune.search_id"
TRIAL_ID = "wattune.trial_id"
STATUS = "wattune.status"
HEARTBEAT = "wattune.heartbeat"
STANDING = "wattune.standing"
USER = "mlflow.user"
CAUSE = "wattune.cause"
ENERGY = "wattune.energy"
DATA = "wattune.data"
OBJECTIVES = "wattune.objectives"
CONSTRAINTS = "wattune.constraints"
NOTICES = "wattune.notices"
METHOD = "wattune.method."
PURPOSE = "wattune.purpose"
STRAGGLER = "wattune.straggler"
INFRASTRUCTURE = "wattune.infrastructure"
BESIDE = "wattune.beside"
ENVIRONMENT = "env."
MODEL = "model."
NOTE = "wattune.note"
CANCELLED = "wattune.cancelled"
PARENT = "mlflow.parentRunId"
DESCRIPTION = "mlflow.note.content"
RESERVED = ("mlflow.", "wattune.")
"""What names of tags begin with that are MLflow's or Wattune's own; all others are people's."""

FACTS = ("model", "accelerator", "nodes", "gpus_per_node", "sequence_length")
"""What each trial says of its search too, by which trials of several searches can be told apart."""

GROUPS = ("breakdown", "slice_error", "bound")
"""What names of metrics begin with that are kept in a group of their own."""

REST = "more"
"""The group of all other metrics that are rarely asked for."""

SPEC = "spec.yaml"  # artifact of a search's run: its whole spec
PAGE = "report.html"  # artifact of a search's run: its report as one page
RESULT = "result.json"  # artifact of a trial's run: all that it came to
SAMPLES = "samples.parquet"  # artifact of a trial's run: what telemetry saw of its windows
PICTURE = "gpus.png"  # artifact of a trial's run: what its GPUs did over time

GOING_ON = ("queued", "running")  # statuses of a search that has a driver, if that is not dead
ENDED = ("finished", "stopped", "failed")  # those of one whose driver has written its end

_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_DATABASES = ("sqlite", *_PORTS)
_SERVERS = ("http", "https")
_DRIVERS = {
    "psycopg2": "psycopg2-binary",
    "psycopg": "'psycopg[binary]'",
    "MySQLdb": "mysqlclient",
    "mysql": "mysql-connector-python",
}
"""Module -> the package that has it, of SQLAlchemy's drivers that go by another name there."""
_PROBE_S = 5.0


def described(note: str, text: str) -> str:
    """The description of a run of which somebody has noted something, in Markdown."""
    return "\n\n".join(filter(None, [note, text.strip()]))


def open_client(tracking_uri: str) -> MlflowClient:
    """MLflow's client for `tracking_uri`, without its log lines and usage reports.

    Raises `InputError` for a store that `check` refuses, or that MLflow cannot open.
    """
    check(tracking_uri)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "4")  # about 15 s, where MLflow's default takes minutes
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # with a traceback, of all that it raises too
    with readable(tracking_uri), alone(sqlite_file(tracking_uri)):
        return MlflowClient(tracking_uri)


def open_experiment(client: MlflowClient, tracking_uri: str, artifacts: str) -> str:
    """Id of the experiment, which is made where there is none: a server chooses where its artifacts go, a database is
    given their URI. Raises what MLflow raises."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is not None:
        return str(experiment.experiment_id)
    try:
        place = None if is_server(tracking_uri) else artifacts
        kind = {"mlflow.experimentKind": "custom_model_development"}
        return str(client.create_experiment(EXPERIMENT, artifact_location=place, tags=kind))
    except MlflowException:  # another search may have made it meanwhile
        experiment = client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            raise
        return str(experiment.experiment_id)


def check(tracking_uri: str) -> None:
    """Raise `InputError` if MLflow has no such kind of store, or this one lacks its driver, its server or its file.

    Nothing is made. MLflow would try again for minutes before it says what is wrong.
    """
    scheme = tracking_uri.partition(":")[0].partition("+")[0]
    if scheme not in _DATABASES + _SERVERS:
        allowed = ", ".join(_DATABASES + _SERVERS)
        raise InputError(
            f"tracking URI {shown(tracking_uri)!r}: MLflow needs a database or a server; allowed: {allowed}"
        )
    if scheme in _PORTS:
        from sqlalchemy import make_url

        with readable(tracking_uri):
            make_url(tracking_uri).get_dialect().import_dbapi()
    if not reachable(tracking_uri):
        raise InputError(f"tracking URI {shown(tracking_uri)!r}: no server answers there")
    database = sqlite_file(tracking_uri)
    if database and not database.parent.is_dir():
        raise InputError(f"tracking URI {shown(tracking_uri)!r}: there is no directory {database.parent}")
    if database:
        check_database(database)


def check_database(database: Path) -> None:
    """Raise `InputError` unless a SQLite database can be read in this file or, where there is none, be made."""
    try:
        if not database.exists():
            tempfile.TemporaryFile(dir=database.parent).close()
            return
        with contextlib.closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as opened:
            opened.execute("select count(*) from sqlite_master")
    except OSError as error:
        raise InputError(f"{database}: cannot be made: {error.strerror}") from None
    except sqlite3.Error as error:
        if "locked" not in str(error):  # by a writer, which has it for a moment
            raise InputError(f"{database}: cannot be read: {error}; move it away, or bring it back") from None


@contextmanager
def alone(database: Path | None) -> Iterator[None]:
    """One process at a time opens a SQLite database, lest two make its tables; None for what is no such file.

    The lock is on the database's directory: it leaves no file, and needs no leave to write.
    """
    with contextlib.ExitStack() as held:
        if database is not None:
            directory = os.open(database.absolute().parent, os.O_RDONLY)
            held.callback(os.close, directory)
            with contextlib.suppress(OSError):  # a file system without such locks
                fcntl.flock(directory, fcntl.LOCK_EX)
        yield


@contextmanager
def readable(tracking_uri: str) -> Iterator[None]:
    """Turns what MLflow raises for a store that it cannot open or read into an `InputError`."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except ImportError as error:
        module = (error.name or "").partition(".")[0]
        package = _DRIVERS.get(module, module) or "a driver for it"
        raise InputError(
            f"tracking URI {shown(tracking_uri)!r}: its driver is missing: pip install {package}"
        ) from error
    except (MlflowException, SQLAlchemyError) as error:
        raise InputError(f"tracking URI {shown(tracking_uri)!r}: {first_line(error)}") from error


def shown(tracking_uri: str) -> str:
    """The URI without the user and password that it may hold."""
    return re.sub(r"//[^/@]*@", "//***@", tracking_uri)


def is_server(tracking_uri: str) -> bool:
    return tracking_uri.startswith(_SERVERS)


def sqlite_file(tracking_uri: str) -> Path | None:
    """The file of a SQLite store, None for any other kind."""
    prefix, _, path = tracking_uri.partition(":///")
    return Path(path) if prefix.partition("+")[0] == "sqlite" and path else None


def reachable(tracking_uri: str) -> bool:
    """Whether the server of a store answers within a few seconds, whatever it says; a file is always reachable."""
    if not is_server(tracking_uri):
        return _database_answers(tracking_uri)
    import requests

    try:
        requests.get(f"{tracking_uri.rstrip('/')}/health", timeout=_PROBE_S)
    except requests.exceptions.SSLError:
        return True  # something listens; MLflow's own TLS settings decide the rest
    except requests.exceptions.RequestException:
        return False
    return True


def _database_answers(tracking_uri: str) -> bool:
    """Whether something listens where a database is; taken for granted where the URI names no single host."""
    try:
        place = urlsplit(tracking_uri)
        host, port = place.hostname, place.port or _PORTS.get(place.scheme.partition("+")[0])
    except ValueError:
        return True
    if not host or port is None:
        return True
    try:
        socket.create_connection((host, port), _PROBE_S).close()
    except OSError:
        return False
    return True


def find_runs(
    client: MlflowClient, experiment_id: str, tags: Mapping[str, str], params: Mapping[str, Any] | None = None
) -> Iterator[Run]:
    """Every run of the experiment that has these tags and parameters, oldest first."""
    clause = having(tags, params or {})
    token: str | None = None
    while True:
        page = client.search_runs([experiment_id], clause, order_by=["attributes.start_time ASC"], page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def having(tags: Mapping[str, str], params: Mapping[str, Any]) -> str:
    """MLflow's filter of runs for those with these tags and parameters."""
    wanted = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
    wanted += [f"params.`{key}` = '{to_param(value)}'" for key, value in params.items()]
    return " and ".join(wanted)


def metric_key(name: str, plain: Collection[str]) -> str:
    """How MLflow keeps a final metric: by its name, if it is one of `plain`, else by a group and the rest of it."""
    if name in plain:
        return name
    for group in GROUPS:
        if name.startswith(f"{group}_"):
            return f"{group}/{name.removeprefix(f'{group}_')}"
    return f"{REST}/{name}"


def metric_name(key: str) -> str | None:
    """Inverse of `metric_key`; None of a series."""
    group, slash, rest = key.rpartition("/")
    if not slash:
        return key
    if group == REST:
        return rest
    return f"{group}_{rest}" if group in GROUPS else None


def matching(key: str, known: Collection[str]) -> list[str]:
    """The ids that a person may mean by `key`: itself, or all that begin so."""
    return [key] if key in known else [name for name in known if key and name.startswith(key)]


def to_param(value: Any) -> str:
    """Text of a parameter; `from_param` restores the type."""
    return value if isinstance(value, str) else json.dumps(value)


def from_param(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
