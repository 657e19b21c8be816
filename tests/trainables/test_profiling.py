from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.nn.functional import scaled_dot_product_attention
from torch.optim.optimizer import register_optimizer_step_pre_hook

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.network import Network
from tests.trainables.conftest import RunRanks
from tests.trainables.faults import no_memory
from trainables import profiling
from trainables.breakdown import Profile
from trainables.child import Nursery
from trainables.data import SYNTHETIC
from trainables.measure import Procedure
from trainables.platforms.base import Platform
from trainables.platforms.cpu import PLATFORM as CPU
from trainables.platforms.cuda import PLATFORM as CUDA
from trainables.profiling import Event, profile_steps
from trainables.program import Place, Progress, RankReport, TrialRequest
from trainables.slice import Slice
from trainables.training import Training

MODEL = ModelShape("llama", 2, 64, 4, 2, 176, 512, 64)
LAYOUT = Layout("megatron", 2, 8, micro_batch_size=2, precision="fp32")
PROCEDURE = Procedure(2, 0.5, 0.2, 0.2, 7, breakdown=True)
TRAINING = Training(MODEL, SYNTHETIC, sequence_length=32, seed=0)
REQUEST = TrialRequest("profiled", LAYOUT, TRAINING, PROCEDURE, deadline_s=120)


def alone(step: Callable[[], object], platform: Platform = CPU) -> Profile:
    """Profile a step of a trial on one rank."""
    layout = replace(LAYOUT, num_gpus=1)
    return profile_steps(step, layout, platform, meet=lambda number: None, slowest=lambda seconds: seconds, most=5)


def train(device: str) -> None:
    a = torch.ones(512, 512, device=device)
    q = torch.ones(1, 4, 256, 64, device=device, dtype=torch.bfloat16)
    for _ in range(5):
        a = (a @ a).relu()
        q = scaled_dot_product_attention(q, q, q, is_causal=True)
    a.to("cpu")


def check(report: RankReport) -> None:
    """What holds of every breakdown."""
    assert report.profile is not None
    assert report.profile.problem is None
    found = report.profile.breakdown
    assert found is not None
    assert found.matmul_s > 0
    assert found.attention_s > 0
    assert found.other_s > 0
    parts = found.compute_s + found.exposed_communication_s + found.memory_copy_s + found.idle_s
    assert parts == pytest.approx(found.span_s, rel=0.2)  # CPU threads may copy while another computes
    assert found.communication_s == pytest.approx(
        found.overlapped_communication_s + found.exposed_communication_s, abs=1e-9
    )
    assert found.span_s < report.profile.time_s < 20
    # The step that was profiled is none of the trial's.
    (timing,) = report.timings.values()
    assert len(report.losses) == len(timing.warmup_steps_s) + len(timing.window_steps_s)


@pytest.mark.parametrize(
    ("layout", "communication"),
    [
        (replace(LAYOUT, zero_stage=3), ["all_gather_s", "reduce_scatter_s"]),
        (replace(LAYOUT, pipeline_parallel_size=2), ["send_recv_s"]),
        (replace(LAYOUT, engine="deepspeed", zero_stage=0), ["all_reduce_s"]),
    ],
    ids=lambda value: value.label if isinstance(value, Layout) else "",
)
def test_each_rank_says_where_its_step_went(layout: Layout, communication: list[str], run_ranks: RunRanks) -> None:
    outcomes = run_ranks(replace(REQUEST, trial_id=f"profiled {layout.label}", layout=layout))
    spans = set()
    for rank, outcome in enumerate(outcomes):
        assert (outcome.status, outcome.cause) == ("ok", None)
        assert outcome.report is not None
        check(outcome.report)
        assert outcome.report.coordinates == layout.coordinates(rank)
        assert outcome.report.profile is not None
        times: Any = outcome.report.profile.breakdown
        assert all(getattr(times, name) > 0 for name in communication)
        spans.add(times.span_s)
    assert len(spans) == 1  # the slowest rank's


