"""Faults that are injected into a fake driver, this machine and a Ray cluster, and what the whole doctor is to say of
each: from what is gathered to the line that is printed. Tests and `benchmarks.judge.doctor` read the same table.

On the fake driver what GPUs attain is made up (`tests.service.doctor.scenarios`): there is none behind it. All else is
as it is where the doctor runs.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.service.doctor.clusters import Node, examined, nvidia
from tests.service.doctor.scenarios import examine
from tests.telemetry.scenarios import ROOT, Interpreter, compile_nvml

HERE = Path(__file__).parent

IN_ORDER = {"driver": "580.159.04", "gpus": 4, "links": 18, "clock": 1900, "heat": 0, "uncorrected": 0}
OTHERS = {"busy": "0 0 0 99", "memory": "1 1 1 120"}
"""Of four GPUs the last one is in use."""

MACHINES_OWN = ("host", "disk")
"""Checks by which this machine may have faults of its own: it may be busy, or its disk small."""


@dataclass(frozen=True)
class Fault:
    """What is injected, of which check the line is, and what it says: of whom, what was seen, what is expected."""

    name: str
    check: str
    told: str


@dataclass(frozen=True)
class OfDriver(Fault):
    """The fake driver's `settings`, those which change one after the other while GPUs work, and how what they attain
    differs from a good GPU's, in each of one or more examinations."""

    settings: Mapping[str, object] = field(default_factory=dict)
    meanwhile: tuple[Mapping[str, object], ...] = ({},)
    differs: tuple[Mapping[str, Mapping[str, Any]], ...] = ({},)


@dataclass(frozen=True)
class OfMachine(Fault):
    """More arguments of `wattune doctor`, or a home on a file system of so many MiB."""

    arguments: tuple[str, ...] = ()
    home_mib: int | None = None


@dataclass(frozen=True)
class OfCluster(Fault):
    """A node of a cluster: `{node}` is its name."""


DRIVER = [
    OfDriver(
        "power limit of GPU 1 lowered to 500 W",
        "power limit",
        "GPU 1 (GPU-1): power limit 500 W; expected: 700 W",
        {"limit": "700 500 700"},
    ),
    OfDriver(
        "clock of GPU 2 capped at 900 MHz",
        "clocks",
        "GPU 2 (GPU-2): 900 MHz in matrix products; expected: up to 1,980 MHz",
        {"clock": "1900 1900 900"},
    ),
    OfDriver(
        "one of 18 links of GPU 0 dead",
        "links",
        "GPU 0 (GPU-0): links of 445 GB/s are up; expected: 472 GB/s",
        {"links": "17 18"},
    ),
    OfDriver(
        "memory errors of GPU 2 that were not corrected",
        "ecc",
        "GPU 2 (GPU-2): 4 memory errors that were not corrected",
        {"uncorrected": "0 0 4 0"},
    ),
    OfDriver(
        "XID 79 of GPU 0 while it works",
        "xid",
        "GPU 0 (GPU-0): 1 XID errors while it was watched, the last 79",
        meanwhile=({}, {"xid": 79}, {}),
    ),
    OfDriver(
        "GPU 1 held down by heat while it works",
        "heat",
        "GPU 1 (GPU-1): heat held its clock down for ",
        meanwhile=tuple({"heat": f"0 {60_000_000 * tick} 0"} for tick in range(12)),
    ),
    OfDriver(
        "power brake of GPU 2, 4 s since the driver was loaded",
        "heat",
        "GPU 2 (GPU-2): the power brake held its clock down for 4 s",
        {"heat": "0 0 4000000000 0"},
    ),
    OfDriver(
        "GPU 3 off the bus",
        "answers",
        "GPU 3 does not answer and is not watched: GPU is lost",
        {"dead": 3},
    ),
    OfDriver(
        "GPU 1 at 600 TFLOP/s, its like at 655",
        "products",
        "GPU 1 (GPU-1): 600 TFLOP/s; expected: 622 TFLOP/s or more, as 2 others: it is 8.4% slower",
        differs=({"GPU-1": {"flops": 600e12}},),
    ),
    OfDriver(
        "GPU 0 slower by 4% than in the examination before",
        "products",
        "GPU 0 (GPU-0): 629 TFLOP/s; expected: 635 TFLOP/s or more, as it was before: it got 4.0% slower",
        differs=({}, {"GPU-0": {"flops": 0.96 * 655e12}}),
    ),
    OfDriver(
        "memory of GPU 2 at 3.9 TB/s, its like at 4.3",
        "memory",
        "GPU 2 (GPU-2): 3.90 TB/s; expected: 4.08 TB/s or more",
        differs=({"GPU-2": {"memory_bytes_per_s": 3.9e12}},),
    ),
    OfDriver(
        "launches for GPU 0 of 9 us, for its like of 3.5",
        "launches",
        "GPU 0 (GPU-0): 9.0 us to launch one kernel; expected: 5.2 us at most",
        differs=({"GPU-0": {"launch_s": 9e-6}},),
    ),
]

