"""Records that nobody needs any more: which they are, and how they are removed for good."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import optuna

from service.answers.overview import SearchInfo
from service.errors import SearchError
from service.home import Home
from service.record import store
from service.record.results import Results
from service.sampling.study import study_exists


def old(searches: Sequence[SearchInfo], days: float, resumable: bool) -> list[SearchInfo]:
    """Those that began more than `days` ago and are over: `finished`, and with `resumable` what could be resumed."""
    statuses = (*store.ENDED, "interrupted") if resumable else ("finished",)
    before = datetime.now(UTC) - timedelta(days=days)
    return [one for one in searches if one.status in statuses and one.started < before]


def remove(search_id: str, tracking_uri: str, home: Home) -> str | None:
    """Remove all that is kept of a search: its record, its study, what it has on this machine's disk.

    Returns what is left to be done, in a line: a tracking server alone can free its own disk. Raises `InputError` if
    the search has a driver, `SearchError` if the store does not remove it.
    """
    with home.driving(search_id):
        record = Results(tracking_uri).search(search_id)
        runs = [*(trial.run_id for trial in record.trials), record.run_id]
        client = store.open_client(tracking_uri)
        for run in runs:  # its trials first: a search is there as long as anything is
            client.delete_run(run)
        if study_exists(search_id, home.optuna_storage):
            optuna.delete_study(study_name=search_id, storage=home.optuna_storage)
        for recording in home.telemetry.glob(f"*/{search_id}-{'[0-9a-f]' * 56}"):  # of each node, by Ray's id of it
            shutil.rmtree(recording, ignore_errors=True)
        shutil.rmtree(home.spool(search_id) / "unsent", ignore_errors=True)
    if store.is_server(tracking_uri):
        return "`mlflow gc`, where the tracking server runs, frees its disk"
    command = [sys.executable, "-m", "mlflow", "gc", "--backend-store-uri", tracking_uri, "--run-ids", ",".join(runs)]
    environment = os.environ | {"MLFLOW_TRACKING_URI": tracking_uri, "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise SearchError(f"search {search_id}: MLflow does not remove its runs: {said}")
    for run in runs:  # whose folders MLflow leaves, empty
        shutil.rmtree(home.artifact_folder / run, ignore_errors=True)
    return None
