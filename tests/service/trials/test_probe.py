"""A layout on the edge of memory is tried at two smaller depths first, and told as out of memory if it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import ray

from search_spaces.layout import Layout
from search_spaces.memory import band, estimate
from service.problem import Problem
from service.result import Proxy, Purpose, RankRecord, TrialResult
from service.spec import make_problem
from service.trials.bench import Bench
from service.trials.evaluate import make_request, run_trial
from service.trials.probe import depths, overflow, probing
from telemetry.windows.trial import WindowSummary
from trainables.child import Outcome
from trainables.mailbox import Mailbox, Member
from trainables.measure import Timing
from trainables.program import RankReport
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
        (CONFIG, SPEC, (4, 8)),
        (CONFIG, make_spec(borderline="risk"), None),
        (replace(CONFIG, micro_batch_size=1, recompute="full"), SPEC, None),  # it fits
        (PIPELINE, make_spec(global_batch_size=64), (8, 16)),
        (CONFIG, make_spec(cluster={"gpus_per_node": 4, "accelerator": "gpu"}), None),  # whose memory nobody knows
        (CONFIG, make_spec(depth_proxy=[2, 4]), None),  # what runs fits
        (CONFIG, make_spec(depth_proxy=[15, 30]), (4, 8)),
    ],
)
def test_what_may_not_fit_is_probed(layout: Layout, spec: Problem, found: tuple[int, int] | None) -> None:
    assert depths(layout, spec) == found


def test_only_what_is_on_the_edge_needs_a_probe() -> None:
    assert band(CONFIG, SPEC.workload) == band(PIPELINE, SPEC.workload) == "borderline"


def test_a_probe_takes_few_steps_of_few_microbatches() -> None:
    plain = probing(make_request("t", CONFIG, SPEC))
    assert (plain.batches, plain.procedure.window_min_steps, plain.procedure.breakdown) == ((), 1, False)
    many = replace(CONFIG, global_batch_size=512)
    assert probing(make_request("t", many, SPEC)).batches == (16,)  # two on each of four replicas


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
    for fullest in range(4):  # two ranks of each stage
        slack_gib = estimated.ranks[PIPELINE.coordinates(fullest)["pp"]].slack / 2**30
        for spare_gib, fits in ((0.1, True), (-0.1, False)):
            whole = usable_gib + slack_gib - spare_gib  # with 32 layers; a quarter of it is the same at every depth
            share = 0.75 * whole / 32
            few, more = (whole / 4 + layers * share for layers in (4, 8))
            peaks = [[peak if rank == fullest else 10.0 for rank in range(4)] for peak in (few, more)]
            cause = overflow(PIPELINE, SPEC, ran(4, peaks[0], PIPELINE), ran(8, peaks[1], PIPELINE))
            assert (cause is None) == fits
            if cause is not None:
                assert cause.startswith(f"probe: rank {fullest} takes {few:.1f} GiB with 4 layers")
                assert cause.endswith(f"with 32 it needs {usable_gib + 0.1:.0f} GiB of {usable_gib:.0f}")
    assert overflow(PIPELINE, SPEC, ran(4, [None] * 4, PIPELINE), ran(8, [None] * 4, PIPELINE)) is None


class Quiet:
    """Telemetry of a node that saw nothing."""

    def window(self, start_ns: int, end_ns: int, devices: tuple[str, ...]) -> WindowSummary:
        return WindowSummary((), None)

    def describe(self) -> dict[str, Any]:
        return {"devices": [{"uuid": f"GPU-{rank}", "kind": "nvidia"} for rank in range(4)]}


def gang(constant_gib: float, layer_gib: float) -> tuple[Any, Any]:
    """A mailbox whose workers reserve so much in each trial, and a reference to the depths that they were asked for."""
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 100}
    mailbox: Any = ray.remote(Mailbox).options(**options).remote(4)
    timing = Timing((1.0, 1.0), (1.0, 1.0), 0, 2_000_000_000, 0.0)

    @ray.remote(num_cpus=0)
    def work(mailbox: Any) -> list[int]:
        for rank in range(4):
            ray.get(mailbox.join.remote("first", Member(rank, rank, "a", "host", 1 if rank == 0 else None)))
        asked: list[int] = []
        number = 0
        while (order := ray.get(mailbox.next.remote(0, number))) is not None:
            number, layers = order.number, order.request.program.model.layers
            asked.append(layers)
            timings = dict.fromkeys(order.request.batches or (64,), timing)
            for rank in range(4):
                peak = constant_gib + layers * layer_gib
                place = CONFIG.coordinates(rank)
                report = RankReport(rank, place, f"GPU-{rank}", timings, (2.0, 1.0), (1.0, 1.0), peak, {})
                ray.get(mailbox.hand_in.remote(rank, number, Outcome(Status.OK, report=report)))
        return asked

    return mailbox, work.remote(mailbox)


@pytest.mark.parametrize(
    ("purpose", "layer_gib", "status", "asked"),
    [
        pytest.param(Purpose.SEARCH, 3.0, "ok", [8, 4, 32], marks=pytest.mark.slow),
        (Purpose.SEARCH, 9.0, "oom", [8, 4]),
        pytest.param(Purpose.FINALIST, 9.0, "ok", [32], marks=pytest.mark.slow),  # it has run before
    ],
)
def test_what_does_not_fit_is_not_launched(
    purpose: Purpose, layer_gib: float, status: str, asked: list[int], ray_session: Any
) -> None:
    mailbox, work = gang(10.0, layer_gib)
    telemetry: Any = {"a": ray.remote(Quiet).options(num_cpus=0).remote()}
    result = run_trial(Bench(SPEC, mailbox, telemetry, {}), "t", CONFIG, purpose)
    ray.get(mailbox.close.remote())
    assert ray.get(work) == asked
    assert (result.trial_id, result.status, result.purpose) == ("t", status, purpose)
    assert ("probe_time_s" in result.metrics) == (purpose == "search")
    if status == "oom":
        assert result.cause is not None
        assert result.cause.startswith("probe: rank 0 takes 46.0 GiB with 4 layers and 82.0 with 8: with 32 it needs 2")
        assert [proxy.layers for proxy in result.proxies] == [4, 8]
