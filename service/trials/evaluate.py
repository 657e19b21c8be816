"""One trial as Ray Tune sees it: lease a gang, have the layout trained, and join what the ranks and telemetry saw."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
import ray.tune
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from search_spaces.layout import Layout
from service.result import NodeWindow, Proxy, Purpose, TrialResult
from service.spec import SearchSpec
from service.step import Step
from service.trials import early_stop, probe, short
from service.trials.extrapolation import SPENT, over_batch, over_depth
from service.trials.figures import (
    breakdown_metrics,
    breakdown_problems,
    methods,
    metrics,
    rank_records,
    telemetry_problems,
    trial_metrics,
)
from telemetry.windows.trial import WindowSummary, combine
from trainables.child import Outcome
from trainables.mailbox import Member
from trainables.measure import Protocol
from trainables.status import Status
from trainables.trial import TrialRequest

LEASE_S = 3600.0
GRACE_S = 60.0


def evaluate(
    step: Mapping[str, Any],
    *,
    spec: SearchSpec,
    pool: ActorHandle,
    telemetry: Mapping[str, ActorHandle],
    environment: Mapping[str, str],
) -> None:
    """A Tune function trainable: report the `TrialResult` of a `Step` as a dict, once; nothing if the pool is lost."""
    trial_id = ray.tune.get_context().get_trial_id()
    assert trial_id is not None
    wanted = Step.from_dict(step)
    layout, purpose, front = wanted.layout, wanted.purpose, wanted.front
    try:
        mailbox: Any = ray.get(pool.lease.remote(trial_id, LEASE_S))
    except RayActorError:
        return
    lost = partial(TrialResult, trial_id, layout, Status.CRASH, purpose=purpose, infrastructure=True)
    try:
        if mailbox is None:
            result = lost(
                f"no gang's workers were up within {LEASE_S:.0f} s: are the cluster's nodes up, its GPUs taken?"
            )
        else:
            result = run(trial_id, layout, spec, mailbox, telemetry, environment, purpose, front)
    except RayError as error:  # a node was lost, and with it the gang's mailbox or the telemetry of the window
        result = lost(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    finally:
        with contextlib.suppress(RayActorError):  # without its pool the search ends, but not before it has this result
            ray.get(pool.release.remote(trial_id))
    ray.tune.report({"result": json.dumps(result.to_dict())})  # Tune would take a dict apart on its way to the searcher


def run(
    trial_id: str,
    layout: Layout,
    spec: SearchSpec,
    mailbox: ActorHandle,
    telemetry: Mapping[str, ActorHandle],
    environment: Mapping[str, str],
    purpose: Purpose = Purpose.SEARCH,
    front: Sequence[Mapping[str, float]] = (),
) -> TrialResult:
    """Run the layout on the gang behind `mailbox`; see `run_at_depths`.

    Where the spec asks for it, a trial that explores and may not fit in memory is probed before: `probe_time_s` is what
    that took.
    """
    depths = probe.depths(layout, spec) if purpose == Purpose.SEARCH else None
    if depths is None:
        return run_at_depths(trial_id, layout, spec, mailbox, telemetry, environment, purpose, front)
    probed, seconds = run_probe(trial_id, layout, spec, depths, mailbox, telemetry, environment)
    if probed is not None:
        return probed
    result = run_at_depths(trial_id, layout, spec, mailbox, telemetry, environment, purpose, front)
    return replace(result, metrics=result.metrics | {"probe_time_s": seconds})


def run_at_depths(
    trial_id: str,
    layout: Layout,
    spec: SearchSpec,
    mailbox: ActorHandle,
    telemetry: Mapping[str, ActorHandle],
    environment: Mapping[str, str],
    purpose: Purpose,
    front: Sequence[Mapping[str, float]],
) -> TrialResult:
    """Run the layout at the model's depth, or at those of its proxies, deepest first.

    `front`: the objectives of points that a trial which explores should not be far behind.
    """
    if spec.depth_proxy is None:
        request = make_request(trial_id, layout, spec, purpose)
        rivals = front if purpose == Purpose.SEARCH else ()
        return replace(run_on_gang(request, spec, mailbox, telemetry, environment, rivals), purpose=purpose)
    proxies: list[Proxy] = []
    for layers in reversed(spec.depth_proxy):
        smaller = spec.at_depth(layers)
        request = make_request(f"{trial_id}-{layers}-layers", layout, smaller, purpose)
        result = run_on_gang(request, smaller, mailbox, telemetry, environment)
        proxies.insert(0, Proxy(layers, result))
        if result.status != "ok":
            cause = f"at {layers} layers: {result.cause}"
            return replace(
                result, trial_id=trial_id, cause=cause, metrics={}, methods={}, proxies=tuple(proxies), purpose=purpose
            )
    return replace(over_depth(trial_id, spec, *proxies), purpose=purpose)


def run_probe(
    trial_id: str,
    layout: Layout,
    spec: SearchSpec,
    depths: tuple[int, int],
    mailbox: ActorHandle,
    telemetry: Mapping[str, ActorHandle],
    environment: Mapping[str, str],
) -> tuple[TrialResult | None, float]:
    """Run a few steps at two depths, deeper first. The trial's result if it does not fit, and the seconds they took.

    Whatever else goes wrong with them is left to the trial itself to tell.
    """
    proxies: list[Proxy] = []
    seconds = 0.0
    for layers in reversed(depths):
        smaller = spec.at_depth(layers)
        request = probe.probing(make_request(f"{trial_id}-probe-{layers}-layers", layout, smaller))
        result = run_on_gang(request, smaller, mailbox, telemetry, environment)
        proxies.insert(0, Proxy(layers, result))
        if result.status == "oom":
            cause = f"probe: at {layers} layers: {result.cause}"
            return replace(result, trial_id=trial_id, cause=cause, proxies=tuple(proxies)), seconds
        if result.status != "ok":
            return None, seconds
        seconds += sum(result.metrics[name] or 0.0 for name in SPENT)
    if (reason := probe.refusal(layout, spec, *proxies)) is None:
        return None, seconds
    spent: dict[str, float | None] = {"probe_time_s": seconds}
    return TrialResult(trial_id, layout, Status.OOM, reason, spent, proxies=tuple(proxies)), seconds


def make_request(trial_id: str, layout: Layout, spec: SearchSpec, purpose: Purpose = Purpose.SEARCH) -> TrialRequest:
    """The trial as a gang gets it: finalists in full and in windows of their own, others short where that saves time.

    The two windows of a short trial last half as long each; a finalist that was explored by such a trial gets as many
    times as long a deadline as its steps are longer.
    """
    timing = spec.measurement.model_dump()
    deadline_s, short_trials = timing.pop("deadline_s"), timing.pop("short_trials")
    sizes = (short.batches(layout) if short_trials else None) or ()
    if purpose == Purpose.FINALIST:
        timing["window_s"] = spec.finalists.window_s
        deadline_s *= layout.global_batch_size / max(sizes, default=layout.global_batch_size)
        sizes = ()
    elif sizes:
        timing["window_s"] /= len(sizes)
    return TrialRequest(
        trial_id=trial_id,
        layout=layout,
        model=spec.shape,
        data=spec.data,
        sequence_length=spec.sequence_length,
        protocol=Protocol(**timing),
        deadline_s=deadline_s,
        seed=spec.seed,
        batches=sizes,
    )


def run_on_gang(
    request: TrialRequest,
    spec: SearchSpec,
    mailbox: ActorHandle,
    telemetry: Mapping[str, ActorHandle],
    environment: Mapping[str, str],
    front: Sequence[Mapping[str, float]] = (),
) -> TrialResult:
    """Have the gang behind `mailbox` run the trial. Whatever goes wrong becomes the result's status and cause."""
    until = time.monotonic() + request.deadline_s + GRACE_S
    answer: Any = mailbox.evaluate.remote(request)
    # A short trial knows its bounds when half of its last window is all that is left of it.
    best = {} if request.batches or not front else judge(request, spec, mailbox, telemetry, front, answer, until)
    try:
        found: Any = ray.get(answer, timeout=max(0.0, until - time.monotonic()))
    except GetTimeoutError:
        cause = f"the gang did not answer {GRACE_S:.0f} s after the trial's deadline"
        ray.get(mailbox.give_up.remote(cause))
        return TrialResult(request.trial_id, request.layout, Status.HANG, cause, infrastructure=True)
    outcomes, members, gang_s = found
    first = outcomes[0]
    if first.status != "ok":
        pruned = first.status == Status.PRUNED
        return TrialResult(
            request.trial_id,
            request.layout,
            Status(first.status),
            first.cause,
            metrics={early_stop.BOUND + name: bound for name, bound in best.items()} if pruned else {},
            traceback=first.traceback,
            infrastructure=first.infrastructure,
        )
    return measured(request, spec, outcomes, members, gang_s, telemetry, environment)


