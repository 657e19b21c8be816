"""The Ray that a search starts for itself: what it says, and what it leaves behind, which is nothing."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TextIO

import psutil
import pytest

from service.cluster import SCRATCH
from trainables.scratch import LOCK, scratch

RAY = """
import sys, time
import ray
from ray._private.utils import publish_error_to_driver
from service.cluster import ray_session
from service.problem import Cluster

with ray_session(Cluster(gpus_per_node=1, accelerator="cpu")):
    # As the raylet itself does it, of a worker that it lost.
    publish_error_to_driver("worker_died", "ray::IDLE died", ray._private.worker.global_worker.gcs_client)
    print("up", ray.get(ray.remote(lambda: __import__("tempfile").mkdtemp()).remote()), flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for all temporary files, short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


def started(temporary: Path, seconds: float, home: Path) -> subprocess.Popen[str]:
    """A process that has Ray for so many seconds."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"TMPDIR": str(temporary), "WATTUNE_HOME": str(home)}
    command = [sys.executable, "-c", RAY, str(seconds)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def test_a_ray_that_does_not_start_leaves_nothing(temporary: Path, tmp_path: Path) -> None:
    deep = temporary / ("d" * 100)  # too long for a socket
    deep.mkdir()
    process = started(deep, 0, tmp_path)
    said, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "up" not in said.split()
    assert list(deep.iterdir()) == []


def _wait_in_scratch(entered: Event) -> None:
    with scratch(SCRATCH):
        entered.set()
        time.sleep(600)


def test_what_a_killed_search_left_goes_with_the_next(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    foreign = temporary / "wattune-ray-foreign"
    foreign.mkdir()
    context = multiprocessing.get_context("fork")
    entered = context.Event()
    killed = context.Process(target=_wait_in_scratch, args=(entered,), daemon=True)
    killed.start()
    assert entered.wait(60)
    (left,) = set(temporary.iterdir()) - {foreign}
    with scratch(SCRATCH) as beside:
        assert left.exists(), "its search lives"
        killed.kill()
        killed.join()
        with scratch(SCRATCH) as mine:
            assert set(temporary.iterdir()) == {foreign, Path(beside), Path(mine)}
    assert list(temporary.iterdir()) == [foreign]


def test_a_search_that_has_just_begun_keeps_its_folder(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    lock = fcntl.flock

    def late(file: TextIO, operation: int) -> None:
        """Another search begins before this one has its lock."""
        monkeypatch.setattr(fcntl, "flock", lock)
        with scratch(SCRATCH):
            pass
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with scratch(SCRATCH) as mine:
        assert [path.name for path in Path(mine).iterdir()] == [LOCK]
        with scratch(SCRATCH):
            assert Path(mine).exists()
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT])
def test_a_session_leaves_nothing_and_says_nothing(
    number: signal.Signals | None, temporary: Path, tmp_path: Path
) -> None:
    process = started(temporary, 3 if number is None else 600, tmp_path)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"up {temporary}/wattune-ray-"), line
    family = psutil.Process(process.pid).children(recursive=True)
    if number is not None:
        time.sleep(2)  # for what the raylet says to come through
        process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert "ray::IDLE" not in rest
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert list(temporary.iterdir()) == []