@pytest.mark.parametrize(
    ("layout", "communication"),
    [
        (replace(LAYOUT, zero_stage=3), ["all_gather", "reduce_scatter"]),
        (replace(LAYOUT, pipeline_parallel_size=2, num_gpus=4), ["all_reduce"]),
        (replace(LAYOUT, engine="deepspeed", zero_stage=0), ["all_reduce"]),
    ],
    ids=lambda value: value.label if isinstance(value, Layout) else "",
)
def test_a_rank_alone_sorts_what_stands_in_for_its_collectives(
    layout: Layout, communication: list[str], run_ranks: RunRanks
) -> None:
    """Every collective takes 50 ms, of which a step of some 20 ms hides less than all, on a busy machine too."""
    program = Slice(TRAINING, 0, Network("a test", 1, 1e12, 1e12, 1e-6, 5e-2))
    request = replace(REQUEST, layout=layout, program=program, procedure=replace(PROCEDURE, window_min_steps=3))
    (outcome,) = run_ranks(replace(request, trial_id=f"alone {layout.label}"))
    assert (outcome.status, outcome.cause) == ("ok", None)
    assert outcome.report is not None
    check(outcome.report)
    assert outcome.report.slice is not None
    assert outcome.report.profile is not None
    times: Any = outcome.report.profile.breakdown
    (traffic,) = outcome.report.slice.traffic.values()
    for name in communication:
        calls = sum(entry.calls for entry in traffic if entry.kind == name)
        assert getattr(times, f"exposed_{name}_s") > 0.0125 * calls > 0


