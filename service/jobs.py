"""Searches as jobs of a Ray cluster: hand one in, follow what it prints, end it.

An address is the URL of the cluster's job server, which is Ray's dashboard: `http://head:8265`. RAY_ADDRESS and
RAY_API_SERVER_ADDRESS, which Ray itself would put above it, do not change it.

A cluster with token authentication, which `ray start` turns on where it finds a token, wants the same token from
everybody. It is taken from RAY_AUTH_TOKEN, else from the file that RAY_AUTH_TOKEN_PATH names, else from
~/.ray/auth_token; RAY_AUTH_MODE need not be set.

A search's id is also its job's; each time it is resumed it gets one more job, of which the latest is meant. A job runs
`wattune` on the head node, the one on the PATH of `ray start`, else the submitter's own where the head has it at the
same path. Its state directory is the WATTUNE_HOME that `ray start` had, by default ~/.wattune on the head: Ray throws a
job's working directory away.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.checks import check_named, check_power_limits
from service.errors import InputError, SearchError
from service.home import user
from service.problem import Problem
from service.record import store
from service.record.results import Results
from service.spec import dump_spec, new_search_id
from service.trainers import is_ready, refused

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

PROBE_S = 5.0
POLL_S = 1.0
START_S = 180.0  # of a head that is busy: it sets up the job, imports, and joins Ray
STOP_S = 60  # what a driver gets to close its record and its gangs; Ray's own 3 s are too short
STATUS = {"PENDING": "pending", "RUNNING": "running", "STOPPED": "stopped", "FAILED": "failed", "SUCCEEDED": "finished"}
_OVERRIDING = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
_TRAINER, _POWER = " --allow-trainer", " --allow-power-limits"
_MARK = "wattune.search"  # the metadata that says of which search a job is; other jobs of the cluster have none


@dataclass(frozen=True)
class Submission:
    """What a cluster knows of a search that was submitted to it, by the latest of its jobs.

    `status` is `pending` until the job has a process, then `running`, in the end `finished`, `stopped` or `failed`.
    `cause` is one line on why it failed, or has not begun.
    """

    search_id: str
    status: str
    started: datetime
    cause: str | None


def submit(
    problem: Problem,
    address: str,
    tracking_uri: str,
    allow_trainer: bool = False,
    allow_power_limits: bool = False,
) -> str:
    """Hand a search to the cluster at `address`, where it goes on without this process, and return its id.

    Returns once the search has begun its record, in which it may be queued until its GPUs are free. `tracking_uri` has
    to be an MLflow server that this process and the cluster's head both reach under that URL. The MLFLOW_TRACKING_*
    variables of this process, such as user and password, go to the search as well. A relative path in `data` is taken
    from the working directory here; the file must be at that absolute path on every node. A trainer that is ready here
    is handed in by its name, for the cluster to look up among its own. Any other is run with `allow_trainer` alone, and
    its directory must be there under the same path. Power limits are set with `allow_power_limits` alone.

    Raises `InputError`, with nothing submitted, for what is not allowed, a store that is no server
    or an address that cannot be used; and with the reason of the search itself, should it find its data, its cluster or
    its store unusable over there. Raises `SearchError` if its job failed for another reason, or has not begun the
    search within `START_S`.
    """
    named = problem.trainer is not None and is_ready(problem.trainer)
    if problem.trainer is not None and not (named or allow_trainer):
        raise InputError(refused(problem.trainer))
    check_named(problem)
    check_power_limits(problem, allow_power_limits)
    _check_store(tracking_uri)
    search_id = new_search_id(problem)
    with _cluster(address) as client, tempfile.TemporaryDirectory() as directory:
        Path(directory, "spec.yaml").write_text(dump_spec(problem.located(), named), encoding="utf-8")
        command = f"run spec.yaml --search-id {search_id}{_allowed(allow_trainer, allow_power_limits)}"
        _submit(client, search_id, search_id, command, tracking_uri, {"working_dir": directory})
    return search_id


def resubmit(
    search: str, address: str, tracking_uri: str, allow_trainer: bool = False, allow_power_limits: bool = False
) -> str:
    """Have the cluster at `address` go on with a search that was submitted to it, and return the search's id.

    On the same terms as `submit`; `search` is an id, or the beginning of one, of the record at `tracking_uri`. Raises
    `InputError` with the reason of `service.search.resume` over there as well.
    """
    _check_store(tracking_uri)
    search_id = Results(tracking_uri).search(search).id
    with _cluster(address) as client:
        job = f"{search_id}-resumed-{secrets.token_hex(2)}"
        _submit(
            client,
            job,
            search_id,
            f"resume {shlex.quote(search_id)}{_allowed(allow_trainer, allow_power_limits)}",
            tracking_uri,
            {},
        )
    return search_id


def _allowed(trainer: bool, power_limits: bool) -> str:
    """The options of the command that says so over there."""
    return f"{_TRAINER if trainer else ''}{_POWER if power_limits else ''}"


def _check_store(tracking_uri: str) -> None:
    if not store.is_server(tracking_uri):
        raise InputError(
            f"tracking URI {store.shown(tracking_uri)!r}: a cluster needs an MLflow server to record in; "
            "start one with `mlflow server` and give its URL by --tracking-uri or MLFLOW_TRACKING_URI"
        )
    if not store.reachable(tracking_uri):
        raise InputError(f"tracking URI {store.shown(tracking_uri)!r}: no server answers there")


def _submit(
    client: JobSubmissionClient,
    job: str,
    search_id: str,
    command: str,
    tracking_uri: str,
    runtime_env: dict[str, Any],
) -> None:
    """Start `wattune COMMAND` as a job, and return once its search has begun."""
    bin_directory = shlex.quote(str(Path(sys.executable).parent))
    variables = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_TRACKING_")}
    variables |= {"MLFLOW_TRACKING_URI": tracking_uri, "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S)}
    variables["WATTUNE_USER"] = user()
    client.submit_job(
        submission_id=job,
        entrypoint=f'export PATH="$PATH":{bin_directory} WATTUNE_HOME="${{WATTUNE_HOME:-$HOME/.wattune}}"; '
        f"exec wattune {command}",
        runtime_env=runtime_env | {"env_vars": variables},
        metadata={_MARK: search_id},
    )
    _await_start(client, job, search_id)


def logs(search: str, address: str) -> Iterator[str]:
    """The lines, each with its line end, that a search has printed and goes on to print until its job has ended."""
    with _cluster(address) as client:
        job = _find(client, search, address)
        assert job.submission_id is not None
        printed = 0
        while True:
            ended = client.get_job_status(job.submission_id).is_terminal()
            text = client.get_job_logs(job.submission_id)[printed:]
            whole = len(text) if ended else text.rfind("\n") + 1
            yield from text[:whole].splitlines(keepends=True)
            if ended:
                return
            printed += whole
            time.sleep(POLL_S)


def stop(search: str, address: str) -> None:
    """Ask a search to end at once. Its record is closed as `stopped`, and what was recorded stays."""
    with _cluster(address) as client:
        job = _find(client, search, address)
        assert job.submission_id is not None
        if job.status.is_terminal():
            search_id = (job.metadata or {})[_MARK]
            raise InputError(f"search {search_id} is not running: its job has {job.status.lower()}")
        client.stop_job(job.submission_id)


def submission(search: str, address: str) -> Submission:
    """The search with this id, or with the only id that starts so, as the cluster at `address` knows it."""
    with _cluster(address) as client:
        return _submission(_find(client, search, address))


def submissions(address: str) -> list[Submission]:
    """All searches that were submitted to the cluster at `address`, as far as it remembers, the latest first."""
    with _cluster(address) as client:
        known = map(_submission, _jobs(client).values())
        return sorted(known, key=lambda one: one.started, reverse=True)


@contextmanager
def _cluster(address: str) -> Iterator[JobSubmissionClient]:
    """Ray's client for the job server at `address`; its failures become one line each."""
    headers = _probe(address)
    import requests
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for name in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they log every package they send
    overriding = {name: os.environ.pop(name) for name in _OVERRIDING if name in os.environ}
    try:
        try:
            client = JobSubmissionClient(address, headers=headers)
        finally:
            os.environ.update(overriding)
        yield client
    except SearchError:
        raise
    except (RuntimeError, ConnectionError, AuthenticationError, requests.RequestException) as error:
        raise InputError(f"address {address}: {store.first_line(error)}") from error


