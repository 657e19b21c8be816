"""What trials leave behind on purpose is found, told and gone; what belongs to others stays."""

from __future__ import annotations

import _multiprocessing
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from tests.trainables.test_child import is_gone, wait_until
from trainables import leftovers
from trainables.leftovers import MARK, Leftovers

ROOT = Path(__file__).parents[2]

WORKER = """
import sys
from dataclasses import replace
from tests.trainables.test_child import REQUEST
from tests.trainables.test_leftovers import Leaving
from torch.distributed import TCPStore
from trainables.child import Nursery
from trainables import leftovers
from trainables.platforms.cpu import PLATFORM as CPU
from trainables.program import Place

leftovers.PATIENCE_S = 1.0
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
left = leftovers.Leftovers(sys.argv[1])
nursery = Nursery(CPU, ["tests.trainables.test_leftovers"])
for number, what in enumerate(sys.argv[2:]):
    left.begin()
    request = replace(REQUEST, trial_id=str(number), program=Leaving(what))
    with nursery.trial(request, Place(0, 0, "127.0.0.1", store.port, CPU), lambda: 0, lambda: False) as outcome:
        print(outcome.cause, flush=True)
    print(*left.end(), sep=";", flush=True)
"""


@dataclass(frozen=True)
class Leaving:
    """A program that leaves something behind, and fails by saying what."""

    what: str

    def ranks(self, layout: object) -> list[int]:
        return [0]

    def run(self, request: object, place: object, on_progress: object) -> None:
        if self.what == "daemon":
            started = subprocess.Popen(["sh", "-c", "setsid sleep 600 & echo $!"], stdout=subprocess.PIPE, text=True)
            assert started.stdout is not None
            raise RuntimeError(started.stdout.readline().strip())
        if self.what == "segment":
            segment = SharedMemory(create=True, size=1 << 20)
            raise RuntimeError(segment.name)
        if self.what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise RuntimeError("nothing")


def worker(mark: str, *what: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WORKER, mark, *what], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_what_a_trial_leaves_on_purpose_is_told_and_gone() -> None:
    done, _ = worker(uuid4().hex, "nothing", "daemon", "segment", "nothing").communicate(timeout=300)
    causes, left = done.splitlines()[::2], done.splitlines()[1::2]
    daemon, segment = (cause.split(": ")[-1] for cause in causes[1:3])
    assert left[0] == left[3] == ""
    assert left[1].startswith("process ")
    assert left[1].endswith("(sleep 600)")
    assert not psutil.pid_exists(int(daemon)) or is_gone(psutil.Process(int(daemon)))
    assert left[2] == f"shared memory {segment} (1.0 MiB)"
    assert not (Path("/dev/shm") / segment).exists()


def test_a_stopped_child_ends_with_its_worker() -> None:
    process = worker(uuid4().hex, "stopped")
    tree: list[psutil.Process] = []

    def stopped() -> bool:
        tree[:] = psutil.Process(process.pid).children(recursive=True)
        return any(one.status() == psutil.STATUS_STOPPED for one in tree)

    try:
        wait_until(stopped, 120)
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: all(is_gone(one) for one in tree))


def test_a_worker_that_takes_another_s_place_ends_what_that_has_left() -> None:
    mark = uuid4().hex
    orphan = subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: mark})
    other = subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: f"{mark}0"})
    try:
        code = f"from trainables.leftovers import Leftovers; Leftovers({mark!r})"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        assert orphan.wait(30) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (orphan, other):
            process.kill()
            process.wait()


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Leftovers]:
    monkeypatch.setenv(MARK, "")  # to be as before in the end
    return lambda *arguments: Leftovers(uuid4().hex, *arguments)


def test_a_segment_that_somebody_uses_stays(leaving: Callable[..., Leftovers]) -> None:
    left = leaving()
    used = SharedMemory(create=True, size=1 << 16)
    try:
        assert left.end() == ()
    finally:
        used.close()
        used.unlink()


def test_a_semaphore_is_removed_without_a_word(leaving: Callable[..., Leftovers]) -> None:
    left, name = leaving(), f"wattune-{uuid4().hex[:8]}"
    _multiprocessing.SemLock(1, 1, 1, f"/{name}", False)  # as multiprocessing makes them
    made = Path(f"/dev/shm/sem.{name}")
    assert made.exists()
    assert left.end() == ()
    assert not made.exists()


def test_a_semaphore_that_somebody_uses_stays(leaving: Callable[..., Leftovers]) -> None:
    """Its maker has it mapped by a name that is gone, and hands its own to processes that are yet to start."""
    left, name = leaving(), f"wattune-{uuid4().hex[:8]}"
    lock = _multiprocessing.SemLock(1, 1, 1, f"/{name}", False)
    assert left.end() == ()
    again = _multiprocessing.SemLock._rebuild(lock.handle, lock.kind, lock.maxvalue, f"/{name}")
    _multiprocessing.sem_unlink(f"/{name}")
    del lock, again


def test_memory_of_a_gpu_that_does_not_come_back_is_told(
    leaving: Callable[..., Leftovers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "MEMORY_S", 0.3)
    in_use = iter([1.0, 60.0, 1.1])
    left = leaving(lambda: next(in_use))
    assert left.end() == (), "given back a moment later"
    in_use = iter([1.0, *[3.5] * 100])
    left.begin()
    assert left.end() == ("2.5 GiB of the GPU's memory, 0 s later",)


def test_looking_takes_milliseconds(leaving: Callable[..., Leftovers]) -> None:
    """On a machine of its own some 10; ten times as much is not a matter of who else is at work."""
    left, spent = leaving(), []
    for _ in range(5):
        began = time.process_time()
        left.begin()
        left.end()
        spent.append(time.process_time() - began)
    assert min(spent) < 0.05


def test_the_worker_s_own_helpers_are_not_left_behind(leaving: Callable[..., Leftovers]) -> None:
    left = leaving()
    context = multiprocessing.get_context("spawn")
    helper = context.Process(target=time.sleep, args=(600,))
    helper.start()
    try:
        assert left.end() == ()
        assert helper.is_alive()
    finally:
        helper.kill()
        helper.join()
