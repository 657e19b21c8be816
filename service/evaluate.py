"""One trial as Ray Tune sees it: lease a gang, have the layout trained, and join what the ranks and telemetry saw."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import ray
import ray.tune
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from search_spaces.config import TrialConfig
from service.proxy import extrapolate
from service.spec import SearchSpec
from telemetry.window import WindowSummary, combine
from trainables.child import Outcome
from trainables.mailbox import Member
from trainables.measure import Protocol
from trainables.result import NodeWindow, Proxy, RankRecord, TrialResult
from trainables.trial import TrialRequest

LEASE_S = 3600.0
GRACE_S = 60.0


def evaluate(
    config: Mapping[str, Any],
    *,
    spec: SearchSpec,
    pool: ActorHandle,
    telemetry: Mapping[str, ActorHandle],
    environment: Mapping[str, str],
) -> None:
    """A Tune function trainable: report the `TrialResult` of the layout `config`, once."""
    trial_id = ray.tune.get_context().get_trial_id()
    assert trial_id is not None
    layout = TrialConfig.from_dict(config)
    mailbox: Any = ray.get(pool.lease.remote(trial_id, LEASE_S))
    try:
        if mailbox is None:
            cause = f"no gang's workers were up within {LEASE_S:.0f} s: are the cluster's nodes up, its GPUs taken?"
            result = TrialResult(trial_id, layout, "crash", cause)
        else:
            result = run(trial_id, layout, spec, mailbox, telemetry, environment)
    except RayError as error:  # a node was lost, and with it the gang's mailbox or the telemetry of the window
        result = TrialResult(trial_id, layout, "crash", f"{type(error).__name__}: {str(error).splitlines()[0]}")
    finally:
        ray.get(pool.release.remote(trial_id))
    ray.tune.report({"result": json.dumps(result.to_dict())})  # Tune would take a dict apart on its way to the searcher


def run(
    trial_id: str,
    layout: TrialConfig,
    spec: SearchSpec,
    mailbox: ActorHandle,
    telemetry: Mapping[str, ActorHandle],
    environment: Mapping[str, str],
) -> TrialResult:
    """Run the layout on the gang behind `mailbox`: at the model's depth, or at those of its proxies, deepest first."""
    if spec.depth_proxy is None:
        return run_on_gang(make_request(trial_id, layout, spec), spec, mailbox, telemetry, environment)
    proxies: list[Proxy] = []
    for layers in reversed(spec.depth_proxy):
        smaller = spec.at_depth(layers)
        request = make_request(f"{trial_id}-{layers}-layers", layout, smaller)
        result = run_on_gang(request, smaller, mailbox, telemetry, environment)
        proxies.insert(0, Proxy(layers, result))
        if result.status != "ok":
            cause = f"at {layers} layers: {result.cause}"
            return TrialResult(
                trial_id, layout, result.status, cause, traceback=result.traceback, proxies=tuple(proxies)
            )
    return extrapolate(trial_id, spec, *proxies)


def make_request(trial_id: str, config: TrialConfig, spec: SearchSpec) -> TrialRequest:
    """The trial as a gang gets it."""
    timing = spec.measurement.model_dump()
    deadline_s = timing.pop("deadline_s")
    return TrialRequest(
        trial_id=trial_id,
        config=config,
        model=spec.shape,
        data=spec.data,
        sequence_length=spec.sequence_length,
        protocol=Protocol(**timing),
        deadline_s=deadline_s,
        seed=spec.seed,
    )


