"""MLflow's own web pages on the record."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from service.errors import InputError
from service.home import Home
from service.record import store


@dataclass(frozen=True)
class Pages:
    """A web server on this machine's loopback address. `url` lists all trials; ending `server` ends it."""

    url: str
    server: subprocess.Popen[bytes]


def serve(tracking_uri: str, home: Home, port: int) -> Pages:
    """Start MLflow's server on a database, for this machine alone.

    Raises `InputError` for a store that is a server itself, or in which nothing is recorded.
    """
    if store.is_server(tracking_uri):
        raise InputError(f"{tracking_uri} serves its own pages; open it in a browser")
    database = store.sqlite_file(tracking_uri)
    experiment = None
    if database is None or database.exists():
        client = store.open_client(tracking_uri)
        with store.readable(tracking_uri):
            experiment = client.get_experiment_by_name(store.EXPERIMENT)
    if experiment is None:
        raise InputError(f"nothing is recorded at {tracking_uri} yet")
    address = ["--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", tracking_uri, "--workers", "1"]
    server = subprocess.Popen(
        [*command, "--default-artifact-root", home.artifacts, *address],
        env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
    )
    runs = f"experiments/{experiment.experiment_id}/runs?workflowType=machine_learning"
    return Pages(f"http://127.0.0.1:{port}/#/{runs}", server)
