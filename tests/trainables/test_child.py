from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from trainables.child import ABORTED, Nursery, Outcome, error_line, is_out_of_memory
from trainables.data import SYNTHETIC
from trainables.measure import Procedure
from trainables.platforms.cpu import PLATFORM as CPU
from trainables.program import InvalidTrial, Place, Progress, RankProgram, RankReport, TrialRequest
from trainables.status import Status
from trainables.training import Training

MODEL = ModelShape("llama", 2, 64, 4, 2, 176, 512, 64)
LAYOUT = Layout("megatron", 1, 4, micro_batch_size=2, precision="fp32")
SHORT = Procedure(steady_steps=1, warmup_tolerance=0.5, warmup_max_s=1e-9, window_s=1e-9, window_min_steps=18)
ENDLESS = Procedure(steady_steps=9, warmup_tolerance=1e-9, warmup_max_s=1e9, window_s=1e9, window_min_steps=1)
TRAINING = Training(MODEL, SYNTHETIC, sequence_length=32, seed=0)
REQUEST = TrialRequest("short", LAYOUT, TRAINING, SHORT, deadline_s=120)
TRAINING_FOREVER = replace(REQUEST, trial_id="endless", procedure=ENDLESS)
WAITING_FOREVER = replace(REQUEST, trial_id="lonely", layout=replace(LAYOUT, num_gpus=2))  # the other rank never comes


def trial_processes(worker: psutil.Process) -> list[psutil.Process]:
    """What the fork server of a worker process has started and is still there."""
    servers = [child for child in worker.children() if "forkserver" in " ".join(child.cmdline())]
    return [process for server in servers for process in server.children() if not is_gone(process)]


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.05)