def _await_start(client: JobSubmissionClient, job_id: str, search_id: str) -> None:
    """Return once the search says that it has begun. Raises its last words if it ends before that."""
    deadline = time.monotonic() + START_S
    while True:
        job = client.get_job_info(job_id)
        if f"\nsearch {search_id}:" in client.get_job_logs(job_id):
            return
        if job.status.is_terminal():
            kind = InputError if job.driver_exit_code == 2 else SearchError
            raise kind(f"search {search_id} did not start: {_last_words(job)}")
        if time.monotonic() > deadline:
            raise SearchError(
                f"search {search_id} has not begun within {START_S:.0f} s: {_last_words(job)}; "
                "`wattune status` with this --address tells whether it will, and `wattune stop` calls it off"
            )
        time.sleep(POLL_S)


def _last_words(job: JobDetails) -> str:
    """What a job has to say of itself, in one line: the end of its log if it failed."""
    if job.driver_exit_code is not None and job.driver_exit_code < 0:
        return f"its process was killed by signal {-job.driver_exit_code}"
    words = (job.message or "").strip().splitlines() or [f"its job has the status {job.status.lower()}"]
    return words[-1].removeprefix("wattune: ")


def _submission(job: JobDetails) -> Submission:
    status = STATUS[job.status.value]
    return Submission(
        search_id=(job.metadata or {})[_MARK],
        status=status,
        started=datetime.fromtimestamp((job.start_time or 0) / 1000, UTC),
        cause=_last_words(job) if status in ("pending", "failed") else None,
    )