def judge(
    request: TrialRequest,
    spec: SearchSpec,
    mailbox: ActorHandle,
    telemetry: Mapping[str, ActorHandle],
    front: Sequence[Mapping[str, float]],
    answer: ObjectRef,
    until: float,
) -> dict[str, float]:
    """Once the trial is steady, end it if even the best it can come to is dominated. That best, by objective.

    Returns at once when `answer`, the trial's end, comes first, at the latest at `until` of `time.monotonic`.
    """
    steady: Any = mailbox.steady.remote(request.trial_id)
    ready, _ = ray.wait([steady, answer], timeout=max(0.0, until - time.monotonic()))
    seen: Any = ray.get(steady) if steady in ready else None
    if seen is None:
        return {}
    progress, members = seen
    steps = progress[0].steady
    if steps is None or early_stop.remaining_s(request.protocol, max(steps.steps_s)) < early_stop.WORTH_S:
        return {}
    spans = [Span(rank.device, rank.steady.start_ns, rank.steady.end_ns) for rank in progress if rank.steady]
    (summary,) = summaries([node_windows(spans, members, telemetry)], telemetry)
    best = early_stop.bounds(spec, request.layout.num_gpus, steps, summary.energy_j)
    point = early_stop.dominating(spec.goals, best, front)
    if point is not None:
        ray.get(mailbox.prune.remote(request.trial_id, early_stop.cause(best, point)))
    return best


