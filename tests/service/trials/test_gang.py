from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import psutil
import pytest
import ray
from ray.exceptions import ActorUnschedulableError, RayActorError

from search_spaces.coefficients import data_sheet
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from service.problem import Cluster
from service.result import DeviceRecord, TrialResult
from service.spec import load_spec, make_problem
from service.step import Wish
from service.trials.bench import Alone, Bench
from service.trials.evaluate import run_trial
from service.trials.gang import Gang, awaited, close_gangs
from service.trials.pool import Lease, start_pool
from telemetry.actor import Fleet, Work, find_telemetry, start_telemetry, stop_telemetry
from telemetry.devices.cpu import cpu_uuid
from tests.trainables.test_child import wait_until
from trainables.child import Outcome
from trainables.command import Command, LogPatterns
from trainables.data import SYNTHETIC
from trainables.mailbox import Mailbox, Member
from trainables.measure import Procedure
from trainables.program import TrialRequest
from trainables.training import Training

CLUSTER = Cluster(gpus_per_node=2, accelerator="cpu", cpus_per_worker=0.5)
MODEL = ModelShape("llama", 2, 64, 4, 2, 176, 512, 64)
LAYOUT = Layout("megatron", 2, 8, micro_batch_size=2, precision="fp32")
LONGER = replace(LAYOUT, global_batch_size=96)
SHORT = Procedure(steady_steps=2, warmup_tolerance=0.5, warmup_max_s=0.2, window_s=0.2, window_min_steps=10)
ENDLESS = Procedure(steady_steps=9, warmup_tolerance=1e-9, warmup_max_s=1e9, window_s=1e9, window_min_steps=1)
TRAINING = Training(MODEL, SYNTHETIC, sequence_length=32, seed=0)
PRELOAD = Training.preload([LAYOUT, replace(LAYOUT, engine="deepspeed")])
REQUEST = TrialRequest("trial", LAYOUT, TRAINING, SHORT, deadline_s=120)

Begin = Callable[..., Any]
trial_numbers = itertools.count()


@pytest.fixture(scope="module")
def telemetry(ray_session: Any) -> Iterator[Fleet]:
    actors = start_telemetry()
    yield actors
    stop_telemetry(actors)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the gang's data lie, and have to."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def gang(telemetry: Fleet, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    storage, data, places = tmp_path_factory.mktemp("train"), str(place / "corpus"), (str(place),)
    gang = Gang("gang-under-test", 2, CLUSTER, storage, telemetry, PRELOAD, data=data, places=places)
    yield gang
    close_gangs([gang])


@pytest.fixture
def begin(gang: Gang) -> Begin:
    """Send the gang a trial; the answer is a reference to its outcomes, members and seconds."""

    def send(layout: Layout = LAYOUT, **changes: Any) -> Any:
        name = f"trial-{next(trial_numbers)}"
        return gang.mailbox.evaluate.remote(replace(REQUEST, trial_id=name, layout=layout, **changes))

    return send


def outcomes_of(reference: Any, timeout_s: float = 240) -> list[Outcome]:
    outcomes, members, seconds = ray.get(reference, timeout=timeout_s)
    assert [member.rank for member in members] == [0, 1]
    assert seconds > 0
    return outcomes


def statuses(reference: Any) -> list[tuple[str, str | None]]:
    return [(outcome.status, outcome.cause) for outcome in outcomes_of(reference)]


def workers() -> list[psutil.Process]:
    """The gang's two worker processes: those under this session's Ray that keep a fork server for trials.

    Those of gangs that were closed may take a while to end.
    """
    give_up = time.monotonic() + 60
    while len(found := [one for one in psutil.Process().children(recursive=True) if is_worker(one)]) != 2:
        assert time.monotonic() < give_up, found
        time.sleep(0.1)
    return found


