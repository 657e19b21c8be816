"""One trial as Ray Tune sees it: a layout is trained by what was lent to it, whole, at two depths or after a probe."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from search_spaces.expressions import ExpressionError
from search_spaces.layout import Layout
from search_spaces.network import Network
from service.problem import Problem
from service.remote import call
from service.result import Proxy, Purpose, TrialResult
from service.step import Step
from service.trials import probe, short
from service.trials.bench import Alone, Bench
from service.trials.command import command_of
from service.trials.extrapolation import over_depth
from service.trials.pool import Pool
from service.trials.slices import run_kind, run_slices, runs_alone
from service.trials.windows import Nodes
from trainables.measure import Procedure
from trainables.program import RankProgram, TrialRequest
from trainables.status import Status
from trainables.training import Training

Probe = Callable[[Bench, str, Layout], TrialResult | None]
"""A few steps that say whether a layout fits, under the id of its trial: the trial's result if it does not. Whatever
else goes wrong with them shows in the trial itself."""


def evaluate(
    config: Mapping[str, str],
    *,
    problem: Problem,
    pool: ActorHandle[Pool],
    telemetry: Nodes,
    environment: Mapping[str, str],
    network: Network | None,
    slower: Mapping[str, float],
) -> None:
    """A Tune function trainable: report the `TrialResult` of a `Step`, which has a lease, as a dict, once."""
    from ray import tune  # which takes seconds, and only Tune's own process of a trial has already

    trial_id = tune.get_context().get_trial_id()
    assert trial_id is not None
    wanted = Step.from_config(config)
    layout, purpose, front = wanted.layout, wanted.purpose, wanted.front
    lost = partial(TrialResult, trial_id, layout, Status.CRASH, purpose=purpose, infrastructure=True)
    try:
        lease = ray.get(call(pool, Pool.lease, trial_id))
        if lease is None:
            result = lost("the process that lends gangs to trials died")
        else:
            bench = Bench(problem, lease.mailbox, telemetry, environment, network, slower, lease.workers)
            result = run_trial(bench, trial_id, layout, purpose, front)
    except ExpressionError as error:  # of a template, such as a division by zero
        result = TrialResult(trial_id, layout, Status.CRASH, f"trainer: {error}", purpose=purpose)
    except RayError as error:  # a node was lost, and with it the gang's mailbox or the telemetry of the window
        result = lost(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    beside = ray.get(call(pool, Pool.release, trial_id))
    result = replace(result, beside=beside)
    tune.report({"result": json.dumps(result.to_dict())})  # Tune would take a dict apart on its way to the searcher


def run_trial(
    bench: Bench,
    trial_id: str,
    layout: Layout,
    purpose: Purpose = Purpose.SEARCH,
    front: Sequence[Mapping[str, float]] = (),
) -> TrialResult:
    """Run a layout on the bench.

    `front`: the objectives of layouts that a trial which explores should not be far behind. Where the problem asks for
    it, a layout that may not fit in memory is probed before a whole gang explores it: `probe_time_s` is what that took.
    A trial by slices is its own probe.
    """
    if purpose != Purpose.SEARCH or bench.problem.measurement.sliced:
        return run_at_depths(bench, trial_id, layout, purpose, front)
    return after_probe(bench, trial_id, layout, lambda: run_at_depths(bench, trial_id, layout, purpose, front))


def after_probe(bench: Bench, trial_id: str, layout: Layout, launch: Callable[[], TrialResult]) -> TrialResult:
    """What comes of a launch, or of the probe that refuses it; without a probe where the layout needs none or none can
    be."""
    run_probe = _probe_of(bench, layout)
    if run_probe is None:
        return launch()
    began = time.monotonic()
    refused = run_probe(bench, trial_id, layout)
    spent: dict[str, float | None] = {"probe_time_s": time.monotonic() - began}
    result = refused or launch()
    return replace(result, metrics=result.metrics | spent)


def run_at_depths(
    bench: Bench, trial_id: str, layout: Layout, purpose: Purpose, front: Sequence[Mapping[str, float]]
) -> TrialResult:
    """Run the layout at the model's depth, held against `front`, or at those of its proxies, deepest first."""
    if bench.problem.depth_proxy is None:
        request = make_request(trial_id, layout, bench.problem, purpose)
        return replace(_launch(bench, request, purpose, front), purpose=purpose)
    proxies: list[Proxy] = []
    for layers in reversed(bench.problem.depth_proxy):
        smaller = bench.at_depth(layers)
        request = make_request(f"{trial_id}-{layers}-layers", layout, smaller.problem, purpose)
        result = _launch(smaller, request, purpose)
        proxies.insert(0, Proxy(layers, result))
        if result.status != "ok":
            cause = f"at {layers} layers: {result.cause}"
            return replace(
                result, trial_id=trial_id, cause=cause, metrics={}, methods={}, proxies=tuple(proxies), purpose=purpose
            )
    return replace(over_depth(trial_id, bench.problem, *proxies), purpose=purpose)