def measured(
    request: TrialRequest,
    spec: SearchSpec,
    outcomes: list[Outcome],
    members: list[Member],
    gang_s: float,
    telemetry: Mapping[str, ActorHandle],
    environment: Mapping[str, str],
) -> TrialResult:
    """The result of a trial whose ranks all ended well, from what they and telemetry saw in each of its windows."""
    reports = [outcome.report for outcome in outcomes if outcome.report is not None]
    timings, ranks = reports[0].timings, rank_records(outcomes, members)
    spans = [[Span(r.device, r.timings[batch].start_ns, r.timings[batch].end_ns) for r in reports] for batch in timings]
    windows = [node_windows(of_batch, members, telemetry) for of_batch in spans]
    idle_windows = [windows_of_idle(of_batch, members, telemetry) for of_batch in windows]
    found = summaries([*windows, *(of_batch or () for of_batch in idle_windows)], telemetry)
    runs = []
    for i, (batch, timing) in enumerate(timings.items()):
        summary, idle = found[i], None if idle_windows[i] is None else found[len(windows) + i]
        run = TrialResult(
            trial_id=request.trial_id,
            layout=replace(request.layout, global_batch_size=batch),
            status=Status.OK,
            cause="; ".join(telemetry_problems(summary, idle)) or None,
            metrics=metrics(batch * spec.sequence_length, reports, timing, summary, idle, spec),
            methods=methods(summary, idle),
            step_times_s=timing.window_steps_s,
            windows=windows[i],
        )
        runs.append(run)
    problems = [
        run.cause if len(runs) == 1 else f"at {run.layout.global_batch_size} sequences: {run.cause}"
        for run in runs
        if run.cause
    ]
    whole = replace(
        runs[0],
        layout=request.layout,
        cause="; ".join([*problems, *breakdown_problems(outcomes)]) or None,
        metrics=runs[0].metrics | trial_metrics(reports, gang_s) | breakdown_metrics(ranks),
        losses=reports[0].losses,
        environment=dict(environment) | reports[0].environment,
        ranks=ranks,
    )
    if len(runs) == 1:
        return whole
    many, few = (Proxy(spec.shape.layers, run) for run in runs)
    return over_batch(spec, whole, few, many)


def summaries(windows: Sequence[Sequence[NodeWindow]], telemetry: Mapping[str, ActorHandle]) -> list[WindowSummary]:
    """What telemetry saw in each of some windows, given by their nodes' parts."""
    asked: list[list[Any]] = [
        [telemetry[part.node_id].window.remote(part.start_ns, part.end_ns, part.devices) for part in window]
        for window in windows
    ]
    return [combine(ray.get(parts)) for parts in asked]


@dataclass(frozen=True)
class Span:
    """Steps of a worker: its GPU, None on CPU, and the stamps in ns at their ends on its node's monotonic clock."""

    device: str | None
    start_ns: int
    end_ns: int


def node_windows(
    spans: Sequence[Span], members: Sequence[Member], telemetry: Mapping[str, ActorHandle]
) -> tuple[NodeWindow, ...]:
    """The window on each node that took part, by the stamps of the node's first worker, with the GPUs that worked.

    Both are by worker. On a node without GPUs the device is the node's own.
    """
    by_node: dict[str, list[Span]] = {}
    for span, member in zip(spans, members, strict=False):
        by_node.setdefault(member.node_id, []).append(span)
    windows = []
    for node_id, here in by_node.items():
        devices = tuple(span.device for span in here if span.device is not None)
        if not devices:
            description: Any = ray.get(telemetry[node_id].describe.remote())
            devices = tuple(device["uuid"] for device in description["devices"])
        windows.append(NodeWindow(node_id, here[0].start_ns, here[0].end_ns, devices))
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
