"""Programs of a user's as trials: measured, or ended with the right status and cause, and without a trace."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow as pa
import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from search_spaces.layout import Layout
from telemetry.samples import SCHEMA
from telemetry.windows.trial import summarise
from tests.trainables.conftest import RunRanks
from tests.trainables.test_child import is_gone, trial_processes, wait_until
from trainables.child import Nursery
from trainables.command import TRIAL_DIR, Command, LogPatterns
from trainables.foreign.rank import Member, torchrun_environment
from trainables.foreign.steps import HOOK, HookSteps
from trainables.measure import Procedure
from trainables.platforms.cpu import PLATFORM as CPU
from trainables.platforms.cuda import PLATFORM as CUDA
from trainables.program import Place, TrialRequest
from trainables.worker import Follower

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
PROGRAM = str(Path(__file__).parent / "foreign_program.py")
LAYOUT = Layout("megatron", 2, 8, micro_batch_size=2, precision="fp32")
PROCEDURE = Procedure(steady_steps=2, warmup_tolerance=0.5, warmup_max_s=0.2, window_s=0.1, window_min_steps=6)
COMMAND = Command(("python", PROGRAM), (), (), str(ROOT), tokens_per_step=8 * 32, steps=None)
LOGGED = LogPatterns(r"step: (?P<step>\d+)  loss: (?P<loss>\S+)  took (?P<seconds>\S+) s")
REQUEST = TrialRequest("program", LAYOUT, COMMAND, PROCEDURE, deadline_s=60)


def request(*arguments: str, ranks: int = 2, steps: LogPatterns | None = None) -> TrialRequest:
    """A trial of the program on so many ranks, with an id of its own."""
    command = replace(COMMAND, arguments=(*COMMAND.arguments, *arguments), steps=steps)
    trial_id = f"{' '.join(arguments)} {time.monotonic_ns()}"
    return replace(REQUEST, trial_id=trial_id, layout=replace(LAYOUT, num_gpus=ranks), program=command)


def test_a_program_that_calls_the_hook_is_measured(run_ranks: RunRanks) -> None:
    outcomes = run_ranks(request())
    assert [(outcome.status, outcome.cause) for outcome in outcomes] == [("ok", None)] * 2
    first, second = (outcome.report for outcome in outcomes)
    assert first is not None
    assert second is not None
    timing = first.timings[8]
    # Which steps are timed, how long they took and what they did is the same to all ranks.
    assert (timing.warmup_steps_s, timing.window_steps_s) == (
        second.timings[8].warmup_steps_s,
        second.timings[8].window_steps_s,
    )
    assert len(timing.window_steps_s) >= 6
    assert min(timing.warmup_steps_s[1:] + timing.window_steps_s) >= 0.005
    count = len(timing.warmup_steps_s) + len(timing.window_steps_s)
    assert first.losses == second.losses == pytest.approx([1 + 1 / step for step in range(1, count + 1)])
    window = range(count - len(timing.window_steps_s) + 1, count + 1)
    assert first.tokens_per_step == pytest.approx(sum(1000 + step for step in window) / len(window))
    assert (first.coordinates["dp"], second.coordinates["dp"]) == (0, 1)


def test_a_step_is_as_long_as_the_program_s_own_clock_says(run_ranks: RunRanks, tmp_path: Path) -> None:
    record = tmp_path / "stamps"
    longer = replace(request("--record", str(record), ranks=1), procedure=replace(PROCEDURE, window_s=1.0))
    (outcome,) = run_ranks(longer)
    assert outcome.report is not None
    timing = outcome.report.timings[8]
    stamps = [int(line) for line in record.read_text().split()]
    first, count = len(timing.warmup_steps_s), len(timing.window_steps_s)
    own_s = (stamps[first + count - 1] - stamps[first - 1]) / 1e9
    assert sum(timing.window_steps_s) == pytest.approx(own_s, rel=0.005)
    assert (timing.end_ns - timing.start_ns) / 1e9 == pytest.approx(own_s, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [None, LOGGED])
def test_hook_and_log_agree_with_the_program_s_own_clock(
    steps: LogPatterns | None, run_ranks: RunRanks, tmp_path: Path
) -> None:
    arguments = ("--record", str(tmp_path / "stamps"), "--seconds", "0.05", "--tell", "log" if steps else "hook")
    longer = replace(request(*arguments, ranks=1, steps=steps), procedure=replace(PROCEDURE, window_s=10.0))
    (outcome,) = run_ranks(longer)
    assert outcome.report is not None
    timing = outcome.report.timings[8]
    stamps = [int(line) for line in (tmp_path / "stamps").read_text().split()]
    first, count = len(timing.warmup_steps_s), len(timing.window_steps_s)
    own_s = (stamps[first + count - 1] - stamps[first - 1]) / 1e9
    assert sum(timing.window_steps_s) == pytest.approx(own_s, rel=0.005)


def test_a_log_of_one_rank_times_all(run_ranks: RunRanks) -> None:
    slow = replace(
        request("--tell", "log", "--seconds", "0.05", steps=LOGGED), procedure=replace(PROCEDURE, window_s=1)
    )
    outcomes = run_ranks(slow)
    assert [(outcome.status, outcome.cause) for outcome in outcomes] == [("ok", None)] * 2
    first, second = (outcome.report for outcome in outcomes)
    assert first is not None
    assert second is not None
    assert first.timings[8].window_steps_s == second.timings[8].window_steps_s
    assert first.losses == second.losses == pytest.approx([1 + 1 / (1 + i) for i in range(len(first.losses))], abs=1e-4)
    for report in (first, second):  # the window is the same to within the time that a message takes
        timing = report.timings[8]
        assert (timing.end_ns - timing.start_ns) / 1e9 == pytest.approx(sum(timing.window_steps_s), rel=0.5)


def test_a_log_whose_times_are_not_those_of_its_lines_is_told(run_ranks: RunRanks) -> None:
    wrong = LogPatterns(r"step: (?P<step>\d+)  loss: \S+  took (?P<milliseconds>\S+) s")
    (outcome,) = run_ranks(request("--tell", "log", ranks=1, steps=wrong))
    assert outcome.status == "ok"
    assert outcome.report is not None
    (problem,) = outcome.report.problems
    assert problem.startswith("steps take 5e-06 s by the program's log, but its lines came every 0.0")


@pytest.mark.parametrize(
    ("arguments", "status", "cause"),
    [
        (["--fault", "crash"], "crash", "ProgramFailed: exit code 1: ValueError: the reason"),
        (["--fault", "exit"], "crash", "ProgramFailed: exit code 3"),
        (["--fault", "killed"], "crash", "ProgramFailed: killed by SIGKILL"),
        (["--fault", "device memory"], "oom", "OutOfMemory: exit code 1: RuntimeError: CUDA out of memory. Tried to"),
        (["--fault", "host memory"], "oom", "OutOfMemory: exit code 1: MemoryError"),
        (["--fault", "nan"], "invalid", "the loss is not finite: nan at first, nan at last"),
        (["--fault", "flat"], "invalid", "the loss does not fall: 1.0000 at first, 1.0000 at last"),
        (["--steps", "5"], "invalid", "the program ended after 5 steps, before they were timed: it must train on"),
        (
            ["--steps", "5", "--tell", "nothing"],
            "invalid",
            "the program ended without having told of a step: the program is to call wattune_steps.step() after each",
        ),
        (["--no-such-argument"], "crash", "error: unrecognized arguments: --no-such-argument"),
    ],
)
def test_what_goes_wrong_has_its_status_and_cause(
    arguments: list[str], status: str, cause: str, run_ranks: RunRanks
) -> None:
    (outcome,) = run_ranks(request(*arguments, ranks=1))
    assert (outcome.status, cause in str(outcome.cause)) == (status, True), outcome.cause
    if arguments == ["--fault", "crash"]:
        assert 'foreign_program.py", line' in str(outcome.traceback)  # the program's own


def test_one_rank_that_fails_ends_the_trial_for_all(run_ranks: RunRanks) -> None:
    first, last = run_ranks(request("--fault", "device memory"))
    assert first.status in ("aborted", "crash")  # unless it hears first that its peer is gone
    assert last.status == "oom"


@pytest.mark.parametrize(
    ("arguments", "steps", "cause"),
    [
        (
            ["--tell", "nothing"],
            None,
            "no result after 4 s, in phase start: waited for the first step: the program is to call "
            "wattune_steps.step() after each optimizer step, on every rank; it printed nothing",
        ),
        (
            ["--tell", "nothing"],
            LOGGED,
            "waited for the first step: a line of the program's output is to match 'step: ",
        ),
        (["--fault", "hang", "--at", "2"], None, "on every rank; its last line of output is 'about to hang'"),
    ],
)
def test_a_program_that_tells_of_no_more_steps_hangs(
    arguments: list[str], steps: LogPatterns | None, cause: str, run_ranks: RunRanks
) -> None:
    (outcome,) = run_ranks(replace(request(*arguments, ranks=1, steps=steps), deadline_s=4))
    assert (outcome.status, cause in str(outcome.cause)) == ("hang", True), outcome.cause
    assert ("waited for step 2: " in str(outcome.cause)) == ("--fault" in arguments)


def test_further_words_for_memory_are_the_trainer_s(run_ranks: RunRanks) -> None:
    trial = request("--fault", "crash", ranks=1)
    assert isinstance(trial.program, Command)
    (outcome,) = run_ranks(replace(trial, program=replace(trial.program, out_of_memory=("the reas.n",))))
    assert outcome.status == "oom"
    assert str(outcome.cause).endswith(": OutOfMemory: exit code 1: ValueError: the reason")


def test_a_program_that_is_not_there_is_a_crash(run_ranks: RunRanks) -> None:
    trial = replace(request(ranks=1), program=replace(COMMAND, arguments=("no-such-program",)))
    (outcome,) = run_ranks(trial)
    assert outcome.status == "crash"
    assert "it could not be started: [Errno 2] No such file or directory: 'no-such-program'" in str(outcome.cause)


def test_files_environment_and_folder_are_the_trial_s_own(run_ranks: RunRanks, tmp_path: Path) -> None:
    look = """
