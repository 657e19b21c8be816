"""MLflow's own web pages on the record."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from service.errors import InputError
from service.home import Home
from service.record import store, view
from service.record.runs import Runs

_HOST = "127.0.0.1"
_START_S = 120.0  # within which MLflow's server answers, on the slowest of machines
_END_S = 10.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Pages:
    """A web server on this machine's loopback address, which answers. `url` lists all trials, or those of a search."""

    url: str
    server: subprocess.Popen[bytes]

    def wait(self) -> int:
        """The server's exit code, once it has ended by itself."""
        return self.server.wait()

    def close(self) -> None:
        """End the server, with all processes that it started."""
        try:
            self._signal(signal.SIGTERM)
            self.server.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(signal.SIGKILL)
            self.server.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.pid, number)


def serve(tracking_uri: str, home: Home, port: int, search_id: str | None = None) -> Pages:
    """Start MLflow's server on a database, for this machine alone, and return once it answers.

    `search_id`: the search that is to be shown first, in its view.

    Raises `InputError` for a store that is a server itself or in which nothing is recorded, for a port that cannot be
    had, and for a server that does not start.
    """
    if store.is_server(tracking_uri):
        raise InputError(f"{store.shown(tracking_uri)} serves its own pages; open it in a browser")
    experiment = Runs(tracking_uri).experiment()
    if experiment is None:
        raise InputError(f"nothing is recorded at {store.shown(tracking_uri)} yet")
    _check_port(port)
    address = ["--host", _HOST, "--port", str(port)]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", tracking_uri, "--workers", "1"]
    server = subprocess.Popen(
        [*command, "--default-artifact-root", home.artifacts, *address],
        env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        start_new_session=True,
    )
    pages = Pages(view.link(f"http://{_HOST}:{port}", experiment, search_id), server)
    try:
        _await_answer(server, port)
    except BaseException:
        pages.close()
        raise
    return pages


def _check_port(port: int) -> None:
    """Raise `InputError` unless a server can listen at the port."""
    if not 1 <= port <= 65535:
        raise InputError(f"port: {port} is none; allowed: 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port just left can be had
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise InputError(f"port: {port} cannot be had: {error.strerror}; choose another with --port") from None


def _await_answer(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_S
    while not _answers(port):
        if server.poll() is not None:
            raise InputError(f"MLflow's server ended with exit code {server.returncode}; it says why above")
        if time.monotonic() > deadline:
            raise InputError(f"MLflow's server did not answer within {_START_S:g} s")
        time.sleep(_POLL_S)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection(_HOST, port, timeout=_END_S)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