def run_on_gang(
    request: TrialRequest,
    spec: SearchSpec,
    mailbox: ActorHandle,
    telemetry: Mapping[str, ActorHandle],
    environment: Mapping[str, str],
) -> TrialResult:
    """Have the gang behind `mailbox` run the trial. Whatever goes wrong becomes the result's status and cause."""
    try:
        answer: Any = ray.get(mailbox.evaluate.remote(request), timeout=request.deadline_s + GRACE_S)
    except GetTimeoutError:
        cause = f"the gang did not answer {GRACE_S:.0f} s after the trial's deadline"
        ray.get(mailbox.give_up.remote(cause))
        return TrialResult(request.trial_id, request.config, "hang", cause)
    outcomes, members, gang_s = answer
    first = outcomes[0]
    if first.status != "ok":
        return TrialResult(request.trial_id, request.config, first.status, first.cause, traceback=first.traceback)
    windows = node_windows(outcomes, members, telemetry)
    idle_windows = windows_of_idle(windows, members, telemetry)
    summaries = ray.get(
        [telemetry[w.node_id].window.remote(w.start_ns, w.end_ns, w.devices) for w in [*windows, *(idle_windows or ())]]
    )
    summary = combine(summaries[: len(windows)])
    idle = None if idle_windows is None else combine(summaries[len(windows) :])
    assert first.report is not None
    ranks = rank_records(outcomes, members)
    return TrialResult(
        trial_id=request.trial_id,
        config=request.config,
        status="ok",
        metrics=metrics(outcomes, summary, idle, spec, gang_s) | breakdown_metrics(ranks),
        methods=methods(summary, idle),
        step_times_s=first.report.timing.window_steps_s,
        losses=first.report.losses,
        windows=windows,
        environment=dict(environment) | first.report.environment,
        cause="; ".join([*telemetry_problems(summary, idle), *breakdown_problems(outcomes)]) or None,
        ranks=ranks,
    )


def node_windows(
    outcomes: list[Outcome], members: list[Member], telemetry: Mapping[str, ActorHandle]
) -> tuple[NodeWindow, ...]:
    """The window on each node that took part, by the stamps of the node's first rank, with the GPUs that worked there.

    On a node without GPUs the device is the node's own.
    """
    by_node: dict[str, list[Outcome]] = {}
    for outcome, member in zip(outcomes, members, strict=False):
        by_node.setdefault(member.node_id, []).append(outcome)
    windows = []
    for node_id, ranks in by_node.items():
        reports = [rank.report for rank in ranks if rank.report is not None]
        devices = tuple(report.device for report in reports if report.device is not None)
        if not devices:
            description: Any = ray.get(telemetry[node_id].describe.remote())
            devices = tuple(device["uuid"] for device in description["devices"])
        windows.append(NodeWindow(node_id, reports[0].timing.start_ns, reports[0].timing.end_ns, devices))
    return tuple(windows)


def windows_of_idle(
    windows: Sequence[NodeWindow], members: Sequence[Member], telemetry: Mapping[str, ActorHandle]
) -> tuple[NodeWindow, ...] | None:
    """The same windows with the GPUs of the gang that the trial left idle; none where all worked, or there is none.

    Which GPUs are those of idle workers is only known of a gang that has all GPUs of its nodes: None if it has not.
    Nodes without any rank of the trial are left out: nobody stamped the window there.
    """
    idle: list[NodeWindow] = []
    for window in windows:
        workers = sum(member.node_id == window.node_id for member in members)
        if workers <= len(window.devices):
            continue
        description: Any = ray.get(telemetry[window.node_id].describe.remote())
        gpus = [device["uuid"] for device in description["devices"] if device["kind"] != "cpu"]
        if gpus and len(gpus) != workers:
            return None
        if left := tuple(gpu for gpu in gpus if gpu not in window.devices):
            idle.append(replace(window, devices=left))
    return tuple(idle)


def rank_records(outcomes: list[Outcome], members: list[Member]) -> tuple[RankRecord, ...]:
    """What each rank of the trial was and did, by rank. `outcomes` and `members` are by worker."""
    records = [
        RankRecord(
            rank=report.rank,
            worker=member.rank,
            node_id=member.node_id,
            device=report.device,
            coordinates=report.coordinates,
            peak_memory_gib=report.peak_memory_gib,
            breakdown=report.profile.breakdown if report.profile else None,
        )
        for outcome, member in zip(outcomes, members, strict=False)
        if (report := outcome.report) is not None
    ]
    return tuple(sorted(records, key=lambda record: record.rank))