MACHINE = [
    OfMachine(
        "MLflow away",
        "mlflow",
        "'http://127.0.0.1:9': no server answers there",
        ("--tracking-uri", "http://127.0.0.1:9"),
    ),
    OfMachine("a full disk", "disk", "/home: cannot be written: No space left on device", home_mib=16),
]

CLUSTER = [
    OfCluster("a GPU without a working CUDA", "products", "{node} GPU 0 (GPU-0): matrix products failed: "),
    OfCluster(
        "a node with another driver", "driver", "{node}: driver 570.86.10; expected: 580.159.04, as 2 of 3 nodes"
    ),
    OfCluster("a node whose clock is 42 s ahead", "host clocks", "{node}: its clock is 42.0 s ahead"),
    OfCluster("a node with another numpy", "versions", "{node}: numpy 0.0.1; expected: "),
    OfCluster("a node on which nothing starts", "answers", "{node}: nothing starts there within 30 s"),
]

FAULTS: list[Fault] = [*DRIVER, *MACHINE, *CLUSTER]


@contextmanager
def fake_machine(folder: Path) -> Iterator[Interpreter | None]:
    """A machine of four GPUs of a fake driver, of which Ray lent the first three; None where nothing compiles it."""
    if not compile_nvml(folder):
        yield None
        return
    with Interpreter(folder, module="tests.service.doctor.scenarios") as interpreter:
        yield interpreter


def of_driver(machine: Interpreter, fault: OfDriver | None) -> list[str]:
    """The doctor's lines of that machine with a fault, or in order."""
    fault = fault or OfDriver("", "", "")
    scene = {"meanwhile": fault.meanwhile, "differs": fault.differs}
    lines, _ = machine.run(examine, scene, **{**IN_ORDER, **OTHERS, **fault.settings})
    return list(lines)


def of_machine(folder: Path, fault: OfMachine) -> list[str] | str:
    """The doctor's lines of this very machine with a fault, or why it cannot be injected here."""
    home = folder / "home"
    home.mkdir()
    command = [sys.executable, "-m", "service.cli", "doctor", *fault.arguments]
    if fault.home_mib is not None:
        mount = f"mount -t tmpfs -o size={fault.home_mib}m none {home}"
        apart = ["unshare", "-Urm", "sh", "-c"]
        if not shutil.which("unshare") or subprocess.run([*apart, mount], capture_output=True).returncode:
            return "this user may mount no file system"
        command = [*apart, f'{mount} && exec "$@"', "sh", *command]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))}
    environment |= {"PYTHONPATH": str(ROOT), "WATTUNE_HOME": str(home)}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def of_cluster(folder: Path) -> tuple[list[str], dict[str, str]] | str:
    """The doctor's lines of a cluster with all faults of `CLUSTER`, each on a node of its own, and these nodes' names
    by fault; or why there is no such cluster."""
    driver, other, clock = (folder / name for name in ("driver", "numpy", "ahead.so"))
    driver.mkdir()
    if not compile_nvml(driver):
        return "no C compiler to build the fake driver with"
    compiler = shutil.which("gcc") or shutil.which("cc") or ""
    subprocess.run([compiler, "-shared", "-fPIC", "-o", clock, HERE / "ahead.c"], check=True)
    (other / "numpy-0.0.1.dist-info").mkdir(parents=True)
    (other / "numpy-0.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    stuck = folder / "stuck"
    stuck.mkdir()
    hang = "import sys, time\nif any('default_worker' in each for each in sys.orig_argv): time.sleep(600)\n"
    (stuck / "sitecustomize.py").write_text(hang)
    faulty = [
        Node(nvidia(driver, "580.159.04")),
        Node(nvidia(driver, "570.86.10", busy=99)),
        Node({"LD_PRELOAD": str(clock), "RAY_LD_PRELOAD_ON_WORKERS": "1", "AHEAD": "42"}, gpus=0),
        Node({"PYTHONPATH": os.pathsep.join(map(str, (other, ROOT)))}, gpus=0),
        Node({"PYTHONPATH": os.pathsep.join(map(str, (stuck, ROOT)))}, gpus=0),
    ]
    answer = examined(folder, [Node(nvidia(driver, "580.159.04")), *faulty])
    names = [f"{socket.gethostname()} ({each[:6]})" for each in answer["ids"][1:]]
    return answer["lines"], {fault.name: name for fault, name in zip(CLUSTER, names, strict=True)}


def wrong(lines: list[str]) -> list[tuple[str, str]]:
    """Of each fault that the doctor tells its check and the rest of its line."""
    told = (line.removeprefix("!!").strip() for line in lines if line.startswith("!!"))
    split = (line.split("  ", 1) for line in told)
    return [(check, rest.strip()) for check, rest in split]


def names(line: tuple[str, str], fault: Fault, node: str | None = None) -> bool:
    """Whether a line is the one of a fault, on that node of a cluster."""
    check, rest = line
    return check == fault.check and fault.told.format(node=node) in rest