def is_worker(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("ray::") and bool(fork_servers(process))
    except psutil.NoSuchProcess:
        return False


def fork_servers(worker: psutil.Process) -> list[psutil.Process]:
    return [child for child in worker.children() if "trainables.child" in " ".join(child.cmdline())]


def trial_processes(worker: psutil.Process) -> list[psutil.Process]:
    """What the fork server of a worker has started: the process of a trial under way, those before may still end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return fork_servers(worker)[0].children()
    return []


def trial_process(worker: psutil.Process, before: Collection[psutil.Process]) -> psutil.Process:
    """The process in which a worker's rank trains, once it really does, of a trial that began after those `before`."""
    give_up = time.monotonic() + 100
    while time.monotonic() < give_up:
        for process in trial_processes(worker):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process not in before and process.cpu_times().user > 1.5:
                    return process
        time.sleep(0.05)
    raise AssertionError("no trial is under way")


def test_one_gang_trains_trial_after_trial_on_both_engines(begin: Begin) -> None:
    assert statuses(begin()) == [("ok", None)] * 2
    before = {worker.pid for worker in workers()}
    for layout in (replace(LAYOUT, engine="deepspeed", zero_stage=3), replace(LAYOUT, pipeline_parallel_size=2)):
        outcomes = outcomes_of(begin(layout))
        assert [(outcome.status, outcome.cause) for outcome in outcomes] == [("ok", None)] * 2, layout.label
        first, second = (outcome.report for outcome in outcomes)
        assert first is not None
        assert second is not None
        assert (first.rank, second.rank) == (0, 1)
        assert first.losses == second.losses
        assert [timing.window_steps_s for timing in first.timings.values()] == [
            timing.window_steps_s for timing in second.timings.values()
        ]
    assert {worker.pid for worker in workers()} == before


SPEC = make_problem(
    {
        "name": "tiny",
        "model": asdict(MODEL),
        "data": SYNTHETIC,
        "sequence_length": 32,
        "global_batch_size": 96,
        "cluster": asdict(CLUSTER),
        "space": {"precision": "fp32"},
        "measurement": {"window_s": 0.4, "warmup_max_s": 0.2, "steady_steps": 2, "warmup_tolerance": 0.9},
    }
)


@pytest.mark.parametrize("axes", [{"engine": "megatron", "pipeline_parallel_size": 2}, {"engine": "deepspeed"}])
def test_a_short_trial_times_two_batches_in_one_go(axes: dict[str, Any], gang: Gang, telemetry: Any) -> None:
    layout = Layout(num_gpus=2, global_batch_size=96, zero_stage=1, precision="fp32", **axes)
    bench, times = Bench(SPEC, gang.mailbox, telemetry, {}), list[float]()
    for attempt in range(
        5
    ):  # where other processes take the cores, a larger step may take no longer than a smaller one
        result = run_trial(bench, f"short-{layout.engine}-{attempt}", layout)
        few, many = (proxy.result for proxy in result.proxies)
        times = [run.metrics.get("step_time_s") or 0.0 for run in (few, many, result)]
        if times == sorted(times):
            break
    assert times[0] < times[1] < times[2]
    assert (result.status, result.cause) == ("ok", None)
    assert result.methods["tokens_per_s"] == "short"
    rounds = [run.layout.gradient_accumulation_steps for run in (few, many, result)]
    assert rounds == [4, 12, 96] if layout.pipeline_parallel_size == 2 else [2, 6, 48]
    assert few.windows[0].start_ns > many.windows[0].end_ns
    assert result.metrics["breakdown_span_s"]
    if layout.pipeline_parallel_size == 2:
        assert 0 < (result.metrics["bubble_ratio"] or 0) < 1
        assert result.metrics["stage_imbalance"] is not None
    else:
        assert "bubble_ratio" not in result.metrics


@pytest.mark.parametrize(("batch", "short_trials"), [(640, True), pytest.param(96, False, marks=pytest.mark.slow)])
def test_a_layout_of_more_gpus_than_there_are_runs_by_slices(
    batch: int, short_trials: bool, gang: Gang, telemetry: Any
) -> None:
    """Of 20 microbatches seven are run, or all three."""
    problem = replace(
        SPEC,
        global_batch_size=batch,
        cluster=replace(CLUSTER, nodes=8, gpus_per_node=8),
        measurement=replace(SPEC.measurement, explore="slices", short_trials=short_trials),
    )
    network = data_sheet("cpu")
    assert network is not None
    bench = Bench(problem, gang.mailbox, telemetry, {"python": "3"}, network.network(8))
    layout = Layout("megatron", 64, batch, pipeline_parallel_size=2, zero_stage=1, precision="fp32")
    result = run_trial(bench, f"sliced {batch}", layout)
    assert (result.status, result.cause) == ("ok", None)
    assert result.methods["tokens_per_s"] == "slice"
    assert [(one.kind.rank, one.kind.stands_for) for one in result.slices] == [(0, (0,)), (32, (1,))]
    assert [record.rank for record in result.ranks] == [0, 32]
    step_s = result.metrics["step_time_s"] or 0.0
    for one in result.slices:
        assert len(one.times.passes) == 2 * layout.gradient_accumulation_steps
        assert min(one.times.passes.values()) > 0
        assert (one.times.waited_s > 0) != short_trials, "for the other stage"
        assert one.times.busy_s < step_s
        assert one.times.exposed_s["all_reduce"] > 0
    assert result.metrics["tokens_per_s"] == pytest.approx(batch * SPEC.sequence_length / step_s)
    assert 0 < (result.metrics["bubble_ratio"] or 0) < 1
    assert result.metrics["breakdown_span_s"] == pytest.approx(step_s)
    assert (result.metrics["breakdown_matmul_s"] or 0) > 0
    assert result.methods["breakdown_span_s"] == "slice"
    assert len(result.windows) == 2
    assert TrialResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result

    failed = run_trial(bench, f"refused {batch}", replace(layout, tensor_parallel_size=3))
    assert (failed.status, failed.trial_id) == ("crash", f"refused {batch}")


class Counting(Bench):
    """Has ranks reserve a GiB more than the one before, as on a GPU, where somebody counts it."""

    def alone(self, request: TrialRequest) -> Alone | TrialResult:
        one = super().alone(request)
        assert isinstance(one, Alone)
        return replace(one, report=replace(one.report, peak_memory_gib=2.0 + one.report.rank))


def test_of_ranks_that_differ_in_memory_alone_the_fullest_counts(gang: Gang, telemetry: Any) -> None:
    """Of DeepSpeed's ZeRO-2 one is measured, and the other takes a few steps."""
    problem = replace(SPEC, measurement=replace(SPEC.measurement, explore="slices", breakdown=False))
    network = data_sheet("cpu")
    assert network is not None
    bench = Counting(problem, gang.mailbox, telemetry, {"python": "3"}, network.network(2))
    layout = Layout("deepspeed", 2, 64, zero_stage=2, precision="fp32")
    result = run_trial(bench, "fullest", layout)
    assert (result.status, result.cause) == ("ok", None)
    assert [one.kind.rank for one in result.slices] == [0]
    assert [record.rank for record in result.ranks] == [0, 1]
    assert result.metrics["peak_memory_gib"] == result.slices[0].times.memory_gib == 3.0


@pytest.mark.slow
def test_a_trial_that_cannot_become_the_best_is_ended_and_the_gang_goes_on(gang: Gang, telemetry: Any) -> None:
    unbeatable = [{"tokens_per_s": 1e12, "joules_per_token": 1e-12}]
    # Steps enough to bound what is to come, however long it takes until they agree.
    long = replace(SPEC.measurement, window_s=6, steady_steps=4, warmup_max_s=10, short_trials=False)
    spec = replace(SPEC, measurement=long)
    for attempt in range(4):  # where other processes take the cores, steps may differ too much to bound what is to come
        result = run_trial(Bench(spec, gang.mailbox, telemetry, {}), f"hopeless-{attempt}", LONGER, front=unbeatable)
        if result.status == "pruned":
            break
    assert result.status == "pruned"
    assert result.cause is not None
    assert result.cause.startswith("dominated: tokens_per_s ")
    assert 0 < (result.metrics["bound_tokens_per_s"] or 0) < 1e12
    assert run_trial(Bench(SPEC, gang.mailbox, telemetry, {}), "next", LONGER).status == "ok"


def test_the_nodes_telemetry_is_told_what_its_devices_do(begin: Begin, gang: Gang, telemetry: Fleet) -> None:
    watching: Any = telemetry[ray.get_runtime_context().get_node_id()]
    trial = begin(procedure=ENDLESS)
    give_up = time.monotonic() + 60
    name, works = f"trial-{next(trial_numbers) - 1}", dict[str, Work]()
    while not (name in works and works[name].tokens_per_s) and time.monotonic() < give_up:
        works = {work.trial_id: work for work in ray.get(watching.state.remote()).works}
    work = works[name]
    assert (work.device, work.layout, work.phase) == (cpu_uuid(), LAYOUT.label, "warmup")
    ray.get(gang.mailbox.give_up.remote("seen"))
    assert statuses(trial) == [("crash", "seen")]


def test_a_trial_that_ends_before_its_ranks_have_begun_had_its_device_all_the_same(
    gang: Gang, telemetry: Fleet, place: Path
) -> None:
    node, name = ray.get_runtime_context().get_node_id(), f"trial-{next(trial_numbers)}"
    watching: Any = telemetry[node]
    (link := place / "corpus.bin").symlink_to("/etc/hostname")
    try:
        result = Bench(SPEC, gang.mailbox, telemetry, {}).run(replace(REQUEST, trial_id=name))
    finally:
        link.unlink()
    give_up, works = time.monotonic() + 4, dict[str, Work]()  # it is forgotten after five seconds
    while name not in works and time.monotonic() < give_up:
        works = {work.trial_id: work for work in ray.get(watching.state.remote()).works}
    assert (works[name].device, works[name].phase) == (cpu_uuid(), "start")
    assert (result.status, result.devices) == ("crash", (DeviceRecord(cpu_uuid(), node),))
    assert TrialResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


@pytest.mark.slow
def test_the_rank_order_says_which_worker_holds_which_stage(begin: Begin) -> None:
    stages = replace(LAYOUT, pipeline_parallel_size=2, stage_layers=(1, 1))
    losses = []
    for order, places in ((None, [0, 1]), ((1, 0), [1, 0])):
        reports = [outcome.report for outcome in outcomes_of(begin(replace(stages, rank_order=order)))]
        assert [report and (report.rank, report.coordinates["pp"]) for report in reports] == [(p, p) for p in places]
        losses += [report.losses[:10] for report in reports if report is not None]
    assert all(found == pytest.approx(losses[0], rel=1e-5) for found in losses)


@pytest.mark.slow
def test_a_trial_on_one_rank_leaves_the_other_idle(begin: Begin) -> None:
    assert statuses(begin(replace(LAYOUT, num_gpus=1))) == [("ok", None)]
    assert statuses(begin()) == [("ok", None)] * 2


def test_no_trial_reads_what_is_led_out_of_the_operators_places_on_its_node(begin: Begin, place: Path) -> None:
    (link := place / "corpus.bin").symlink_to("/etc/hostname")
    try:
        ((status, cause),) = statuses(begin())
    finally:
        link.unlink()
    told = f"data: {place}/corpus leads by a symbolic link outside of what WATTUNE_POLICY allows: synthetic, {place}"
    assert (status, (cause or "").partition(": ")[2]) == ("crash", told)
    assert statuses(begin()) == [("ok", None)] * 2


def test_a_rank_that_runs_out_of_memory_alone_ends_the_trial_with_its_cause(begin: Begin) -> None:
    # Only the first of two pipeline stages holds the table of positions; the second waits for what it never gets.
    too_large = replace(MODEL, family="gpt", kv_heads=4, max_sequence_length=2**40)
    pipeline = replace(LAYOUT, pipeline_parallel_size=2)
    assert statuses(begin()) == [("ok", None)] * 2
    ((status, cause),) = statuses(begin(pipeline, program=replace(TRAINING, model=too_large)))
    assert status == "oom", "and the other rank is not left to the deadline"
    assert cause is not None
    assert cause.startswith("rank 0: build: RuntimeError: ")
    assert "can't allocate memory" in cause
    assert statuses(begin()) == [("ok", None)] * 2


def test_a_program_of_a_user_s_is_measured_by_its_log_and_ends_with_its_trial(gang: Gang, telemetry: Any) -> None:
    bench, program = (
        Bench(SPEC, gang.mailbox, telemetry, {}),
        Path(__file__).parents[2] / "trainables/foreign_program.py",
    )
    steps = LogPatterns(r"step: (?P<step>\d+) ")
    command = Command(("python", str(program), "--tell", "log"), (), (), None, tokens_per_step=256, steps=steps)

    def run(*arguments: str) -> TrialResult:
        faulty = replace(command, arguments=(*command.arguments, *arguments))
        return bench.run(replace(REQUEST, trial_id=f"program-{next(trial_numbers)}", program=faulty))

    result = run()
    assert (result.status, result.cause) == ("ok", None)
    assert result.metrics["tokens_per_s"] == pytest.approx(8 * 32 / np.mean(result.step_times_s))
    assert (result.metrics["joules_per_token"] or 0) > 0
    assert (result.losses, result.metrics["final_loss"]) == ((), None)  # of which the pattern says nothing
    failed = run("--fault", "device memory")
    assert failed.status == "oom"
    assert re.fullmatch(
        r"rank 1: \w+: OutOfMemory: exit code 1: RuntimeError: CUDA out of memory\..*", failed.cause or ""
    )
    assert "foreign_program.py" in str(failed.traceback)
    assert run().status == "ok"
    wait_until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if str(program) in (p.info["cmdline"] or ())])


