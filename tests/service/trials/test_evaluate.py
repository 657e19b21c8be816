"""The arithmetic between what a gang's ranks and the nodes' telemetry report and what the record holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray

from search_spaces.layout import Layout
from search_spaces.schedules import Pass, PassTime
from service.metrics import METRICS
from service.problem import Problem
from service.result import DeviceRecord, NodeWindow, Purpose, RankRecord, SlowCause, TrialResult
from service.spec import make_problem
from service.trials.bench import Bench, first_of
from service.trials.evaluate import make_request, run_trial
from service.trials.figures import (
    breakdown_metrics,
    breakdown_problems,
    methods,
    metrics,
    pipeline_metrics,
    rank_records,
    telemetry_problems,
    trial_metrics,
)
from service.trials.windows import Span, idle_windows, node_windows
from telemetry.samples import THROTTLE_CAUSES, TRAFFIC
from telemetry.windows.device import DeviceWindow
from telemetry.windows.trial import WindowSummary
from trainables.breakdown import Breakdown, Profile, break_down
from trainables.child import ABORTED, Outcome
from trainables.mailbox import Mailbox, Member
from trainables.measure import Procedure, Stretch, Timing
from trainables.program import Progress, RankReport
from trainables.status import Status
from trainables.training import Training

SECOND = 1_000_000_000


def make_spec(accelerator: str = "h200") -> Problem:
    return make_problem(
        {
            "name": "arithmetic",
            "model": "tiny-llama",
            "data": "synthetic",
            "sequence_length": 128,
            "global_batch_size": 16,
            "cluster": {"gpus_per_node": 8, "accelerator": accelerator},
            "space": {"num_gpus": [4]},
            "measurement": {"steady_steps": 4, "window_s": 7, "deadline_s": 99},
            "seed": 5,
        }
    )


CONFIG = Layout("megatron", 4, 16)
TIMING = Timing(
    warmup_steps_s=(9.0, 2.0, 2.0),
    window_steps_s=(2.0, 2.0, 4.0, 2.0),
    start_ns=100 * SECOND,
    end_ns=110 * SECOND,
    compile_s=7.0,
)
LATER = Timing((1.0, 1.0), (1.0, 1.0, 1.0, 1.0), 120 * SECOND, 124 * SECOND, 0.0)


def ranks(
    count: int,
    peaks: list[float | None],
    device: str | None = "GPU",
    layout: Layout = CONFIG,
    profiles: list[Profile] | None = None,
    timings: Sequence[tuple[int, Timing]] = ((16, TIMING),),
) -> list[Outcome]:
    """Outcomes by worker."""
    return [
        Outcome(
            Status.OK,
            phase="report",
            report=RankReport(
                rank=layout.worker_rank(rank),
                coordinates=layout.coordinates(layout.worker_rank(rank)),
                device=device and f"{device}-{rank}",
                timings={size: replace(t, start_ns=t.start_ns + rank, end_ns=t.end_ns + rank) for size, t in timings},
                losses=(6.0, 5.0, 4.5),
                grad_norms=(1.0, 1.0, 1.0),
                peak_memory_gib=peaks[rank],
                environment={"torch": "2"},
                profile=profiles[rank] if profiles else None,
            ),
        )
        for rank in range(count)
    ]


def reports(outcomes: list[Outcome]) -> list[RankReport]:
    return [outcome.report for outcome in outcomes if outcome.report is not None]


def spans(outcomes: list[Outcome]) -> list[Span]:
    return [Span(r.device, r.timings[16].start_ns, r.timings[16].end_ns) for r in reports(outcomes)]


def device_window(device: str, energy_j: float | None, **changes: Any) -> DeviceWindow:
    return replace(
        DeviceWindow(
            device=device,
            duration_s=10.0,
            energy_j=energy_j,
            energy_method="counter",
            integrated_j=None if energy_j is None else 0.98 * energy_j,
            throttle_s={cause: 5.0 if cause == "power_cap" else 0.0 for cause in THROTTLE_CAUSES},
            throttle_time_s=1.0,
            thermal_throttle_s=(1.0, 2.0),
            throttle_method="counter",
            power_cap_method="counter",
            mean_hbm_power_w=None,
            mean_sm_clock_mhz=1500.0,
            min_sm_clock_mhz=1200.0,
            mean_gpu_temp_c=60.0,
            peak_gpu_temp_c=65.0,
            min_gpu_temp_margin_c=25.0,
            peak_hbm_temp_c=None,
            tensor_activity=0.6,
            dram_activity=0.3,
            bytes_per_s=dict.fromkeys(TRAFFIC, 1e9),
            utilisation={"pcie": 0.1, "link": None},
            sample_count=100,
            problems=(),
        ),
        **changes,
    )


SUMMARY = WindowSummary(tuple(device_window(f"GPU-{rank}", 2560.0) for rank in range(4)), peak_power_w=1400.0)
NONE_IDLE = WindowSummary((), peak_power_w=None)


def test_speed_and_efficiency_follow_from_the_window() -> None:
    spec = make_spec()
    found = metrics(16 * 128, reports(ranks(4, [None] * 4)), TIMING, SUMMARY, NONE_IDLE, spec)
    tokens = 16 * 128 * 4
    assert found["tokens_per_s"] == pytest.approx(tokens / 10)
    assert found["tokens_per_s_per_gpu"] == pytest.approx(tokens / 10 / 4)
    flops = spec.workload.shape.flops_per_token(128) * tokens / 10
    assert found["mfu"] == pytest.approx(flops / (4 * 989.4e12))
    assert found["step_time_s"] == 2.0  # the median: one slow step does not move it
    assert found["joules_per_token"] == pytest.approx(4 * 2560 / tokens)
    assert found["energy_per_step_j"] == pytest.approx(4 * 2560 / 4)
    assert found["mean_power_w"] == pytest.approx(4 * 256)
    assert found["peak_power_w"] == 1400.0
    assert found["energy_ratio"] == pytest.approx(0.98)
    assert found["throttle_ratio"] == pytest.approx(0.1)
    assert found["power_cap_ratio"] == pytest.approx(0.5)


def test_the_fullest_gpu_and_the_last_loss_are_the_trial_s() -> None:
    found = trial_metrics(reports(ranks(4, [1.0, 3.5, 2.0, 3.0])), gang_s=25.0)
    assert (found["peak_memory_gib"], found["final_loss"]) == (3.5, 4.5)


def test_the_gang_s_time_is_split_into_compile_warm_up_window_and_overhead() -> None:
    found = trial_metrics(reports(ranks(4, [None] * 4)), gang_s=25.0)
    parts = [found[name] for name in ("compile_time_s", "warmup_time_s", "window_time_s", "trial_overhead_s")]
    assert parts == [7.0, 6.0, 10.0, 2.0]


def step_of(matmul_s: float, idle_s: float) -> Breakdown:
    """Of a step that multiplies matrices, communicates for a second and waits."""
    edges = np.array([0, matmul_s, matmul_s + 1]) * SECOND
    starts, ends = edges[:-1].astype(np.int64), edges[1:].astype(np.int64)
    return break_down(["matmul", "send_recv"], starts, ends, matmul_s + 1 + idle_s)


STAGES = replace(CONFIG, num_gpus=2, pipeline_parallel_size=2, rank_order=(1, 0))


def test_each_rank_s_place_worker_and_breakdown_are_recorded_by_rank() -> None:
    profiles = [Profile(step_of(2.0, 4.0), None, 0.5), Profile(step_of(3.0, 3.0), None, 0.7)]
    outcomes = ranks(2, [5.0, 6.0], layout=STAGES, profiles=profiles)
    first, second = rank_records(outcomes, members(["a", "b"]))
    assert (first.rank, first.worker, first.node_id, first.device, first.peak_memory_gib) == (0, 1, "b", "GPU-1", 6.0)
    assert first.coordinates == {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
    assert first.breakdown == profiles[1].breakdown
    assert (second.rank, second.worker, second.coordinates["pp"]) == (1, 0, 1)


def test_the_breakdown_is_told_as_the_mean_over_the_ranks_and_the_worst_of_them() -> None:
    profiles = [Profile(step_of(2.0, 4.0), None, 0.5), Profile(step_of(3.0, 3.0), None, 0.7)]
    outcomes = ranks(2, [None] * 2, layout=STAGES, profiles=profiles)
    found = breakdown_metrics(rank.breakdown for rank in rank_records(outcomes, members(["a", "a"])))
    assert found["breakdown_matmul_s"] == 2.5
    assert found["breakdown_exposed_send_recv_s"] == found["breakdown_exposed_communication_s"] == 1.0
    assert (found["breakdown_idle_s"], found["breakdown_max_idle_s"]) == (3.5, 4.0)
    assert found["breakdown_span_s"] == 7.0
    assert all(name.startswith("breakdown_") and name.endswith("_s") for name in found)
    assert breakdown_problems(outcomes) == []


def test_what_a_pipeline_waits_for_itself_follows_from_its_passes() -> None:
    """Of GPipe with two microbatches: the second stage waits for the first pass forward and the last one backward of
    the first, which waits for all that the second does beyond its own; the slower of two replicas counts."""
    layout = Layout("megatron", 4, 4, pipeline_parallel_size=2, pipeline_schedule="gpipe")
    slower = [[(2.0, 1.0), (3.0, 3.0)], [(2.0, 2.0), (4.0, 5.0)]]
    records = []
    for rank in range(4):
        place = layout.coordinates(rank)
        times = slower[place["pp"]] if place["dp"] else [(0.1, 0.1)] * 2
        steps = zip((Pass.FORWARD, Pass.BACKWARD), times, strict=True)
        passes = tuple(PassTime(place["pp"], step, *seconds) for step, seconds in steps)
        records.append(RankRecord(rank, rank, "a", None, place, None, None, passes=passes))
    played, busy = 2 + (2 + 2) + (4 + 5) + 3, (2 + 1 + 3 + 3, 2 + 2 + 4 + 5)
    found = pipeline_metrics(layout, records, 20.0)
    assert found["bubble_ratio"] == pytest.approx((2 * played - sum(busy)) / 2 / 20)
    assert found["stage_imbalance"] == pytest.approx(13 / 11 - 1)
    assert pipeline_metrics(layout, records, None) == {}
    assert pipeline_metrics(layout, [replace(one, passes=()) for one in records], 20.0) == {}


def test_a_breakdown_that_is_missing_has_its_reason_and_no_figures() -> None:
    failed = Profile(None, "the profiler failed: RuntimeError: it saw no kernel", 0.1)
    outcomes = ranks(2, [None] * 2, layout=STAGES, profiles=[failed, Profile(step_of(1.0, 1.0), None, 0.1)])
    assert breakdown_problems(outcomes) == [f"no breakdown of rank 1: {failed.problem}"]
    assert rank_records(outcomes, members(["a", "a"]))[1].breakdown is None
    assert breakdown_metrics([None, None]) == {}
    both = ranks(2, [None] * 2, layout=STAGES, profiles=[failed, failed])
    assert breakdown_problems(both) == [f"no breakdown of ranks 0, 1: {failed.problem}"]


def test_the_breakdown_s_own_time_is_no_overhead() -> None:
    profiles = [Profile(step_of(1.0, 1.0), None, seconds) for seconds in (0.5, 0.7)]
    found = trial_metrics(reports(ranks(2, [None] * 2, layout=STAGES, profiles=profiles)), gang_s=25.0)
    assert found["breakdown_time_s"] == 0.7
    assert found["trial_overhead_s"] == pytest.approx(1.3)


def test_every_metric_that_a_spec_can_name_is_given() -> None:
    of_ranks = reports(ranks(4, [None] * 4))
    window = metrics(2048, of_ranks, TIMING, SUMMARY, NONE_IDLE, make_spec())
    assert set(METRICS) <= set(window | trial_metrics(of_ranks, gang_s=25.0))


def test_what_is_not_known_is_none() -> None:
    unknown = replace(SUMMARY, devices=(device_window("node", None, energy_method=None),), peak_power_w=None)
    of_ranks = reports(ranks(4, [None] * 4, device=None))
    found = metrics(16 * 128, of_ranks, TIMING, unknown, NONE_IDLE, make_spec("cpu"))
    found |= trial_metrics(of_ranks, gang_s=25.0)
    names = ("mfu", "joules_per_token", "mean_power_w", "peak_power_w", "peak_hbm_temp_c", "peak_memory_gib")
    assert [found[name] for name in names] == [None] * len(names)
    assert found["tokens_per_s"] == pytest.approx(16 * 128 * 4 / 10)
    assert "joules_per_token" not in methods(unknown, NONE_IDLE)


def test_a_saturated_fabric_is_told() -> None:
    busy = replace(SUMMARY, devices=(device_window("GPU-0", 1.0, utilisation={"pcie": 0.1, "link": 0.95}),))
    assert telemetry_problems(busy, NONE_IDLE) == ["GPU-0: link is saturated, at 95% of its peak"]


def test_a_trial_without_energy_has_a_cause() -> None:
    mute = WindowSummary((device_window("GPU-0", None),), None)
    assert telemetry_problems(mute, NONE_IDLE) == ["GPU-0: tells neither energy nor power"]
    refused = WindowSummary((device_window("GPU-0", None, problems=("GPU-0: energy_mj stood still",)),), None)
    assert telemetry_problems(refused, NONE_IDLE) == ["GPU-0: energy_mj stood still"]


def test_energy_per_token_is_labelled_as_the_energy_is() -> None:
    assert methods(SUMMARY, NONE_IDLE)["joules_per_token"] == "counter"
    estimated = replace(SUMMARY, devices=(device_window("node", 10.0, energy_method="estimated"),))
    assert methods(estimated, None)["joules_per_token"] == "estimated"
    assert methods(estimated, None)["mean_power_w"] == "estimated"


def members(nodes: list[str]) -> list[Member]:
    return [Member(rank, node, "host", 1, f"GPU-{rank}") for rank, node in enumerate(nodes)]


def test_each_node_has_its_own_window_with_the_gpus_that_worked() -> None:
    windows = node_windows(spans(ranks(4, [None] * 4)), members(["a", "a", "b", "b"]), {})
    assert windows == (
        NodeWindow("a", TIMING.start_ns, TIMING.end_ns, ("GPU-0", "GPU-1")),
        NodeWindow("b", TIMING.start_ns + 2, TIMING.end_ns + 2, ("GPU-2", "GPU-3")),
    )


def test_workers_that_a_trial_leaves_idle_are_not_measured() -> None:
    windows = node_windows(spans(ranks(3, [None] * 3)), members(["a", "b", "a", "b", "c", "c"]), {})
    assert [(window.node_id, window.devices) for window in windows] == [("a", ("GPU-0", "GPU-2")), ("b", ("GPU-1",))]


class NodeTelemetry:
    """Answers for a node as `telemetry.actor.Telemetry` does, with the figures it was given for `TIMING`."""

    def __init__(self, energy_j: dict[str, float], problem: str = "", kind: str = "nvidia") -> None:
        self.energy_j, self.problem, self.kind = energy_j, problem, kind

    def describe(self) -> dict[str, Any]:
        return {"devices": [{"uuid": device, "kind": self.kind} for device in self.energy_j]}

    def window(self, start_ns: int, end_ns: int, devices: tuple[str, ...]) -> WindowSummary:
        assert (start_ns, end_ns) in ((t.start_ns, t.end_ns) for t in (TIMING, LATER))  # of the node's first rank
        length = (end_ns - start_ns) / (TIMING.end_ns - TIMING.start_ns)
        windows = [
            device_window(
                device, self.energy_j[device] * length, problems=(f"{device}: {self.problem}",) if self.problem else ()
            )
            for device in devices
        ]
        return WindowSummary(tuple(windows), peak_power_w=300.0)


def test_a_node_without_gpus_is_measured_as_one_device(ray_session: Any) -> None:
    telemetry = {"a": start(NodeTelemetry, {"cpu-of-a": 1.0}, "", "cpu")}
    outcomes = ranks(2, [None] * 2, device=None)
    windows = node_windows(spans(outcomes), members(["a", "a"]), telemetry)
    assert windows == (NodeWindow("a", TIMING.start_ns, TIMING.end_ns, ("cpu-of-a",)),)
    assert idle_windows(windows, members(["a", "a", "a"]), telemetry) == ()
    cpu = metrics(2048, reports(outcomes), TIMING, SUMMARY, NONE_IDLE, make_spec("cpu"))
    assert cpu["idle_energy_j"] is None
    gpus = metrics(2048, reports(ranks(2, [None] * 2)), TIMING, SUMMARY, NONE_IDLE, make_spec())
    assert gpus["idle_energy_j"] == 0.0


def test_a_request_carries_the_spec_s_own_words() -> None:
    spec = make_spec()
    request = make_request("t1", CONFIG, spec)
    assert (request.trial_id, request.layout) == ("t1", CONFIG)
    assert request.program == Training(spec.workload.shape, "synthetic", 128, seed=5)
    assert request.procedure == Procedure(4, 0.02, 30.0, 7.0, 5, breakdown=True)
    assert (request.deadline_s, request.batches) == (99.0, ())


def test_many_microbatches_are_timed_by_fewer_but_not_those_of_finalists() -> None:
    many = replace(CONFIG, global_batch_size=128)  # 32 on each replica
    for purpose in (Purpose.SEARCH, Purpose.SENTINEL, Purpose.CALIBRATION):
        short = make_request("t1", many, make_spec(), purpose)
        assert (short.layout, short.batches, short.procedure.window_s) == (many, (24, 8), 3.5)
    whole = make_request("t1", many, make_spec(), Purpose.FINALIST)
    assert (whole.batches, whole.procedure.window_s) == ((), make_spec().finalists.window_s)
    assert whole.deadline_s == pytest.approx(99.0 * 128 / 24)
    assert make_request("t1", CONFIG, make_spec(), Purpose.FINALIST).deadline_s == 99.0  # it was in full before, too
    spec = make_spec()
    measurement = replace(spec.measurement, short_trials=False)
    whole = make_request("t1", many, replace(spec, measurement=measurement))
    assert (whole.batches, whole.procedure.window_s) == ((), 7.0)


def start(actor: Any, *arguments: Any) -> Any:
    return ray.remote(actor).options(num_cpus=0, max_concurrency=100).remote(*arguments)


def answering(outcomes: list[Outcome], idle: int = 0) -> Any:
    """A gang's mailbox, with workers that hand in these outcomes for its first trial, and more that are left idle."""
    workers = len(outcomes) + idle
    mailbox = start(Mailbox, workers)

    @ray.remote(num_cpus=0)
    def work(mailbox: Any) -> None:
        for member in members(["a"] * workers):
            ray.get(mailbox.join.remote(member))
        order = ray.get(mailbox.next.remote(0, 0))
        for rank, outcome in enumerate(outcomes):
            ray.get(mailbox.hand_in.remote(rank, order.number, outcome))
            ray.get(mailbox.leave.remote(rank, order.number, ()))

    work.remote(mailbox)
    return mailbox