def is_training(worker: psutil.Process) -> bool:
    """By then a child of these tests has left the build behind, which takes a fraction of it."""
    with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
        return any(process.cpu_times().user > 1.5 for process in trial_processes(worker))
    return False


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def run(nursery: Nursery, store: TCPStore) -> Iterator[Callable[..., Outcome]]:
    """Run rank 0 of a trial. In the end nothing of it may be left."""

    def run_rank_0(
        request: TrialRequest,
        elapsed_s: Callable[[], float] = lambda: 0.0,
        aborted: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        place = Place(0, 0, "127.0.0.1", store.port, CPU)
        request = replace(request, trial_id=f"{request.trial_id} {time.monotonic()}")
        with nursery.trial(request, place, elapsed_s, aborted) as outcome:
            return outcome

    yield run_rank_0
    wait_until(lambda: not trial_processes(psutil.Process()))


def test_all_that_use_the_fork_server_run_on_one_worker(nursery: Nursery, request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@nursery") == hasattr(request.config, "workerinput")


def test_a_child_reports(run: Callable[..., Outcome]) -> None:
    outcome = run(REQUEST)
    assert (outcome.status, outcome.cause) == ("ok", None)
    assert outcome.report is not None
    assert len(outcome.report.losses) == 20


@dataclass(frozen=True)
class Sums(RankProgram):
    """A program that is no training: it sums what it is given, and is invalid where that comes to nothing."""

    numbers: tuple[float, ...]

    @staticmethod
    def preload(layouts: Iterable[Layout]) -> list[str]:
        return []

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        on_progress(Progress("sum"))
        if not sum(self.numbers):
            raise InvalidTrial("nothing to report")
        return RankReport(place.rank, {}, None, {}, self.numbers, (sum(self.numbers),), None, {})


def test_a_child_runs_any_program(run: Callable[..., Outcome]) -> None:
    outcome = run(replace(REQUEST, program=Sums((1.0, 2.0))))
    assert outcome == Outcome(Status.OK, None, "sum", RankReport(0, {}, None, {}, (1.0, 2.0), (3.0,), None, {}))
    assert run(replace(REQUEST, program=Sums((1.0, -1.0)))) == Outcome(Status.INVALID, "nothing to report", "sum")


@dataclass(frozen=True)
class Looks(RankProgram):
    """A program that tells in what kind of process it runs."""

    @staticmethod
    def preload(layouts: Iterable[Layout]) -> list[str]:
        return []

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        seen = {"deepspeed": "deepspeed" in sys.modules, "mlflow": sys.modules.get("mlflow") is not None}
        seen |= {"collects": gc.isenabled(), "all kept": gc.get_freeze_count() > 10 * len(gc.get_objects())}
        return RankReport(place.rank, {}, None, {}, (), (), None, {name: str(found) for name, found in seen.items()})


def test_a_child_has_what_it_needs_from_the_server_and_collects_garbage_of_its_own_alone(
    run: Callable[..., Outcome],
) -> None:
    outcome = run(replace(REQUEST, program=Looks()))
    assert outcome.report is not None
    assert outcome.report.environment == {
        "deepspeed": "True",
        "mlflow": "False",
        "collects": "True",
        "all kept": "True",
    }


def test_a_child_lives_until_its_outcome_was_dealt_with(nursery: Nursery, store: TCPStore) -> None:
    request = replace(REQUEST, trial_id="kept", program=replace(TRAINING, data="/nowhere.npy"))
    with nursery.trial(request, Place(0, 0, "127.0.0.1", store.port, CPU), lambda: 0, lambda: False) as outcome:
        assert outcome.status == "crash"
        time.sleep(0.5)
        (child,) = trial_processes(psutil.Process())
        assert not is_gone(child)
    assert is_gone(child)


def test_a_child_keeps_the_store_at_which_ranks_meet(nursery: Nursery) -> None:
    keeping = Nursery(CPU, [])  # by the fork server that is there
    port = keeping.keep_store("127.0.0.1")
    here, there = (TCPStore("127.0.0.1", port, is_master=False) for _ in range(2))
    here.set("greeting", "hello")
    assert there.get("greeting") == b"hello"
    (keeper,) = (one for one in psutil.Process().children(recursive=True) if port in listened(one))
    keeper.kill()
    keeper.wait(10)
    wait_until(lambda: keeping._store is not None and not keeping._store.is_alive())  # the fork server has said so
    trial = keeping.trial(REQUEST, Place(0, 0, "127.0.0.1", port, CPU), lambda: 0, lambda: False)
    with pytest.raises(RuntimeError, match="keeps the key-value store"), trial:
        pass


def listened(process: psutil.Process) -> set[int]:
    """Ports at which a process listens."""
    return {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}


def test_an_error_is_a_crash_with_its_phase_and_text(run: Callable[..., Outcome]) -> None:
    outcome = run(replace(REQUEST, program=replace(TRAINING, data="/nowhere.npy")))
    assert replace(outcome, traceback=None) == Outcome(
        Status.CRASH, "build: MissingDataError: /nowhere.npy does not exist", "build"
    )
    assert outcome.traceback is not None
    assert "open_tokens" in outcome.traceback


def test_a_model_too_large_for_memory_is_out_of_memory(run: Callable[..., Outcome]) -> None:
    outcome = run(replace(REQUEST, program=replace(TRAINING, model=replace(MODEL, vocab=2**40))))
    assert outcome.status == "oom"
    assert outcome.phase == "build"


def test_a_killed_child_is_a_crash_with_signal_and_phase(run: Callable[..., Outcome]) -> None:
    def kill() -> None:
        wait_until(lambda: is_training(psutil.Process()))
        trial_processes(psutil.Process())[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = run(TRAINING_FOREVER)
    killer.join()
    assert outcome == Outcome(Status.CRASH, "the process was killed by SIGKILL in phase warmup", "warmup")


@pytest.mark.parametrize(
    ("request_", "phase", "function"),
    [
        pytest.param(WAITING_FOREVER, "start", "init_process_group", marks=pytest.mark.slow),
        (TRAINING_FOREVER, "warmup", "time_steps"),
    ],
)
def test_the_deadline_ends_a_hang_and_tells_where_it_was(
    request_: TrialRequest, phase: str, function: str, run: Callable[..., Outcome]
) -> None:
    """The deadline has passed once the child is where it stays."""
    began = time.monotonic()

    def elapsed_s() -> float:
        there = is_training(psutil.Process()) if phase == "warmup" else time.monotonic() - began > 6
        return 7.0 if there else 0.0

    outcome = run(replace(request_, deadline_s=6), elapsed_s)
    assert (outcome.status, outcome.phase) == ("hang", phase)
    assert outcome.cause == f"no result after 6 s, in phase {phase}"
    assert outcome.traceback is not None
    assert f"in {function}" in outcome.traceback
    assert "in run" in outcome.traceback


@dataclass(frozen=True)
class WaitsForAThread(RankProgram):
    """A program that hangs where another thread of its process does, which leaves `mark` when it gets there."""

    mark: Path

    @staticmethod
    def preload(layouts: Iterable[Layout]) -> list[str]:
        return []

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        def never_comes() -> None:
            self.mark.touch()
            threading.Event().wait()

        thread = threading.Thread(target=never_comes)
        thread.start()
        on_progress(Progress("step"))
        thread.join()
        raise AssertionError("it ended")


def test_the_deadline_tells_where_all_threads_were(run: Callable[..., Outcome], tmp_path: Path) -> None:
    mark = tmp_path / "there"
    outcome = run(
        replace(REQUEST, trial_id="thread", program=WaitsForAThread(mark), deadline_s=6),
        elapsed_s=lambda: 7.0 if mark.exists() else 0.0,
    )
    assert outcome.status == "hang"
    assert outcome.traceback is not None
    assert "in never_comes" in outcome.traceback
    assert "in run" in outcome.traceback


def test_a_rank_is_stopped_when_the_trial_is_aborted(run: Callable[..., Outcome]) -> None:
    outcome = run(TRAINING_FOREVER, aborted=lambda: is_training(psutil.Process()))
    assert outcome == Outcome(ABORTED, None, "warmup")


WORKER = """
import sys
from tests.trainables.test_child import TRAINING_FOREVER, WAITING_FOREVER
from torch.distributed import TCPStore
from trainables.child import Nursery
from trainables.platforms.cpu import PLATFORM as CPU
from trainables.program import Place
from trainables.training import Training

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
request = {"train": TRAINING_FOREVER, "wait": WAITING_FOREVER}[sys.argv[1]]
nursery = Nursery(CPU, Training.preload([request.layout]))
print("ready", flush=True)
with nursery.trial(request, Place(0, 0, "127.0.0.1", store.port, CPU), lambda: 0, lambda: False):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["train", "wait"])
def test_a_killed_worker_takes_its_children_along(doing: str) -> None:
    root = Path(__file__).parents[2]
    worker = subprocess.Popen([sys.executable, "-c", WORKER, doing], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        process = psutil.Process(worker.pid)
        wait_until(lambda: is_training(process) if doing == "train" else bool(trial_processes(process)))
        family = process.children(recursive=True)
        assert len(family) >= 2  # the fork server and the trial
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    wait_until(lambda: all(is_gone(member) for member in family))


def chained(outer: BaseException, inner: BaseException, suppressed: bool = False) -> BaseException:
    """What arrives where `inner` was caught and `outer` raised: `from` it or, where `suppressed`, in its handler."""
    try:
        try:
            raise inner
        except BaseException as error:
            if suppressed:
                raise outer  # noqa: B904
            raise outer from error
    except BaseException as error:
        return error


CUDA_TEXT = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(CUDA_TEXT), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (MemoryError(), True),
        (chained(RuntimeError("backward failed"), torch.OutOfMemoryError(CUDA_TEXT)), True),
        (chained(RuntimeError("backward failed"), MemoryError(), suppressed=True), True),
        (RuntimeError("Connection closed by peer"), False),
        (chained(RuntimeError("a"), ValueError("b")), False),
    ],
)
def test_running_out_of_memory_is_known_by_the_chain_of_causes(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_running_out_of_host_memory_is_known_by_torch_s_own_error() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert is_out_of_memory(raised.value)


def test_a_description_is_one_line_from_the_root() -> None:
    error = chained(RuntimeError("backward failed"), ValueError("the reason\nand much more"))
    assert error_line(error, "warmup") == "warmup: ValueError: the reason"
    assert error_line(KeyError(), "build") == "build: KeyError: no message"
    assert len(error_line(ValueError("x" * 9999), "build")) < 400