@pytest.mark.slow
def test_a_program_of_a_user_s_on_more_gpus_than_there_are_runs_by_slices(gang: Gang, telemetry: Any) -> None:
    problem = load_spec(Path(__file__).parents[3] / "examples/plain_pytorch.yaml")
    problem = replace(
        problem,
        cluster=replace(problem.cluster, gpus_per_node=4),
        measurement=replace(problem.measurement, explore="slices", breakdown=True, window_s=0.5, warmup_tolerance=0.5),
    )
    network = data_sheet("cpu")
    assert network is not None
    layout = Layout("plain-pytorch", 4, 8, micro_batch_size=2, precision="fp32", own=(("threads", 1),))
    bench = Bench(problem, gang.mailbox, telemetry, {"python": "3"}, network.network(4))
    result = run_trial(bench, f"sliced program {next(trial_numbers)}", layout)
    assert (result.status, result.cause) == ("ok", None)
    assert result.methods["tokens_per_s"] == "slice"
    assert [one.kind.stands_for for one in result.slices] == [(0,)]
    step_s = result.metrics["step_time_s"]
    assert step_s == pytest.approx(np.mean(result.step_times_s))
    assert result.metrics["tokens_per_s"] == pytest.approx(8 * problem.sequence_length / np.mean(result.step_times_s))
    assert (result.metrics["breakdown_all_reduce_s"] or 0) > 0
    assert (result.metrics["energy_per_step_j"] or 0) > 0
    assert result.metrics["bubble_ratio"] == pytest.approx(0, abs=1e-9)
    assert TrialResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_a_killed_trial_process_is_a_crash_and_the_gang_goes_on(begin: Begin) -> None:
    assert statuses(begin()) == [("ok", None)] * 2
    before = workers()
    earlier = trial_processes(before[1])
    trial = begin(procedure=ENDLESS)
    trial_process(before[1], earlier).kill()
    ((status, cause),) = statuses(trial)
    assert status == "crash", "and the other rank is not left to the deadline"
    # The other rank may see its connection break before the worker of the killed one says what became of it.
    assert cause is not None
    assert re.match(
        r"rank [01]: (the process was killed by SIGKILL in phase warmup$|warmup: RuntimeError: .*gloo)", cause
    )
    assert statuses(begin()) == [("ok", None)] * 2
    assert [worker.pid for worker in workers()] == [worker.pid for worker in before]