import os, sys, time
_, path, argument = sys.argv
seen = [open("sub/a.yaml").read(), os.environ["MINE"], os.getcwd(), os.environ["WORLD_SIZE"], argument]
open(path + os.environ["RANK"], "w").write("\\n".join(seen))
while not (os.path.exists(path + "0") and os.path.exists(path + "1")):
    time.sleep(0.01)
"""
    program = Command(
        ("python", "-c", look, str(tmp_path / "seen"), "$HOME; {x} | `y`"),
        (("MINE", f"{TRIAL_DIR}/b"),),
        (("sub/a.yaml", f"out: {TRIAL_DIR}"),),
        None,
        tokens_per_step=1,
        steps=None,
    )
    outcomes = run_ranks(replace(request(), program=program))
    assert "invalid" in {outcome.status for outcome in outcomes}  # it tells of no step
    text, mine, folder, size, argument = (tmp_path / "seen0").read_text().splitlines()
    assert (text, mine, size) == (f"out: {folder}", f"{folder}/b", "2")
    assert argument == "$HOME; {x} | `y`"  # no shell reads it
    assert (tmp_path / "seen0").read_text() == (tmp_path / "seen1").read_text()
    wait_until(lambda: not Path(folder).exists())


def running_4242() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "4242"]]


@pytest.mark.slow
def test_plain_pytorch_trains_and_says_where_its_steps_go(run_ranks: RunRanks) -> None:
    arguments = ("python", "examples/plain_pytorch.py", "--micro-batch-size", "2", "--global-batch-size", "8")
    trial = replace(
        request(), program=replace(COMMAND, arguments=arguments), procedure=replace(PROCEDURE, breakdown=True)
    )
    outcomes = run_ranks(replace(trial, deadline_s=240))
    assert [(outcome.status, outcome.cause) for outcome in outcomes] == [("ok", None)] * 2
    for outcome in outcomes:
        assert outcome.report is not None
        assert outcome.report.environment == {"torch": torch.__version__}
        assert outcome.report.profile is not None
        assert outcome.report.profile.problem is None
        breakdown = outcome.report.profile.breakdown
        assert breakdown is not None
        assert breakdown.matmul_s > 0
        assert breakdown.all_reduce_s > 0


def test_without_torch_there_is_no_breakdown(run_ranks: RunRanks) -> None:
    (outcome,) = run_ranks(replace(request(ranks=1), procedure=replace(PROCEDURE, breakdown=True)))
    assert outcome.status == "ok"
    assert outcome.report is not None
    assert outcome.report.profile is not None
    assert outcome.report.profile.problem == "the profiler failed: RuntimeError: the program does not use torch"


@pytest.mark.slow
def test_counters_are_read_near_the_edges_of_steps_that_are_told_of_late(nursery: Nursery, store: TCPStore) -> None:
    """Else a trial of long steps on a GPU would have no energy."""
    marks: list[int] = []
    telemetry = SimpleNamespace(
        mark=SimpleNamespace(remote=lambda: marks.append(time.monotonic_ns())),
        working=SimpleNamespace(remote=lambda work: None),
    )
    program = replace(COMMAND, arguments=("python", str(Path(__file__).parent / "late_program.py")))
    procedure = replace(PROCEDURE, window_s=1, window_min_steps=2)
    trial = replace(REQUEST, trial_id="late", layout=replace(LAYOUT, num_gpus=1), program=program, procedure=procedure)
    follower = Follower(trial, telemetry, "GPU-0", True, lambda progress: None)
    place = Place(0, 0, HOST, store.port, CPU)
    began = time.monotonic()
    with nursery.trial(trial, place, lambda: time.monotonic() - began, lambda: False, follower.follow) as outcome:
        assert (outcome.status, outcome.cause) == ("ok", None)
    ended_ns = time.monotonic_ns()
    assert outcome.report is not None
    assert outcome.report.device == "GPU-0"
    timing = outcome.report.timings[8]
    # A GPU of 700 W is sampled at every tick, and its counter is read at those after a mark, as telemetry does it.
    tick_ns = 100_000_000
    rows = [
        {"time_ns": ns, "node": "n", "device": "GPU-0", "energy_method": "counter", "power_w": 700.0}
        | ({"energy_mj": round(ns * 700e-6)} if any(ns - tick_ns < mark <= ns for mark in [*marks, ended_ns]) else {})
        for ns in range(timing.start_ns - 31 * 10**9, ended_ns + 2 * 10**9, tick_ns)
    ]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    summary = summarise(table, timing.start_ns, timing.end_ns, ["GPU-0"])
    assert (summary.mean_power_w, summary.problems) == (pytest.approx(700, rel=0.01), ())


@pytest.mark.parametrize("how", ["aborted", "child killed", "ended by itself"])
def test_nothing_of_a_program_is_left(how: str, nursery: Nursery, store: TCPStore) -> None:
    """Not even what its children started in sessions of their own."""
    began = time.monotonic()
    steps = ["--steps", "40", "--seconds", "0.05"] if how == "ended by itself" else []
    trial = replace(request("--fault", "children", *steps, ranks=1), procedure=replace(PROCEDURE, window_s=1e9))
    started: list[psutil.Process] = []

    def stop() -> bool:
        if not started and running_4242():
            started.extend(
                member for child in trial_processes(psutil.Process()) for member in child.children(recursive=True)
            )
            started.extend(running_4242())
            if how == "child killed":
                for child in trial_processes(psutil.Process()):
                    child.kill()
        return how == "aborted" and bool(started)

    with nursery.trial(trial, Place(0, 0, HOST, store.port, CPU), lambda: time.monotonic() - began, stop) as outcome:
        pass
    assert outcome.status == {"aborted": "aborted", "child killed": "crash", "ended by itself": "invalid"}[how]
    assert len(started) >= 4  # the guard, the program, its child and that one's
    wait_until(lambda: all(is_gone(member) for member in started), timeout_s=10)


def test_the_environment_is_torchrun_s() -> None:
    """Also where the ranks of a node do not follow each other."""
    members = [Member("a", 0, "10.0.0.1"), Member("b", 0, "10.0.0.2"), Member("a", 1, "10.0.0.1")]
    last = torchrun_environment(2, members, 4711)
    ranks = {"RANK": "2", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}
    nodes = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"}
    assert last | ranks | nodes == last
    names = re.findall(r'"([A-Z_]+)": ', inspect.getsource(LocalElasticAgent._start_workers))
    assert set(last) == {"LOCAL_RANK", *names}


def test_outside_wattune_the_hook_does_nothing() -> None:
    program = "import sys, wattune_steps; wattune_steps.step(loss=object()); print('torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "WATTUNE_STEPS"}
    environment["PYTHONPATH"] = str(HOOK)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", ["wattune_steps", "wattune_huggingface", "wattune_lightning"])
def test_the_hook_is_python_3_8(name: str) -> None:
    ast.parse((HOOK / f"{name}.py").read_text(), feature_version=(3, 8))


ASYNCHRONOUS = """
import time, torch, wattune_steps
a = torch.ones(4096, 4096, device="cuda")
for step in range(60):
    for _ in range(20):
        a = (a @ a).clamp(max=1)
    wattune_steps.step(loss=a.mean())
    if step in (19, 59):
        torch.cuda.synchronize()
        print(time.monotonic_ns(), flush=True)
"""


@pytest.mark.gpu
def test_steps_of_a_gpu_are_over_when_it_has_ended_them(tmp_path: Path) -> None:
    """Though the host is many steps ahead of it."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    steps = HookSteps(tmp_path / "sock")
    environment = os.environ | steps.environment | {"PYTHONPATH": str(HOOK)}
    done = subprocess.run(
        [sys.executable, "-c", ASYNCHRONOUS], env=environment, capture_output=True, text=True, check=True
    )
    wait_until(lambda: steps.complete)
    ends = [steps.take() for _ in range(60)]
    first_ns, last_ns = map(int, done.stdout.split())
    assert (ends[59].ns - ends[19].ns) == pytest.approx(last_ns - first_ns, rel=0.005)
    assert ends[59].ns == pytest.approx(last_ns, abs=5_000_000)
    told = steps.told(ends, 0)
    assert told is not None
    assert told.losses == [1.0] * 60
    assert told.peak_memory_gib is not None
    assert steps.device == CUDA.identity(CUDA.device(0))
