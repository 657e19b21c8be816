"""A run watched from beside it: real programs with the hook, and GPUs as a trace has them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from service import Wattune
from service.cli import main
from service.watch import run
from service.watch.event import Event
from service.watch.run import run_events
from service.watch.stamps import Listener
from telemetry.actor import Telemetry
from telemetry.devices.replay import ReplayDevice, load_tracks
from telemetry.samples import SCHEMA
from telemetry.store import write_samples
from tests.conftest import free_port
from trainables.foreign.steps import HOOK

WINDOW_S = 0.5
PROGRAM = """
import sys, time, wattune_steps
while True:
    time.sleep(float(sys.argv[1]))
    wattune_steps.step()
"""


@contextmanager
def training(address: str, *steps_s: float) -> Iterator[None]:
    """Ranks that do not wait for each other, each with steps of so many seconds."""
    left = {name: value for name, value in os.environ.items() if name != "WATTUNE_STEPS"}
    around = left | {"PYTHONPATH": str(HOOK), "WATTUNE_RUN": address, "WORLD_SIZE": str(len(steps_s))}
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(step_s)], env=around | {"RANK": str(rank)})
        for rank, step_s in enumerate(steps_s)
    ]
    try:
        yield
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where the tests were started in the background, with Ctrl-C left out."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[Telemetry]:
    """Of two GPUs: heat holds the clock of the second down for half of the time, and it has an XID error after 2 s."""
    rows = [
        {"time_ns": 10**12 + tick * 10**8, "node": "node", "device": f"GPU-{index}", "index": index, "kind": "nvidia"}
        | {"energy_method": "counter", "energy_mj": 50_000 * tick, "power_w": 500.0, "gpu_utilisation": 1.0}
        | {"gpu_temp_c": [60.0, 90.0][index], "sm_clock_mhz": [1500.0, 1200.0][index], "throttle_power_cap_ns": 0}
        | {"throttle_sw_thermal_ns": index * tick * 5 * 10**7, "throttle_hw_thermal_ns": 0, "ecc_uncorrected": 0}
        | {"xid_errors": int(index and tick > 20), "xid": 79 if index and tick > 20 else None}
        for tick in range(3000)
        for index in (0, 1)
    ]
    path = tmp_path / "trace.parquet"
    write_samples(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    telemetry = Telemetry("here", "watch", devices=[ReplayDevice(track) for track in load_tracks(path)])
    yield telemetry
    telemetry.stop()


def until(happening: Iterator[Event], seen: Callable[[list[Event]], bool]) -> list[Event]:
    """The events until there is what was waited for, which the test's own time limit bounds."""
    events: list[Event] = []
    while not seen(events):
        events.append(next(happening))
    return events


def test_what_slows_a_run_is_told_with_rank_gpu_and_cause(telemetry: Telemetry) -> None:
    listener = Listener("127.0.0.1:0")
    wanted = {"run", "slow rank 1", "slow GPU-1", "heat GPU-1", "error"}

    def named(event: Event) -> str:
        return " ".join(filter(None, [event.kind, event.details.get("of")]))

    with training(listener.address, 0.02, 0.06):
        events = until(
            run_events(listener, telemetry, None, WINDOW_S), lambda seen: wanted <= {named(one) for one in seen}
        )
    listener.close()
    found = {named(event): event for event in events}
    assert "2 ranks tell of their steps" in "; ".join(event.text for event in events if event.kind == "run")
    assert found["slow rank 1"].details["cost"] > 0.5
    assert found["slow GPU-1"].details["cause"] == "heat"
    assert found["slow GPU-1"].details["cost"] == pytest.approx(0.25)
    assert found["heat GPU-1"].details["peak_gpu_temp_c"] == 90.0
    assert found["error"].text == "GPU-1: 1 XID errors, the last one 79"
    assert not any(event.details.get("of") == "GPU-0" for event in events)
    assert {event.search_id for event in events} == {None}
    assert json.loads(json.dumps(found["heat GPU-1"].to_dict()))["kind"] == "heat"


def test_a_run_that_tells_no_more_is_silent(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SILENT_S", 1.0)
    listener = Listener("127.0.0.1:0")
    happening = run_events(listener, telemetry, None, WINDOW_S)
    with training(listener.address, 0.02):
        until(happening, lambda seen: [event.kind for event in seen].count("run") > 0)
    told = until(happening, lambda seen: any(event.details.get("silent") for event in seen))[-1]
    assert "no step for" in told.text
    with training(listener.address, 0.02):
        until(happening, lambda seen: any("tell of their steps" in event.text for event in seen))
    listener.close()


@pytest.mark.usefixtures("interruptible")
def test_the_command_tells_a_webhook_until_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[dict[str, Any]] = []

    class Taking(BaseHTTPRequestHandler):
        """Ends the command, which waits for the answer, as the user's Ctrl-C does."""

        def do_POST(self) -> None:
            came.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            os.kill(os.getpid(), signal.SIGINT)

        def log_message(self, *arguments: Any) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Taking)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(run, "WINDOW_S", WINDOW_S)
    address = f"127.0.0.1:{free_port()}"
    with training(address, 0.02):
        called = CliRunner().invoke(
            main,
            ["watch", "--run", "--listen", address, "--json", "--webhook", f"http://127.0.0.1:{server.server_port}"],
        )
    server.shutdown()
    server.server_close()
    assert (called.exit_code, called.stderr) == (0, "")
    (line,) = called.stdout.splitlines()
    assert came == [json.loads(line)]
    assert (came[0]["kind"], came[0]["details"]) == ("run", {"ranks": 1})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "watch: give a SEARCH"),
        (["--run", "--listen", "nowhere"], "listen: 'nowhere' cannot be listened at"),
        (["s1", "--listen", "127.0.0.1:7171"], "go with --run"),
        (["--run", "--layout", "zero_stage=1"], "--layout goes with a SEARCH"),
        (["--run", "--webhook", "x"], "webhook"),
    ],
)
def test_what_cannot_be_watched_is_refused(arguments: list[str], words: str) -> None:
    called = CliRunner().invoke(main, ["watch", *arguments])
    assert (called.exit_code, called.stdout, called.stderr.count("\n")) == (2, "", 1)
    assert words in called.stderr


def test_python_watches_what_the_command_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WINDOW_S", WINDOW_S)
    address = f"127.0.0.1:{free_port()}"
    with training(address, 0.02):
        happening = Wattune().watch_run(listen=address)
        assert next(happening).kind == "run"
        happening.close()
    Listener(address).close()  # free again