def test_without_the_option_nothing_is_profiled(run_ranks: RunRanks) -> None:
    request = replace(REQUEST, trial_id="unprofiled", procedure=replace(PROCEDURE, breakdown=False))
    for outcome in run_ranks(request):
        assert outcome.report is not None
        assert outcome.report.profile is None


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
def test_a_profiler_that_fails_leaves_the_step_and_its_reason(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(torch.autograd.profiler.profile):
        def fail(self, *arguments: object) -> None:
            raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES\nsee the manual")

    setattr(Broken, method, Broken.fail)
    monkeypatch.setattr(profiling, "profile", Broken)
    done: list[str] = []
    try:
        found = profile_steps(
            lambda: done.append("step"), LAYOUT, CPU, lambda number: done.append("meet"), lambda seconds: 1.0, 5
        )
    finally:
        if method == "__exit__":
            torch.autograd._disable_profiler()
    assert done == ["meet", "step"]
    assert found.breakdown is None
    assert found.problem == "the profiler failed: RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"


@dataclass(frozen=True)
class Unprofilable(Training):
    """A training of which the last rank comes to nothing once the profiler begins, in the way that `fault` names."""

    fault: str = ""

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        fault = self.fault

        class Faulty(torch.autograd.profiler.profile):
            def __enter__(self) -> Any:
                if fault == "hang":
                    signal.pause()
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                register_optimizer_step_pre_hook(lambda *arguments: no_memory())
                return super().__enter__()

        if place.rank == request.layout.num_gpus - 1:
            profiling.profile = Faulty  # type: ignore[attr-defined]
        return super().run(request, place, on_progress)


def check_kept(report: RankReport | None, problem: str | None) -> None:
    """That a rank's figures are there, all but its breakdown."""
    assert report is not None
    (timing,) = report.timings.values()
    assert len(timing.window_steps_s) >= PROCEDURE.window_min_steps
    assert len(report.losses) == len(timing.warmup_steps_s) + len(timing.window_steps_s)
    assert report.environment
    assert report.profile is not None
    assert (report.profile.breakdown, report.profile.problem) == (None, problem)


@pytest.mark.parametrize(
    ("fault", "status", "problem"),
    [
        ("killed", "crash", "the process was killed by SIGKILL in phase breakdown"),
        ("memory", "oom", "breakdown: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."),
    ],
)
def test_figures_are_kept_when_a_rank_fails_in_the_breakdown(
    fault: str, status: str, problem: str, run_ranks: RunRanks
) -> None:
    program = Unprofilable(**vars(TRAINING), fault=fault)
    other, failed = run_ranks(replace(REQUEST, trial_id=f"unprofilable: {fault}", program=program))
    assert (failed.status, failed.phase, failed.cause) == (status, "breakdown", problem)
    check_kept(failed.report, problem)
    # The other one is stopped, unless it hears first that its peer is gone.
    assert other.status in ("aborted", "crash")
    check_kept(other.report, other.cause)


def test_figures_are_kept_when_the_profiler_hangs(nursery: Nursery, store: TCPStore) -> None:
    phase = ""

    def follow(progress: Progress) -> None:
        nonlocal phase
        phase = progress.phase

    request = replace(
        REQUEST,
        trial_id="unprofilable: hang",
        layout=replace(LAYOUT, num_gpus=1),
        program=Unprofilable(**vars(TRAINING), fault="hang"),
    )
    place = Place(0, 0, "127.0.0.1", store.port, CPU)
    with nursery.trial(request, place, lambda: 130.0 if phase == "breakdown" else 50.0, lambda: False, follow) as found:
        assert (found.status, found.cause) == ("hang", "no result after 120 s, in phase breakdown")
    check_kept(found.report, found.cause)
    assert found.report is not None
    assert found.report.profile is not None
    assert found.report.profile.time_s == 80.0


def test_a_step_that_fails_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        alone(lambda: 1 / 0)
    torch.autograd._disable_profiler()


def event(
    name: str, start: int, end: int, thread: int = 1, correlation: int = 0, linked: int = 0, on_host: bool = True
) -> Event:
    return Event(name, on_host, start, end - start, thread, correlation, linked, is_async=False, is_annotation=False)


def test_kernels_of_one_name_are_told_apart_by_the_call_that_launched_them() -> None:
    second = 1_000_000_000
    exchange = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    kernels = [(exchange, 2), (exchange, 4), (exchange, 0), ("ncclDevKernel_Generic_1(...)", 6)]
    events = [
        event("c10d::alltoall_base_", 10, 20, correlation=1),
        event("record_param_comms", 12, 18, correlation=2),
        event("c10d::send", 30, 40, correlation=3),
        event("record_param_comms", 32, 38, correlation=4),
        event("c10d::allreduce_", 10, 40, thread=2, correlation=5),
        event("record_param_comms", 12, 38, thread=2, correlation=6),
        *(
            event(name, i * second, (i + 1) * second, linked=linked, on_host=False)
            for i, (name, linked) in enumerate(kernels)
        ),
    ]
    found = profiling._of_kernels(events, None, 5.0)
    assert (found.all_to_all_s, found.send_recv_s, found.all_reduce_s) == (1.0, 2.0, 1.0)
    by_layout = profiling._of_kernels(events, "all_to_all", 5.0)
    assert (by_layout.all_to_all_s, by_layout.send_recv_s, by_layout.other_communication_s) == (3.0, 0.0, 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernels_of_a_gpu_are_seen() -> None:
    train("cuda")
    found = alone(lambda: train("cuda"), CUDA)
    assert found.problem is None
    times = found.breakdown
    assert times is not None
    assert min(times.matmul_s, times.attention_s, times.other_s, times.memory_copy_s) > 0
    assert times.communication_s == 0
    busy = times.compute_s + times.memory_copy_s
    assert busy <= times.span_s * 1.01
    assert times.idle_s == pytest.approx(times.span_s - busy, rel=0.05)


def test_short_steps_are_profiled_until_they_tell_enough() -> None:
    done: list[int] = []

    def told(seconds: float, most: int) -> Profile:
        done.clear()
        layout = replace(LAYOUT, num_gpus=1)
        found = profile_steps(lambda: train("cpu"), layout, CPU, done.append, lambda own: seconds, most)
        assert done == list(range(len(done))), "each has a number of its own to meet by"
        assert found.breakdown is not None
        assert found.breakdown.own_s == pytest.approx(sum(found.own_s) / len(found.own_s))
        assert found.breakdown.compute_alone_s == pytest.approx(sum(found.compute_alone_s) / len(found.own_s))
        return found

    assert [len(told(seconds, 5).own_s) for seconds in (1.0, 0.3, 0.01)] == [1, 2, 5]
    assert len(told(0.01, 1).own_s) == 1