def test_a_trial_s_result_joins_training_and_telemetry(ray_session: Any) -> None:
    spec = make_spec()
    telemetry = {"a": start(NodeTelemetry, {f"GPU-{rank}": 2560.0 for rank in range(4)}, "was reset")}
    bench = Bench(spec, answering(ranks(4, [1.0] * 4)), telemetry, {"gpu": "H200"})
    result = bench.run(make_request("t1", CONFIG, spec))
    assert (result.trial_id, result.layout, result.status) == ("t1", CONFIG, "ok")
    assert result.metrics["joules_per_token"] == pytest.approx(4 * 2560 / (16 * 128 * 4))
    assert result.methods["joules_per_token"] == "counter"
    assert result.step_times_s == TIMING.window_steps_s
    assert result.losses == (6.0, 5.0, 4.5)
    assert [(rank.rank, rank.worker, rank.device) for rank in result.ranks] == [(i, i, f"GPU-{i}") for i in range(4)]
    assert [window.devices for window in result.windows] == [("GPU-0", "GPU-1", "GPU-2", "GPU-3")]
    assert [(one.device, one.node_id) for one in result.devices] == [(f"GPU-{rank}", "a") for rank in range(4)]
    assert (result.devices[0].mean_power_w, result.devices[0].throttle_s["power_cap"]) == (256.0, 5.0)
    assert result.environment == {"gpu": "H200", "torch": "2"}
    assert result.cause is not None
    assert "GPU-1: was reset" in result.cause
    assert TrialResult.from_dict(result.to_dict()) == result


