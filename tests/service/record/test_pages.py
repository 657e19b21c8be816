"""MLflow's own pages on the record: where they come up, how they are refused, and that nothing of them stays."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from service.errors import InputError
from service.home import Home
from service.record.pages import Pages, serve
from service.record.tracking import Tracker
from tests.conftest import free_port
from tests.service.records import problem


@pytest.fixture
def recorded(home: Home) -> Home:
    Tracker(home.tracking_uri, home).start_search("s1", problem(), {})
    return home


def await_true(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until, "it did not come about in time"
        time.sleep(0.05)


def test_a_port_that_another_server_has_is_refused(recorded: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port: {port} cannot be had: Address already in use; .*--port"):
            serve(recorded.tracking_uri, recorded, port)


@pytest.mark.parametrize("port", [-1, 0, 65536, 99999])
def test_a_port_that_is_none_is_refused(port: int, recorded: Home) -> None:
    with pytest.raises(InputError, match=rf"port: {port} is none; allowed: 1 to 65535"):
        serve(recorded.tracking_uri, recorded, port)


def test_there_are_no_pages_on_nothing_and_none_of_a_server(home: Home) -> None:
    with pytest.raises(InputError, match="nothing is recorded"):
        serve(home.tracking_uri, home, free_port())
    with pytest.raises(InputError, match="serves its own pages"):
        serve("http://mlflow:5000", home, free_port())


def test_closing_ends_all_processes_of_the_server() -> None:
    """MLflow's is one that starts another."""
    server = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000 & wait"], start_new_session=True)
    await_true(lambda: len(psutil.Process(server.pid).children()) == 2)
    family = psutil.Process(server.pid).children()
    Pages("http://127.0.0.1:1", server).close()
    assert server.returncode == -signal.SIGTERM
    assert psutil.wait_procs(family, timeout=60)[1] == []


def interruptible() -> None:
    """What a shell starts in the background, such as tests, ignores interrupts, and so does what that starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_pages_answer_at_their_link_and_end_with_the_command(signalled: signal.Signals, recorded: Home) -> None:
    port = free_port()
    command = [sys.executable, "-m", "service.cli", "ui", "--port", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=interruptible
    ) as asked:
        assert asked.stdout is not None
        link = next(line for line in asked.stdout if line.startswith("http"))  # MLflow has lines of its own
        address = re.match(rf"http://127.0.0.1:{port}/#/experiments/\d+/runs", link)
        assert address
        page = http.client.HTTPConnection("127.0.0.1", port)
        page.request("GET", "/")
        assert b"<title>MLflow</title>" in page.getresponse().read()
        family = psutil.Process(asked.pid).children(recursive=True)
        assert len(family) >= 2
        os.kill(asked.pid, signalled)
        assert asked.wait(30) == 0
    assert psutil.wait_procs(family, timeout=60)[1] == []
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