def breakdown_metrics(ranks: tuple[RankRecord, ...]) -> dict[str, float | None]:
    """Each time of the breakdown as the mean over the ranks, and the most idle and most held-up ranks' own."""
    found = [asdict(rank.breakdown) for rank in ranks if rank.breakdown is not None]
    if not found:
        return {}
    means = {f"breakdown_{name}": statistics.fmean(times[name] for times in found) for name in found[0]}
    most = ("idle_s", "exposed_communication_s")
    return means | {f"breakdown_max_{name}": max(times[name] for times in found) for name in most}


def breakdown_problems(outcomes: list[Outcome]) -> list[str]:
    """Why ranks that were to be profiled have no breakdown."""
    reports = [outcome.report for outcome in outcomes if outcome.report is not None]
    return [f"no breakdown of rank {r.rank}: {r.profile.problem}" for r in reports if r.profile and r.profile.problem]


def telemetry_problems(summary: WindowSummary, idle: WindowSummary | None) -> list[str]:
    """Why figures are missing or want looking at, and which fabrics held the trial up."""
    if idle is None:
        return [*summary.problems, *summary.saturated, "no idle_energy_j: the node's GPUs are not all the gang's"]
    return [*summary.problems, *summary.saturated, *(f"idle {problem}" for problem in idle.problems)]


def metrics(
    outcomes: list[Outcome], summary: WindowSummary, idle: WindowSummary | None, spec: SearchSpec, gang_s: float
) -> dict[str, float | None]:
    """The figures of one trial by the names of the record; None is missing.

    `summary` is of the devices that worked, `idle` of the gang's others, None if it is not known which they are.
    `gang_s` is all the time that the trial kept the gang from the next one; `trial_overhead_s` is what of it went
    neither into compiling, nor into warm-up, nor into the window, nor into the breakdown.
    """
    reports = [outcome.report for outcome in outcomes if outcome.report is not None]
    timing = reports[0].timing
    window_s = sum(timing.window_steps_s)
    warmup_s = sum(timing.warmup_steps_s) - timing.compile_s
    tokens = spec.tokens_per_step * len(timing.window_steps_s)
    breakdown_s = max(report.profile.time_s if report.profile else 0.0 for report in reports)
    steps = len(timing.window_steps_s)
    energy_j = summary.energy_j
    memory = [report.peak_memory_gib for report in reports if report.peak_memory_gib is not None]
    return {
        **spec.speed(tokens / window_s, len(reports)),
        "step_time_s": statistics.median(timing.window_steps_s),
        "joules_per_token": None if energy_j is None else energy_j / tokens,
        "energy_per_step_j": None if energy_j is None else energy_j / steps,
        "idle_energy_j": idle_energy_j(idle) if reports[0].device is not None else None,
        **summary.metrics(),
        "peak_memory_gib": max(memory, default=None),
        "trial_overhead_s": gang_s - window_s - warmup_s - timing.compile_s - breakdown_s,
        "compile_time_s": timing.compile_s,
        "warmup_time_s": warmup_s,
        "window_time_s": window_s,
        "breakdown_time_s": breakdown_s,
        "final_loss": reports[0].losses[-1],
    }


def idle_energy_j(idle: WindowSummary | None) -> float | None:
    """What the gang's idle GPUs drew: nothing if there are none."""
    if idle is None:
        return None
    return idle.energy_j if idle.devices else 0.0


def methods(summary: WindowSummary, idle: WindowSummary | None) -> dict[str, str]:
    """How the energy and throttle figures that are known were obtained, by metric."""
    found = summary.methods()
    if summary.energy_j is not None and summary.energy_method is not None:
        found |= dict.fromkeys(("joules_per_token", "energy_per_step_j"), summary.energy_method)
    if idle is not None and idle.energy_j is not None and idle.energy_method is not None:
        found["idle_energy_j"] = idle.energy_method
    return found