def test_a_trial_s_result_names_the_gpu_for_which_the_others_waited(ray_session: Any) -> None:
    spec = make_spec()
    telemetry = {"a": start(NodeTelemetry, {f"GPU-{rank}": 2560.0 for rank in range(4)})}
    steps = [replace(step_of(3.0 - waits, 0.0), exposed_communication_s=waits) for waits in (1.0, 1.0, 0.8, 1.0)]
    profiles = [Profile(replace(step, span_s=3.0), None, 0.5) for step in steps]
    result = Bench(spec, answering(ranks(4, [1.0] * 4, profiles=profiles)), telemetry, {}).run(
        make_request("t1", CONFIG, spec)
    )
    assert result.straggler is not None
    assert (result.straggler.rank, result.straggler.device, result.straggler.cause) == (2, "GPU-2", SlowCause.UNKNOWN)
    assert result.straggler.cost == pytest.approx(0.2 / 3)
    assert TrialResult.from_dict(result.to_dict()) == result


def test_a_short_trial_s_result_follows_from_both_its_windows(ray_session: Any) -> None:
    spec = replace(make_spec(), global_batch_size=128)
    layout = replace(CONFIG, global_batch_size=128)
    telemetry = {"a": start(NodeTelemetry, {f"GPU-{rank}": 2560.0 for rank in range(4)}, "was reset")}
    outcomes = ranks(4, [1.0] * 4, timings=[(24, TIMING), (8, LATER)])
    result = run_trial(Bench(spec, answering(outcomes), telemetry, {}), "t1", layout, Purpose.SENTINEL)
    assert (result.status, result.layout, result.purpose) == ("ok", layout, "sentinel")
    # Steps of 24 and of 8 sequences take 2.5 s and 1 s on average.
    assert result.metrics["tokens_per_s"] == pytest.approx(128 * 128 / (2.5 + 1.5 * (128 - 24) / 16))
    assert result.metrics["window_time_s"] == 14.0
    assert result.methods["tokens_per_s"] == "short"
    assert result.metrics["power_cap_ratio"] == pytest.approx(0.5)
    assert [proxy.result.layout.global_batch_size for proxy in result.proxies] == [8, 24]
    assert [proxy.result.windows[0].start_ns for proxy in result.proxies] == [LATER.start_ns, TIMING.start_ns]
    assert result.windows == result.proxies[1].result.windows
    assert result.cause is not None
    assert result.cause.startswith("at 24 sequences: GPU-0: was reset")
    assert "at 8 sequences: GPU-0: was reset" in result.cause
    assert TrialResult.from_dict(result.to_dict()) == result


