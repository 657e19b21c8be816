"""Faults of a fake driver under the genuine binding, and what this very machine says of itself."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from service.cli import main
from service.doctor.gather import disk
from service.doctor.nodes import store_facts
from service.home import Home
from tests.service.doctor.scenarios import examine
from tests.telemetry.scenarios import Interpreter, compile_nvml


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    """Has four GPUs of a fake driver, of which Ray lent the first three."""
    folder = tmp_path_factory.mktemp("nvml")
    if not compile_nvml(folder):
        pytest.skip("no C compiler to build the fake driver with")
    with Interpreter(folder, module="tests.service.doctor.scenarios") as interpreter:
        yield interpreter


GOOD = {"driver": "580.159.04", "gpus": 4, "links": 18, "clock": 1900, "heat": 0, "uncorrected": 0}
OTHERS = {"busy": "0 0 0 99", "memory": "1 1 1 120"}
HELD = "GPU 3 (GPU-3): left alone: in use, 120 GiB and 99% of the time"


def examined(
    machine: Interpreter, meanwhile: list[dict[str, object]], slow: str | None = None, **settings: object
) -> set[str]:
    """What was found, without the host's name, and without what this machine itself may lack: time, a large disk."""
    found, _ = machine.run(examine, {"meanwhile": meanwhile, "slow": slow}, **GOOD | OTHERS | settings)
    host = socket.gethostname()
    return {line.replace(f"{host} ", "") for line in found if line.split(":")[0] not in ("host", "disk")}


def test_gpus_in_order_have_no_fault_and_those_of_others_are_left_alone(machine: Interpreter) -> None:
    assert examined(machine, [{}]) == {HELD}


def test_each_fault_of_a_driver_is_named(machine: Interpreter) -> None:
    faults = {"limit": "700 500 700", "clock": "1900 1900 900", "links": "17 18", "uncorrected": "0 0 4 0"}
    hot: list[dict[str, object]] = [{"heat": f"0 {60_000_000 * tick} 0"} for tick in range(12)]
    hot[6]["xid"] = 79
    found = examined(machine, hot, slow="GPU-1", **faults)
    assert {line for line in found if " of the time" not in line} == {
        "links: GPU 0 (GPU-0): links of 445 GB/s are up",
        "xid: GPU 0 (GPU-0): 1 XID errors while it was watched, the last 79",
        "power limit: GPU 1 (GPU-1): power limit 500 W",
        "products: GPU 1 (GPU-1): 600 TFLOP/s",
        "clocks: GPU 2 (GPU-2): 900 MHz in matrix products",
        "ecc: GPU 2 (GPU-2): 4 memory errors that were not corrected since the driver was loaded",
    }
    assert sum(line.startswith("heat: GPU 1 (GPU-1): heat held its clock down for ") for line in found) == 1
    assert HELD in found


def test_a_gpu_that_does_not_answer_is_told(machine: Interpreter) -> None:
    said = "GPU 3 does not answer and is not watched: GPU is lost"
    assert examined(machine, [{}], dead=3) == {f"answers: {socket.gethostname()}: {said}"}


def test_a_disk_that_takes_no_more_is_told_with_the_reason(tmp_path: Path) -> None:
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, limits[1]))
        full = disk(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert (full.free_bytes, full.write_bytes_per_s, full.error) == (None, None, "File too large")
    good = disk(tmp_path)
    assert good.error is None
    assert good.write_bytes_per_s is not None
    assert good.write_bytes_per_s > 1e5


def test_the_command_examines_this_machine_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow is away; how busy this machine is, nobody knows."""
    monkeypatch.setenv("WATTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    called = CliRunner().invoke(main, ["doctor", "--json", "--tracking-uri", "http://127.0.0.1:9"])
    assert called.exit_code == 1, called.output
    answer = json.loads(called.stdout)
    assert not answer["well"]
    (away,) = (one for one in answer["findings"] if one["check"] == "mlflow")
    assert (away["verdict"], away["subject"]) == ("wrong", "http://127.0.0.1:9")
    assert "no server answers there" in away["seen"]
    (node,) = answer["facts"]["nodes"]
    kept = [path.read_text().splitlines() for path in (tmp_path / "home" / "doctor").glob("*.jsonl")]
    if node["host"] is None:
        assert kept == []
        assert "left alone" in node["host_error"]
    else:
        ((line,),) = kept
        assert json.loads(line)["flops"] == node["host"]["flops"]


def test_a_cluster_that_is_not_there_is_one_line() -> None:
    command = [sys.executable, "-m", "service.cli", "doctor", "--address", "127.0.0.1:9"]
    called = subprocess.run(command, capture_output=True, text=True, check=False)  # this process may have joined a Ray
    assert (called.returncode, called.stdout) == (2, "")
    assert called.stderr.startswith("wattune: address 127.0.0.1:9: no Ray cluster answers")
    assert called.stderr.count("\n") == 1


def test_a_machine_that_nothing_was_recorded_on_has_no_store_yet(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    own = f"sqlite:///{home.path / 'mlflow.db'}"
    assert store_facts(own, home).error is None
    assert not home.path.exists()
    assert "there is no directory" in (
        store_facts(f"sqlite:///{tmp_path / 'elsewhere' / 'mlflow.db'}", home).error or ""
    )