def _launch(
    bench: Bench, request: TrialRequest, purpose: Purpose, front: Sequence[Mapping[str, float]] = ()
) -> TrialResult:
    """Run a request by slices or on the whole gang, held against `front` if it explores."""
    if bench.problem.measurement.sliced and purpose.as_explored:
        return run_slices(bench, request)
    return bench.run(request, front if purpose == Purpose.SEARCH else ())


def _probe_of(bench: Bench, layout: Layout) -> Probe | None:
    """How to find out by a few steps whether a layout fits; None where there is no need to, or no way."""
    if not probe.due(layout, bench.problem):
        return None
    if runs_alone(bench, layout):
        return _probe_alone
    return _probe_at_depths if probe.depths(layout, bench.problem) else None


def _probe_alone(bench: Bench, trial_id: str, layout: Layout) -> TrialResult | None:
    """By the fullest rank, on one worker."""
    if bench.problem.depth_proxy is not None:
        bench = bench.at_depth(max(bench.problem.depth_proxy))
    request = make_request(f"{trial_id}-probe", layout, bench.problem)
    kind = probe.fullest(layout, bench.problem.workload)
    one = run_kind(bench, probe.probing(request, short.sizes(layout, alone=True)), kind)
    if isinstance(one, Alone):
        if (reason := probe.unsettled(one.report)) is None:
            return None
        return TrialResult(trial_id, layout, Status.OOM, f"probe: {reason}", devices=one.whole.devices)
    return replace(one, trial_id=trial_id, cause=f"probe: {one.cause}") if one.status == Status.OOM else None


def _probe_at_depths(bench: Bench, trial_id: str, layout: Layout) -> TrialResult | None:
    """By all of its ranks, deeper first."""
    depths = probe.depths(layout, bench.problem)
    assert depths is not None
    proxies: list[Proxy] = []
    for layers in reversed(depths):
        smaller = bench.at_depth(layers)
        request = make_request(f"{trial_id}-probe-{layers}-layers", layout, smaller.problem)
        result = smaller.run(probe.probing(request, request.batches))
        proxies.insert(0, Proxy(layers, result))
        if result.status == "oom":
            cause = f"probe: at {layers} layers: {result.cause}"
            return replace(result, trial_id=trial_id, cause=cause, proxies=tuple(proxies))
        if result.status != "ok":
            return None
    if (reason := probe.overflow(layout, bench.problem, *proxies)) is None:
        return None
    return TrialResult(trial_id, layout, Status.OOM, reason, proxies=tuple(proxies))


def make_request(trial_id: str, layout: Layout, problem: Problem, purpose: Purpose = Purpose.SEARCH) -> TrialRequest:
    """The trial as a gang gets it: finalists in full and in windows of their own, others short where that saves time.

    The two windows of a short trial last half as long each, and ranks alone take no more steps than show that these
    are alike, if they are; a finalist that was explored by such a trial gets as many times as long a deadline as its
    steps are longer.
    """
    timing = asdict(problem.measurement)
    deadline_s, short_trials, _ = (timing.pop(name) for name in ("deadline_s", "short_trials", "explore"))
    if problem.measurement.sliced and purpose.as_explored:
        timing["alike_s"] = short.ALONE_S
    sizes = short.sizes(layout, problem.measurement.sliced) if short_trials else ()
    if purpose in (Purpose.FINALIST, Purpose.PLACEMENT):
        timing["window_s"] = problem.finalists.window_s
        deadline_s *= layout.global_batch_size / max(sizes, default=layout.global_batch_size)
        sizes = ()
    elif sizes:
        timing["window_s"] /= len(sizes)
    return TrialRequest(
        trial_id=trial_id,
        layout=layout,
        program=program_of(layout, problem),
        procedure=Procedure(**timing),
        deadline_s=deadline_s,
        batches=sizes,
    )


def program_of(layout: Layout, problem: Problem) -> RankProgram:
    """What each rank of a layout runs: the command of the problem's trainer, or Wattune's own training.

    Raises `ExpressionError` for a template that comes to nothing for the layout.
    """
    if problem.trainer is not None:
        return command_of(layout, problem.trainer, problem)
    assert problem.data is not None, "only a trainer does without"
    return Training(problem.workload.shape, problem.data, problem.sequence_length, problem.seed)