def test_the_gang_s_idle_gpus_are_counted_apart(ray_session: Any) -> None:
    spec, request = make_spec(), make_request("t1", replace(CONFIG, num_gpus=2), make_spec())
    drawn = {"GPU-0": 3000.0, "GPU-1": 3000.0, "GPU-2": 700.0, "GPU-3": 800.0}

    def with_energies(energy_j: dict[str, float]) -> TrialResult:
        telemetry = {"a": start(NodeTelemetry, energy_j, "was hot")}
        return Bench(spec, answering(ranks(2, [1.0] * 2), idle=2), telemetry, {}).run(request)

    result = with_energies(drawn)
    assert result.metrics["idle_energy_j"] == pytest.approx(1500)
    assert result.metrics["joules_per_token"] == pytest.approx(6000 / (16 * 128 * 4))
    assert result.methods["idle_energy_j"] == "counter"
    assert [window.devices for window in result.windows] == [("GPU-0", "GPU-1")]
    assert result.cause == "GPU-0: was hot; GPU-1: was hot; idle GPU-2: was hot; idle GPU-3: was hot"
    shared = with_energies(drawn | {"GPU-4": 5000.0})  # which may be another gang's
    assert shared.metrics["idle_energy_j"] is None
    assert "idle_energy_j" not in shared.methods
    assert shared.cause == "GPU-0: was hot; GPU-1: was hot; no idle_energy_j: the node's GPUs are not all the gang's"


