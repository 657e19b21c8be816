"""Power limits of the fake driver's GPUs under the genuine binding: set, put back, and put back by the watchdog."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from telemetry.actor import Telemetry
from tests.telemetry.scenarios import ROOT, compile_nvml

NO_PERMISSION = 4
GIVEN_UP_S = 60.0


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake driver."""
    folder = tmp_path_factory.mktemp("nvml")
    if not compile_nvml(folder):
        pytest.skip("no C compiler to build the fake driver with")
    return folder


class Program:
    """A process that sets limits, of two GPUs at 700 and 650 W; `left` is what the driver has of them."""

    def __init__(self, driver: Path, folder: Path, **environment: str) -> None:
        self.folder = folder
        around = {name: value for name, value in os.environ.items() if not name.startswith(("ZEUSD_", "WATTUNE_"))}
        around |= {"LD_LIBRARY_PATH": str(driver), "PYTHONPATH": str(ROOT), "FAKE_GPUS": "2", "FAKE_LIMIT": "700 650"}
        around |= {"FAKE_SET": str(folder)} | environment
        command = [sys.executable, "-m", "tests.telemetry.power_program"]
        self.process = subprocess.Popen(
            command, env=around, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def ask(self, **asked: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    @property
    def left(self) -> dict[int, int]:
        """W by GPU, of those whose limit was set at all."""
        return {int(file.name): int(file.read_text() or 0) // 1000 for file in self.folder.iterdir()}


@pytest.fixture
def program(driver: Path, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(**environment: str) -> Program:
        (tmp_path / "set").mkdir(exist_ok=True)
        started.append(Program(driver, tmp_path / "set", **environment))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def within(true: Callable[[], bool]) -> bool:
    """Whether that comes to be, on a machine that may be busy."""
    until = time.monotonic() + GIVEN_UP_S
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_a_limit_is_set_and_what_was_there_is_put_back(program: Callable[..., Program]) -> None:
    one = program()
    assert one.ask(set=[1, 400]) is None
    assert one.left == {1: 400}
    assert one.ask(check=[200, 700]) is None
    assert one.left == {1: 400}
    assert one.ask(set=[1, 300]) is None, "the limit of the next trial"
    assert one.ask(holds=[1, 300]) is True
    assert one.ask(holds=[1, 400]) is False
    assert one.ask(holds=[0, 700]) is False, "never set"
    assert one.ask(restore=1) is None
    assert one.left == {1: 650}
    assert one.ask(restore=0) is None
    assert one.left == {1: 650}, "left alone"
    assert [one.ask(set=[0, 500]), one.ask(set=[1, 500]), one.ask(close=None)] == [None, None, None]
    assert one.left == {0: 700, 1: 650}


def test_what_cannot_be_set_is_told_and_nothing_is_left(program: Callable[..., Program]) -> None:
    one = program()
    assert one.ask(check=[700, 150]) == "GPU-0 takes a power limit of 200 to 700 W, not 150 W"
    assert one.ask(set=[0, 150]) == "GPU-0 takes a power limit of 200 to 700 W, not 150 W"
    assert one.ask(set=[5, 400]) == "device 5 has no power limit that can be set"
    refused = program(FAKE_SETTABLE=str(NO_PERMISSION))
    assert refused.ask(set=[0, 400]).startswith("NVML: ")
    assert refused.ask(holds=[0, 400]) is False
    assert refused.ask(restore=0) is None
    assert refused.left == {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_watchdog_puts_back_what_a_process_left_that_was_killed(
    program: Callable[..., Program], number: signal.Signals
) -> None:
    one = program()
    for index, watts in ((0, 350), (1, 300)):
        assert one.ask(set=[index, watts]) is None
    assert one.ask(restore=0) is None
    assert one.left == {0: 700, 1: 300}
    (one.folder / "0").write_text("690000")  # somebody else's by now
    os.killpg(one.process.pid, number)  # with its children, as Ray does
    assert one.process.wait() == -number
    assert within(lambda: one.left[1] == 650)
    assert one.left == {0: 690, 1: 650}


def test_a_process_that_is_killed_before_it_set_a_limit_changes_none(program: Callable[..., Program]) -> None:
    one = program()
    assert one.ask(restore=0) is None
    one.process.kill()
    one.process.wait()
    assert one.left == {}


@pytest.fixture
def zeusd(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """The socket of something that answers as zeusd 0.3 does, wants the token ``secret`` and sets the fake driver's
    limits; and what it was asked."""
    asked: list[str] = []

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            where, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
            asked.append(f"{where} {' '.join(f'{name}={value}' for name, (value,) in sorted(query.items()))}")
            allowed = self.headers["Authorization"] == "Bearer secret"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            if allowed:
                (tmp_path / "set" / query["gpu_ids"][0]).write_text(query["power_limit_mw"][0])
            else:
                self.wfile.write(b"no token\n")

        def address_string(self) -> str:
            return "here"

        def log_message(self, *arguments: Any) -> None:
            """Nothing."""

    path = tmp_path / "zeusd.sock"
    with ThreadingUnixStreamServer(str(path), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield path, asked
        server.shutdown()


def test_zeusd_sets_what_the_process_may_not(program: Callable[..., Program], zeusd: tuple[Path, list[str]]) -> None:
    path, asked = zeusd
    here = {"ZEUSD_SOCK_PATH": str(path), "FAKE_SETTABLE": str(NO_PERMISSION)}
    one = program(**here, ZEUSD_TOKEN="secret")
    assert one.ask(set=[1, 400]) is None
    assert one.left == {1: 400}
    one.process.kill()
    assert within(lambda: one.left == {1: 650})
    ask = "/gpu/set_power_limit block=true gpu_ids=1 power_limit_mw="
    assert asked == [f"{ask}400000", f"{ask}650000"]
    assert program(**here).ask(set=[1, 400]) == f"zeusd at {path}: 401: no token"
    nowhere = program(ZEUSD_SOCK_PATH="/nowhere.sock").ask(set=[1, 400])
    assert nowhere.startswith("zeusd at /nowhere.sock: ")


def test_telemetry_sets_no_limit_unless_it_was_started_to() -> None:
    for power_limits, words in ((False, "no --allow-power-limits was given"), (True, "no power limit that can be set")):
        telemetry = Telemetry("here", "test", power_limits=power_limits)
        refused = telemetry.limit_power(0, 400)
        assert refused is not None
        assert words in refused
        assert not telemetry.holds_power(0, 400)
        telemetry.restore_power(0)
        telemetry.stop()