def test_a_trial_past_its_deadline_is_a_hang_and_the_gang_goes_on(begin: Begin) -> None:
    ((status, cause),) = statuses(begin(procedure=ENDLESS, deadline_s=2))
    assert status == "hang"
    assert cause is not None
    assert re.search(r": no result after 2 s, in phase \w+$", cause)
    assert statuses(begin()) == [("ok", None)] * 2


@pytest.mark.slow
def test_a_killed_worker_process_is_a_crash_and_the_gang_starts_anew(begin: Begin) -> None:
    assert statuses(begin()) == [("ok", None)] * 2
    before = workers()
    earlier = [process for worker in before for process in trial_processes(worker)]
    trial = begin(procedure=ENDLESS)
    orphans = [trial_process(worker, earlier) for worker in before]
    before[1].kill()
    assert statuses(trial) == [("crash", "a worker process of the gang died; it was started anew")]
    assert statuses(begin()) == [("ok", None)] * 2
    assert not any(process.is_running() for process in (before[1], *orphans))
    assert before[0].is_running()


@pytest.mark.slow
def test_a_stopped_trial_process_is_a_hang_and_the_gang_goes_on(begin: Begin) -> None:
    assert statuses(begin()) == [("ok", None)] * 2
    before = workers()
    earlier = trial_processes(before[1])
    trial = begin(procedure=ENDLESS, deadline_s=30)
    stopped = trial_process(before[1], earlier)
    stopped.suspend()
    ((status, cause),) = statuses(trial)
    assert (status, bool(cause and "no result after 30 s" in cause)) == ("hang", True)
    wait_until(lambda: not stopped.is_running())
    assert statuses(begin()) == [("ok", None)] * 2
    assert workers() == before