def _probe(address: str) -> dict[str, str]:
    """The headers with which the job server at `address` answers, within `PROBE_S`; Ray's client waits without end."""
    import requests

    if not address.startswith(("http://", "https://")):
        raise InputError(f"address {address!r}: give the URL of Ray's job server, such as http://head:8265")
    token = cluster_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = requests.get(f"{address.rstrip('/')}/api/version", headers=headers, timeout=PROBE_S)
        known = "ray_version" in answer.text
    except requests.RequestException as error:
        raise InputError(f"address {address}: no Ray job server answers there ({type(error).__name__})") from None
    if answer.status_code == 401:
        raise InputError(
            f"address {address}: the cluster asks for its token; put it into ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    if answer.status_code == 403:
        raise InputError(f"address {address}: the token in use is not the cluster's; see ~/.ray/auth_token")
    if not known:
        raise InputError(f"address {address}: what answers there is not Ray's job server; its port is 8265 by default")
    return headers


def cluster_token() -> str | None:
    """The cluster's token, from where Ray looks for it, in Ray's order."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _find(client: JobSubmissionClient, search: str, address: str) -> JobDetails:
    """The latest job of the search with this id, or with the only id that starts so."""
    jobs = _jobs(client)
    matches = store.matching(search, jobs)
    if len(matches) > 1:
        raise InputError(f"search {search!r} is ambiguous: {', '.join(sorted(matches)[-5:])}")
    if not matches:
        raise InputError(f"search {search!r} is unknown at {address}: no such search was submitted there")
    return jobs[matches[0]]


def _jobs(client: JobSubmissionClient) -> dict[str, JobDetails]:
    """The latest job of each search that was submitted, by the search's id."""
    jobs = {}
    for job in sorted(client.list_jobs(), key=lambda job: job.start_time or 0):
        if job.submission_id and (search_id := (job.metadata or {}).get(_MARK)):
            jobs[search_id] = job
    return jobs