def test_a_trial_that_failed_has_a_cause_and_no_figures(ray_session: Any) -> None:
    outcomes = [Outcome(ABORTED), Outcome(Status.OOM, "warmup: OutOfMemoryError: CUDA out of memory", "warmup")]
    spec, layout = make_spec(), replace(CONFIG, num_gpus=2)
    result = Bench(spec, answering(outcomes, idle=2), {}, {}).run(make_request("t2", layout, spec))
    assert (result.status, result.cause) == ("oom", "rank 1: warmup: OutOfMemoryError: CUDA out of memory")
    assert (result.metrics, result.windows, result.infrastructure) == ({}, (), False)
    assert result.devices == (DeviceRecord("GPU-0", "a"), DeviceRecord("GPU-1", "a")), "though no rank has named one"
    assert result.devices[0].mean_power_w is None
    assert TrialResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_a_trial_whose_workers_never_answer_had_their_gpus(ray_session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.trials.bench.GRACE_S", 1.0)
    spec, layout, mailbox = make_spec(), replace(CONFIG, num_gpus=2), start(Mailbox, 3)
    ray.get([mailbox.join.remote(member) for member in members(["a", "b", "b"])])
    result = Bench(spec, mailbox, {}, {}).run(replace(make_request("t4", layout, spec), deadline_s=0.0))
    assert (result.status, result.infrastructure) == ("hang", True)
    assert result.devices == (DeviceRecord("GPU-0", "a"), DeviceRecord("GPU-1", "b"))


def test_a_machine_that_is_lost_before_it_answers_is_a_crash(ray_session: Any) -> None:
    spec, layout, mailbox = make_spec(), replace(CONFIG, num_gpus=2), start(Mailbox, 2)
    answer = Bench(spec, mailbox, {}, {}).asked(make_request("t5", layout, spec))
    ray.kill(mailbox)
    lost = first_of(answer)
    assert (lost.status, lost.report, lost.infrastructure) == ("crash", None, True)
    assert lost.cause is not None
    assert lost.cause.startswith("the machine was lost: ")


def test_a_trial_that_failed_in_its_breakdown_keeps_its_figures(ray_session: Any) -> None:
    spec, layout, problem = make_spec(), replace(CONFIG, num_gpus=2), "no result after 99 s, in phase breakdown"
    lacking = [Profile(None, problem, 60.0), Profile(None, None, 60.0)]
    whole = ranks(2, [1.0] * 2, layout=layout, profiles=lacking)
    outcomes = [
        replace(whole[0], status=Status.HANG, cause=problem, phase="breakdown", traceback="in profile_step"),
        replace(whole[1], status=ABORTED, phase="breakdown"),
    ]
    telemetry = {"a": start(NodeTelemetry, {f"GPU-{rank}": 2560.0 for rank in range(2)})}
    result = Bench(spec, answering(outcomes), telemetry, {}).run(make_request("t3", layout, spec))
    assert (result.status, result.cause) == ("ok", f"no breakdown of rank 0: {problem}")
    assert result.traceback == "in profile_step"
    assert result.metrics["joules_per_token"] == pytest.approx(2 * 2560 / (16 * 128 * 4))
    assert result.metrics["breakdown_time_s"] == 60.0
    assert "breakdown_span_s" not in result.metrics


def steady(mailbox: Any, lost: bool = False) -> None:
    """A gang of one worker whose trial is steady, at 10 s a step, and goes on until it is ended or the gang is lost."""

    @ray.remote(num_cpus=0)
    def work(mailbox: Any) -> None:
        ray.get(mailbox.join.remote(members(["a"])[0]))
        order = ray.get(mailbox.next.remote(0, 0))
        agreed = Stretch((10.0,) * 3, LATER.start_ns, LATER.end_ns)
        ray.get(mailbox.note.remote(0, order.number, Progress("window", "GPU-0", 204.8, agreed)))
        if lost:
            ray.get(mailbox.give_up.remote("the node was lost"))
        ray.get(mailbox.aborted.remote(order.number))

    work.remote(mailbox)


def test_a_trial_that_cannot_reach_the_front_is_ended_and_is_no_measurement(ray_session: Any) -> None:
    mailbox, layout, front = start(Mailbox, 1), replace(CONFIG, num_gpus=1), [{"tokens_per_s": 300.0}]
    front[0] |= {"joules_per_token": 0.1, "throttle_ratio": 0.0}
    telemetry = {"a": start(NodeTelemetry, {"GPU-0": 6000.0})}
    steady(mailbox)
    result = run_trial(Bench(make_spec(), mailbox, telemetry, {}), "t1", layout, Purpose.SEARCH, front)
    assert (result.status, result.purpose, result.infrastructure) == ("pruned", "search", False)
    assert result.cause is not None
    assert result.cause.startswith("dominated: tokens_per_s 206.3, joules_per_token ")
    assert set(result.metrics) == {"bound_tokens_per_s", "bound_joules_per_token", "bound_throttle_ratio"}
    assert (result.methods, result.windows, result.step_times_s) == ({}, (), ())
    assert TrialResult.from_dict(result.to_dict()) == result


@pytest.mark.parametrize("purpose", [Purpose.FINALIST, Purpose.SENTINEL, Purpose.CALIBRATION])
def test_only_trials_that_explore_are_ended_early(purpose: Purpose, ray_session: Any) -> None:
    mailbox, layout = start(Mailbox, 1), replace(CONFIG, num_gpus=1)
    steady(mailbox, lost=True)
    front = [{"tokens_per_s": 1e9, "joules_per_token": 0.0, "throttle_ratio": 0.0}]
    result = run_trial(Bench(make_spec(), mailbox, {}, {}), "t1", layout, purpose, front)
    assert (result.status, result.cause, result.purpose) == ("crash", "the node was lost", purpose)
    assert result.infrastructure
    assert result.metrics == {}