@pytest.mark.slow
@pytest.mark.parametrize("when", ["during a trial", "between trials"])
@pytest.mark.parametrize(("deadline_s", "cause"), [(30, "did not answer"), (600, "said nothing for 60 s")])
def test_a_stopped_worker_is_killed_and_another_takes_its_place(
    deadline_s: float, cause: str, when: str, gang: Gang, telemetry: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.trials.bench.GRACE_S", 5.0)
    pool = lending(gang.address)
    free(pool, 2)
    before = workers()
    lease = lent(pool, "a", 2)
    assert lease is not None
    spec = replace(SPEC, measurement=replace(SPEC.measurement, deadline_s=deadline_s, window_s=1e9, short_trials=False))
    stopping = threading.Thread(
        target=lambda: (trial_process(before[0], trial_processes(before[0])), before[0].suspend())
    )
    if when == "during a trial":
        stopping.start()
    else:
        before[0].suspend()
    trial_id = f"silent {when} {deadline_s}"
    result = run_trial(Bench(spec, gang.mailbox, telemetry, {}, workers=lease.workers), trial_id, LONGER)
    assert (result.status, result.infrastructure) == ("hang", True), result.cause
    assert result.cause is not None
    assert cause in result.cause
    wait_until(lambda: not before[0].is_running() or before[0].status() == psutil.STATUS_ZOMBIE)
    ray.get(pool.release.remote("a"))
    free(pool, 2)
    assert before[1].is_running(), "of which nothing was wrong"
    assert run_trial(Bench(SPEC, gang.mailbox, telemetry, {}), f"after {when}", LONGER).status == "ok"


@pytest.mark.slow
def test_trials_run_side_by_side_and_a_killed_worker_ends_its_own_alone(gang: Gang, telemetry: Fleet) -> None:
    single, before = replace(LAYOUT, num_gpus=1), workers()
    earlier = [process for worker in before for process in trial_processes(worker)]

    def begin_on(lent: Sequence[int], request: TrialRequest) -> Any:
        return gang.mailbox.evaluate.remote(request, lent)

    trials = [
        begin_on([rank], replace(REQUEST, trial_id=f"single-{rank}", layout=single, procedure=ENDLESS))
        for rank in range(2)
    ]
    processes = [trial_process(worker, earlier) for worker in before]
    before[0].kill()
    (ended,), (going,) = ray.wait(trials, timeout=120)
    outcomes, members, _ = ray.get(ended)
    assert [(outcome.status, outcome.cause) for outcome in outcomes] == [
        ("crash", "a worker process of the gang died; it was started anew")
    ]
    assert processes[1].is_running(), "of the other trial"
    ((again,), _, _) = ray.get(begin_on([members[0].rank], replace(REQUEST, trial_id="again", layout=single)))
    assert (again.status, processes[1].is_running()) == ("ok", True), "beside the other, which goes on"
    ray.get(gang.mailbox.give_up.remote("seen", [1 - members[0].rank]))
    assert ray.get(going)[0][0].cause == "seen"


def mailboxes(*sizes: int, node: str = "node") -> tuple[list[Any], list[str]]:
    """The mailboxes of gangs of these sizes, and their addresses; all workers are on one node."""
    actor: Any = ray.remote(Mailbox)
    addresses = [uuid4().hex for _ in sizes]
    started = [
        actor.options(name=address, num_cpus=0, max_concurrency=100).remote(size)
        for address, size in zip(addresses, sizes, strict=True)
    ]
    for mailbox, size in zip(started, sizes, strict=True):
        ray.get([mailbox.join.remote(Member(rank, node, "host", 1, cpu_uuid())) for rank in range(size)])
    return started, addresses


def lending(*addresses: str) -> Any:
    """A pool of these gangs."""
    pool: Any = start_pool()
    ray.get(pool.serve.remote(addresses))
    return pool


def lent(pool: Any, trial_id: str, size: int, alone: bool = False) -> Lease | None:
    """What a trial gets, None if it gets nothing at present."""
    return (
        ray.get(pool.lease.remote(trial_id)) if ray.get(pool.lend.remote(trial_id, [Wish(size, alone)])) == 0 else None
    )


def free(pool: Any, workers: int | None) -> None:
    """Wait until so many workers are free."""
    give_up = time.monotonic() + 120
    while ray.get(pool.free.remote()) != workers:
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_a_pool_lends_each_worker_to_one_trial_at_a_time(ray_session: Any) -> None:
    (mailbox,), addresses = mailboxes(4)
    pool = lending(*addresses)
    free(pool, 4)
    assert lent(pool, "a", 2) == Lease(mailbox, (0, 1))
    assert ray.get(pool.lend.remote("b", [Wish(4, False), Wish(1, False)])) == 1
    assert ray.get(pool.lease.remote("b")) == Lease(mailbox, (2,))
    assert lent(pool, "c", 2) is None
    free(pool, 1)
    assert [ray.get(pool.release.remote("a")) for _ in range(2)] == [True, False], "b was beside it"
    free(pool, 3)
    assert lent(pool, "c", 2) == Lease(mailbox, (0, 1))
    assert ray.get(pool.lease.remote("a")) is None


def test_a_trial_that_is_alone_has_its_node_for_itself(ray_session: Any) -> None:
    """Of two gangs on one node."""
    _, addresses = mailboxes(2, 2)
    pool = lending(*addresses)
    free(pool, 2)
    assert lent(pool, "a", 1) is not None
    assert lent(pool, "b", 1, alone=True) is None
    assert ray.get(pool.release.remote("a")) is False

    def one_works_and_the_other_idles() -> bool:
        lease = lent(pool, "b", 1, alone=True)
        if lease is not None and lease.workers == (0, 1):
            return True
        ray.get(pool.release.remote("b"))  # what "a" had is not free again yet
        return False

    wait_until(one_works_and_the_other_idles)
    assert ray.get(pool.free.remote()) == 0
    assert lent(pool, "c", 1) is None
    assert ray.get(pool.release.remote("b")) is False


def test_a_gang_that_is_to_be_given_back_is_lent_no_more_and_done_with_after_its_trials(ray_session: Any) -> None:
    (first, second), (going, staying) = mailboxes(2, 1)
    pool = lending(going, staying)
    free(pool, 2)
    assert lent(pool, "a", 2) == Lease(first, (0, 1))
    free(pool, 1)
    assert ray.get(pool.serve.remote([staying])) == {going: ["node"] * 2, staying: ["node"]}, "a trial is under way"
    assert ray.get(pool.release.remote("a")) is False
    free(pool, 1)
    assert lent(pool, "b", 2) is None
    assert lent(pool, "b", 1) == Lease(second, (0,))
    assert ray.get(pool.serve.remote([staying])) == {staying: ["node"]}
    assert ray.get(pool.serve.remote([])) == {staying: ["node"]}
    ray.get(pool.release.remote("b"))
    assert ray.get(pool.serve.remote([])) == {}
    free(pool, None)


def test_trials_on_a_node_where_others_have_gangs_are_disturbed(ray_session: Any) -> None:
    _, addresses = mailboxes(1, 1, 1)
    pool = lending(*addresses)
    for trial_id in ("before", "during"):
        free(pool, 1)
        assert lent(pool, trial_id, 1, alone=True) is not None
        ray.get(pool.serve.remote(addresses, frozenset({"node"})))
        assert ray.get(pool.release.remote(trial_id)) is True
    ray.get(pool.serve.remote(addresses, frozenset({"elsewhere"})))
    free(pool, 1)
    assert lent(pool, "after", 1) is not None
    assert ray.get(pool.release.remote("after")) is False


def test_a_pool_lends_no_gang_whose_workers_are_not_up(ray_session: Any) -> None:
    actor: Any = ray.remote(Mailbox)
    starting = actor.options(name="starting", num_cpus=0, max_concurrency=100).remote(2)
    ray.get(starting.join.remote(Member(0, "node", "host", 1, cpu_uuid())))
    pool = lending("starting")
    assert ray.get(pool.free.remote(), timeout=30) is None
    assert lent(pool, "a", 1) is None
    ray.get(starting.join.remote(Member(1, "node", "host", 1, cpu_uuid())))
    free(pool, 2)
    assert lent(pool, "a", 2) == Lease(starting, (0, 1))
    assert ray.get(pool.free.remote()) == 0, "which is not to say that none is up"


def test_a_pool_that_died_is_back_and_has_given_up_what_was_under_way(ray_session: Any) -> None:
    (mailbox,), addresses = mailboxes(2)
    pool = lending(*addresses)
    free(pool, 2)
    assert lent(pool, "a", 1) is not None
    trial = mailbox.evaluate.remote(replace(REQUEST, layout=replace(LAYOUT, num_gpus=1)), (0,))
    ray.get(mailbox.next.remote(0, 0))
    killed(pool)
    assert ray.get(pool.free.remote(), timeout=120) is None, "it knows of none, until it is told again"
    ray.get(pool.serve.remote(addresses))
    ((outcome,), _, _) = ray.get(trial, timeout=120)
    assert outcome.infrastructure
    assert ray.get(pool.lease.remote("a")) is None
    free(pool, 2)
    assert lent(pool, "b", 2) == Lease(mailbox, (0, 1))


def killed(actor: Any) -> None:
    """Kill an actor's process, as a machine short of memory does."""
    os.kill(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_mailbox_ends_the_trial_under_way_and_the_gang_serves_the_next(gang: Gang, telemetry: Fleet) -> None:
    pool = lending(gang.address)
    free(pool, 2)
    lease = lent(pool, "a", 2)
    assert lease is not None
    mailbox: Any = lease.mailbox
    trial = mailbox.evaluate.remote(replace(REQUEST, trial_id="a", procedure=ENDLESS))
    trial_process(workers()[0], ())
    killed(mailbox)
    with pytest.raises(RayActorError):
        ray.get(trial, timeout=60)
    ray.get(pool.release.remote("a"), timeout=60)
    free(pool, 2)
    assert lent(pool, "b", 2) == lease
    assert run_trial(Bench(SPEC, mailbox, telemetry, {}), "b", LONGER).status == "ok"


@pytest.mark.slow
def test_a_mailbox_killed_between_trials_is_lent_again(gang: Gang, telemetry: Fleet) -> None:
    pool = lending(gang.address)
    free(pool, 2)
    lease = lent(pool, "c", 2)
    assert lease is not None
    mailbox: Any = lease.mailbox
    ray.get(pool.release.remote("c"))
    free(pool, 2)
    killed(mailbox)  # once its gang has been offered
    assert lent(pool, "d", 2) == lease
    ray.get(mailbox.ready.options(max_task_retries=-1).remote(), timeout=120)
    assert run_trial(Bench(SPEC, mailbox, telemetry, {}), "d", LONGER).status == "ok"


@pytest.mark.slow
def test_a_run_that_ends_at_once_is_not_started_again_in_a_rush(
    ray_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[float] = []

    class Failing:
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            starts.append(time.monotonic())

        def fit(self) -> None:
            raise RuntimeError("no workers today")

    monkeypatch.setattr("service.trials.gang.DataParallelTrainer", Failing)
    gang = Gang("failing", 1, CLUSTER, tmp_path, Fleet("nobody"), [])
    killed(gang.mailbox)
    until = time.monotonic() + 120
    while len(starts) < 3 and time.monotonic() < until:
        time.sleep(0.2)
    close_gangs([gang])
    assert len(starts) >= 3
    assert all(later - earlier > 0.9 for earlier, later in pairwise(starts))


@pytest.fixture
def join(ray_session: Any) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Has one more node, of 4 CPUs, join the tests' Ray; kill the process, and it is lost."""
    nodes: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=4"]
        command += [f"--address={ray_session.address_info['gcs_address']}", "--disable-usage-stats"]
        command += ["--min-worker-port=0", "--max-worker-port=0"]
        nodes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.poll() is None:  # asked to, it leaves the cluster at once, where a lost one is missed later
            (raylet,) = (child for child in psutil.Process(node.pid).children() if child.name() == "raylet")
            raylet.terminate()
            psutil.wait_procs([raylet], timeout=10)
        lose(node)
    give_up = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) > 1:  # or whoever comes next may count on them
        assert time.monotonic() < give_up
        time.sleep(0.2)


def lose(node: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a node."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(node.pid)
        for process in (tree, *tree.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    node.wait()


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [False, True])
def test_a_gang_on_a_node_that_joined_later_is_measured_there(
    replaced: bool, telemetry: Fleet, join: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    before = set(telemetry)
    # The workers of the gang of this module may hold 1 of the 4 CPUs that there are.
    gang = Gang("wide", 2, replace(CLUSTER, cpus_per_worker=3), tmp_path, telemetry, Training.preload([LAYOUT]))
    pool = lending(gang.address)
    node = join()
    layout = replace(LAYOUT, global_batch_size=96)
    try:
        free(pool, 2)
        lease = lent(pool, "a", 2)
        assert lease is not None
        mailbox: Any = lease.mailbox
        if replaced:
            trial = mailbox.evaluate.remote(replace(REQUEST, trial_id="b", procedure=ENDLESS))
            time.sleep(5)
            (lost,) = set(telemetry) - before
            lose(node)
            join()
            ((outcome,), _, _) = ray.get(trial, timeout=120)
            assert outcome.infrastructure
            ray.get(pool.release.remote("a"))
            free(pool, 2)
            with pytest.raises((RayActorError, ActorUnschedulableError)):  # not a wait for ever
                ray.get(telemetry[lost].describe.remote(), timeout=60)
            before.add(lost)
        result = run_trial(Bench(SPEC, mailbox, telemetry, {}), "measured", layout)
        assert (result.status, result.cause) == ("ok", None)
        assert (result.metrics["joules_per_token"] or 0) > 0
        nodes = {window.node_id for proxy in result.proxies for window in proxy.result.windows}
        assert len(nodes) == 2
        (joined,) = nodes - before
        assert (telemetry.name, joined) in find_telemetry()
        for window in result.windows:
            samples: Any = telemetry[window.node_id].samples.remote(window.start_ns, window.end_ns, window.devices)
            assert ray.get(samples).num_rows > 0
    finally:
        close_gangs([gang])


def test_what_a_gang_waits_for_is_told_and_waiting_is_called_off_at_once(ray_session: Any, tmp_path: Path) -> None:
    all_cpus = replace(CLUSTER, cpus_per_worker=2)
    actor: Any = ray.remote(Mailbox)
    holding = actor.options(num_cpus=1).remote(1)  # of the 4 that there are
    ray.get(holding.give_up.remote("nothing"))
    give_up = time.monotonic() + 30
    while (told := awaited(all_cpus, 2)) is None:
        assert time.monotonic() < give_up
        time.sleep(0.1)
    assert re.fullmatch(r"4 CPUs: [0-3](\.5)? of 4 free", told)
    assert awaited(replace(CLUSTER, accelerator="h200"), 2) is None, "what nobody has is not awaited"
    gang = Gang("waiting", 2, all_cpus, tmp_path, Fleet("nobody"), ())
    time.sleep(1)
    close_gangs([gang])
    assert not gang._thread.is_alive()
    assert not list(tmp_path.iterdir()), "nothing was started"
    ray.kill(holding)
