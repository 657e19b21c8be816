"""A layout on the edge of memory is tried by one rank, or at two smaller depths, first, and told as out of memory if it
does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import ray

from search_spaces.layout import Layout
from search_spaces.memory import band, estimate
from search_spaces.network import Network
from service.problem import Problem
from service.result import Proxy, Purpose, RankRecord, TrialResult
from service.spec import make_problem
from service.trials.bench import Bench
from service.trials.evaluate import make_request, run_trial
from service.trials.probe import depths, due, fullest, overflow, probing
from telemetry.windows.trial import WindowSummary
from trainables.child import Outcome
from trainables.mailbox import Mailbox, Member
from trainables.measure import Timing
from trainables.passes import PassTimes
from trainables.program import RankReport, SliceReport
from trainables.slice import Slice
from trainables.status import Status

CONFIG = Layout("megatron", 4, 64, micro_batch_size=2, zero_stage=1, compile=True, reduce_precision="bf16")
PIPELINE = replace(CONFIG, pipeline_parallel_size=2)


def make_spec(**changed: Any) -> Problem:
    return make_problem(
        {
            "name": "edge",
            "model": "llama3-8b",
            "data": "synthetic",
            "sequence_length": 8192,
            "global_batch_size": 64,
            "cluster": {"gpus_per_node": 4, "accelerator": "h200"},
            "space": {"zero_stage": [1, 3], "recompute": ["none", "full"]},
            "borderline": "probe",
        }
        | changed
    )


SPEC = make_spec()


@pytest.mark.parametrize(
    ("layout", "spec", "found"),
    [
        (CONFIG, SPEC, True),
        (CONFIG, make_spec(borderline="risk"), False),
        (replace(CONFIG, micro_batch_size=1, recompute="full"), SPEC, False),  # it fits
        (PIPELINE, SPEC, True),
        (CONFIG, make_spec(cluster={"gpus_per_node": 4, "accelerator": "gpu"}), False),  # whose memory nobody knows
        (CONFIG, make_spec(depth_proxy=[2, 4]), False),  # what runs fits
        (CONFIG, make_spec(depth_proxy=[15, 30]), True),
    ],
)
def test_what_may_not_fit_is_probed(layout: Layout, spec: Problem, found: bool) -> None:
    assert due(layout, spec) == found


@pytest.mark.parametrize(
    ("layout", "spec", "found"),
    [
        (CONFIG, SPEC, (4, 8)),
        (PIPELINE, SPEC, (8, 16)),
        (replace(PIPELINE, stage_layers=(15, 17)), SPEC, None),
        (CONFIG, make_spec(depth_proxy=[2, 8]), None),
    ],
)
def test_depths_to_probe_at_are_below_the_model_s_own(
    layout: Layout, spec: Problem, found: tuple[int, int] | None
) -> None:
    assert depths(layout, spec) == found


def test_only_what_is_on_the_edge_needs_a_probe() -> None:
    assert band(CONFIG, SPEC.workload) == band(PIPELINE, SPEC.workload) == "borderline"


def test_a_probe_takes_few_steps_of_the_smallest_batch_given() -> None:
    trial = probing(make_request("t", CONFIG, SPEC), ())
    assert (trial.batches, trial.procedure.window_min_steps, trial.procedure.breakdown) == ((), 1, False)
    assert probing(trial, (48, 16)).batches == (16,)


def test_the_fullest_rank_is_probed() -> None:
    assert fullest(PIPELINE, SPEC.workload).pipeline_rank == 0  # which keeps two passes, where the last has the head
    tail = replace(PIPELINE, stage_layers=(8, 24))
    assert (fullest(tail, SPEC.workload).pipeline_rank, fullest(tail, SPEC.workload).rank) == (1, 2)


def ran(layers: int, peaks_gib: Sequence[float | None], layout: Layout = CONFIG) -> Proxy:
    ranks = tuple(
        RankRecord(rank, rank, "a", f"GPU-{rank}", layout.coordinates(rank), gib, None)
        for rank, gib in enumerate(peaks_gib)
    )
    return Proxy(layers, TrialResult("t", layout, Status.OK, ranks=ranks))


def test_each_rank_s_memory_is_followed_to_the_full_depth() -> None:
    ranks = range(PIPELINE.pipeline_parallel_size)
    estimated = estimate(PIPELINE, SPEC.workload, ranks)
    usable_bytes = estimated.usable_bytes
    assert usable_bytes is not None
    usable_gib = usable_bytes / 2**30
    for most in range(4):  # two ranks of each stage
        slack_gib = estimated.ranks[PIPELINE.coordinates(most)["pp"]].slack / 2**30
        for spare_gib, fits in ((0.1, True), (-0.1, False)):
            whole = usable_gib + slack_gib - spare_gib  # with 32 layers; a quarter of it is the same at every depth
            share = 0.75 * whole / 32
            few, more = (whole / 4 + layers * share for layers in (4, 8))
            peaks = [[peak if rank == most else 10.0 for rank in range(4)] for peak in (few, more)]
            cause = overflow(PIPELINE, SPEC, ran(4, peaks[0], PIPELINE), ran(8, peaks[1], PIPELINE))
            assert (cause is None) == fits
            if cause is not None:
                assert cause.startswith(f"probe: rank {most} takes {few:.1f} GiB with 4 layers")
                assert cause.endswith(f"with 32 it needs {usable_gib + 0.1:.0f} GiB of {usable_gib:.0f}")
    assert overflow(PIPELINE, SPEC, ran(4, [None] * 4, PIPELINE), ran(8, [None] * 4, PIPELINE)) is None


class Quiet:
    """Telemetry of a node that saw nothing."""

    def window(self, start_ns: int, end_ns: int, devices: tuple[str, ...]) -> WindowSummary:
        return WindowSummary((), None)

    def describe(self) -> dict[str, Any]:
        return {"devices": [{"uuid": f"GPU-{rank}", "kind": "nvidia"} for rank in range(4)]}


def gang(constant_gib: float, layer_gib: float, reclaims: int = 0) -> tuple[Any, Any]:
    """A mailbox whose workers reserve so much in each trial, and a reference to what they were asked for: the layers,
    and the rank that ran alone, if one did. Torch has no more than the cluster's GPUs on them, and gives back memory so
    often in a window."""
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 100}
    mailbox: Any = ray.remote(Mailbox).options(**options).remote(4)
    timing = Timing((1.0, 1.0), (1.0, 1.0), 0, 2_000_000_000, 0.0)
    whole = PassTimes(0.0, {}, 1.0, 0.0, 0.0, microbatch_s=0.2)

    @ray.remote(num_cpus=0)
    def work(mailbox: Any) -> list[tuple[int, int | None]]:
        for rank in range(4):
            ray.get(mailbox.join.remote(Member(rank, "a", "host", 1, f"GPU-{rank}")))
        asked: list[tuple[int, int | None]] = []
        number = 0
        while (order := ray.get(mailbox.next.remote(0, number))) is not None:
            number, program = order.number, order.request.program
            alone = program if isinstance(program, Slice) else None
            layers = (alone.training if alone else program).model.layers
            asked.append((layers, alone.rank if alone else None))
            batches = order.request.batches or (64,)
            peak, waited = constant_gib + layers * layer_gib, (2_000_000_000, 2_500_000_000)
            report = RankReport(
                rank=0,
                coordinates=CONFIG.coordinates(0),
                device="GPU-0",
                timings=dict.fromkeys(batches, timing),
                losses=(2.0, 1.0),
                grad_norms=(1.0, 1.0),
                peak_memory_gib=peak,
                environment={},
                reclaims=reclaims,
                slice=SliceReport(dict.fromkeys(batches, whole), {}, waited) if alone else None,
            )
            for worker, rank in enumerate(order.request.ranks):
                own = replace(report, rank=rank, coordinates=CONFIG.coordinates(rank), device=f"GPU-{worker}")
                outcome = Outcome(Status.OK, report=own)
                if alone and peak * 2**30 > (alone.usable_bytes or 0):
                    outcome = Outcome(Status.OOM, "warmup: OutOfMemoryError: CUDA out of memory", "warmup")
                ray.get(mailbox.hand_in.remote(worker, number, outcome))
                ray.get(mailbox.leave.remote(worker, number, ()))
        return asked

    return mailbox, work.remote(mailbox)


NETWORK = Network("a test", 8, 1e12, 1e11, 1e-6, 1e-5)
WHOLE, ALONE = (32, None), (32, 0)
"""All ranks of the whole model, and one."""


@pytest.mark.parametrize(
    ("network", "purpose", "layer_gib", "status", "asked"),
    [
        (NETWORK, Purpose.SEARCH, 3.0, "ok", [ALONE, WHOLE]),
        (NETWORK, Purpose.SEARCH, 9.0, "oom", [ALONE]),
        (None, Purpose.SEARCH, 9.0, "oom", [(8, None), (4, None)]),
        pytest.param(None, Purpose.SEARCH, 3.0, "ok", [(8, None), (4, None), WHOLE], marks=pytest.mark.slow),
        pytest.param(NETWORK, Purpose.FINALIST, 9.0, "ok", [WHOLE], marks=pytest.mark.slow),  # it has run before
    ],
)
def test_what_does_not_fit_is_not_launched(
    network: Network | None,
    purpose: Purpose,
    layer_gib: float,
    status: str,
    asked: list[tuple[int, int | None]],
    ray_session: Any,
) -> None:
    mailbox, work = gang(10.0, layer_gib)
    telemetry: Any = {"a": ray.remote(Quiet).options(num_cpus=0).remote()}
    result = run_trial(Bench(SPEC, mailbox, telemetry, {}, network), "t", CONFIG, purpose)
    ray.get(mailbox.close.remote())
    assert ray.get(work) == asked
    assert (result.trial_id, result.status, result.purpose) == ("t", status, purpose)
    assert ("probe_time_s" in result.metrics) == (purpose == "search")
    if status == "oom" and network is None:
        assert result.cause is not None
        assert result.cause.startswith("probe: rank 0 takes 46.0 GiB with 4 layers and 82.0 with 8: with 32 it needs 2")
        assert [proxy.layers for proxy in result.proxies] == [4, 8]
    elif status == "oom":
        assert result.cause is not None
        assert result.cause.startswith("probe: rank 0: warmup: OutOfMemoryError: CUDA out of memory")
        assert result.cause.endswith("(of 138.6 GiB that torch can reserve on h200)")


def test_what_still_gives_back_memory_in_its_last_step_is_not_launched(ray_session: Any) -> None:
    mailbox, work = gang(10.0, 3.0, reclaims=2)
    telemetry: Any = {"a": ray.remote(Quiet).options(num_cpus=0).remote()}
    result = run_trial(Bench(SPEC, mailbox, telemetry, {}, NETWORK), "t", CONFIG)
    ray.get(mailbox.close.remote())
    assert ray.get(work) == [ALONE]
    assert (result.trial_id, result.status, result.purpose) == ("t", "oom", Purpose.SEARCH)
    assert result.cause is not None
    assert result.cause.startswith("probe: rank 0: in its last steps torch found memory full 2 times")
    assert "with 106.0 GiB reserved" in result.cause
    assert result.metrics["probe_time_s"] is not None


@pytest.mark.parametrize(
    ("layout", "borderline", "layer_gib", "reclaims", "status", "cause", "asked"),
    [
        (CONFIG, "probe", 3.0, 0, "ok", None, [ALONE]),
        (CONFIG, "probe", 3.0, 2, "oom", "rank 0: in its last steps torch found memory full 2 times", [ALONE]),
        (CONFIG, "risk", 3.0, 2, "ok", None, [ALONE]),
        (
            replace(PIPELINE, stage_layers=(8, 24)),
            "probe",
            9.0,
            0,
            "oom",
            "rank 2 on worker 0: warmup: OutOfMemoryError",
            [(32, 2)],
        ),
    ],
)
def test_a_trial_by_slices_is_its_own_probe_of_the_fullest_rank_first(
    layout: Layout,
    borderline: str,
    layer_gib: float,
    reclaims: int,
    status: str,
    cause: str | None,
    asked: list[tuple[int, int | None]],
    ray_session: Any,
) -> None:
    spec = make_spec(borderline=borderline, measurement={"explore": "slices"})
    mailbox, work = gang(10.0, layer_gib, reclaims)
    telemetry: Any = {"a": ray.remote(Quiet).options(num_cpus=0).remote()}
    result = run_trial(Bench(spec, mailbox, telemetry, {}, NETWORK), "t", layout)
    ray.get(mailbox.close.remote())
    assert ray.get(work) == asked
    assert (result.trial_id, result.status, result.layout) == ("t", status, layout)
    assert "probe_time_s" not in result.metrics
    if cause is not None:
        assert (result.cause or "").startswith(cause)
