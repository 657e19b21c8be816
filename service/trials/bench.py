"""Where trials run and are measured: has a gang run one request, and joins what its ranks and telemetry saw."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from search_spaces.network import Network
from service.problem import Problem
from service.remote import call
from service.result import Proxy, TrialResult
from service.trials import early_stop
from service.trials.extrapolation import over_batch
from service.trials.figures import (
    breakdown_metrics,
    breakdown_problems,
    device_records,
    lent_devices,
    methods,
    metrics,
    pipeline_metrics,
    rank_records,
    telemetry_problems,
    trial_metrics,
)
from service.trials.silent import end_workers
from service.trials.straggler import straggler
from service.trials.windows import Nodes, Span, idle_windows, node_windows, summaries
from trainables.child import Outcome
from trainables.mailbox import Mailbox, Member
from trainables.program import RankReport, TrialRequest
from trainables.status import Status

GRACE_S = 60.0
"""How long a gang may stay silent after a trial's deadline."""

Answer = tuple[list[Outcome], list[Member], float]
"""What a gang's mailbox answers a request with; see `trainables.mailbox.Mailbox.evaluate`."""


@dataclass(frozen=True)
class Alone:
    """What was seen of a rank that ran without the others of its layout.

    `runs` has a result for each of the trial's global batch sizes, with the figures of the rank's GPU, and `whole` the
    first of them with those of the trial. `waiting_w` is what the GPU draws while the rank waits for others, None where
    that is not known.
    """

    report: RankReport
    runs: Sequence[TrialResult]
    whole: TrialResult
    waiting_w: float | None


@dataclass(frozen=True)
class Bench:
    """What a trial runs on: `workers` of the gang behind a mailbox, all if that is None, and the nodes' telemetry, set
    up for one problem.

    `environment` is what all its trials have in common, for their results. `network` tells how long ranks that are not
    there would take to communicate; None where nothing is known of it. `slower`: by how much the slowest GPU of the
    cluster takes longer at its power limit than each that it is known of, by UUID.
    """

    problem: Problem
    mailbox: ActorHandle[Mailbox]
    telemetry: Nodes
    environment: Mapping[str, str]
    network: Network | None = None
    slower: Mapping[str, float] = field(default_factory=dict)
    workers: Sequence[int] | None = None

    def at_depth(self, layers: int) -> Bench:
        """The bench for a model of `layers` layers."""
        return replace(self, problem=self.problem.at_depth(layers))

    def run(self, request: TrialRequest, front: Sequence[Mapping[str, float]] = ()) -> TrialResult:
        """Have the gang run a trial. Whatever goes wrong becomes the result's status and cause.

        With a `front`, the objectives of layouts that the trial should not be far behind, it is ended early if it is.
        """
        answer = self.answer(request, front)
        return answer if isinstance(answer, TrialResult) else self._measured(request, *answer)

    def alone(self, request: TrialRequest) -> Alone | TrialResult:
        """Have one worker of the gang run a rank that needs no others. The trial's result if it did not end well."""
        answer = self.answer(request)
        if isinstance(answer, TrialResult):
            return answer
        outcomes, members, gang_s = answer
        report = outcomes[0].report
        assert report is not None
        assert report.slice is not None
        waiting_w = None
        if report.slice.waited_ns is not None:
            waited = Span(report.device, *report.slice.waited_ns)
            (waiting,) = summaries([node_windows([waited], members, self.telemetry)], self.telemetry)
            waiting_w = waiting.mean_power_w
        runs = self._runs(request, outcomes, members)
        return Alone(report, runs, self._whole(request, outcomes, members, gang_s, runs), waiting_w)

    def asked(self, request: TrialRequest) -> ObjectRef[Answer]:
        """What the gang will answer to a request, in whatever time it takes."""
        return call(self.mailbox, Mailbox.evaluate, request, self.workers)

    def answer(self, request: TrialRequest, front: Sequence[Mapping[str, float]] = ()) -> Answer | TrialResult:
        """What a gang answers whose ranks all ended well, or else the trial's result."""
        until = time.monotonic() + request.deadline_s + GRACE_S
        answer = self.asked(request)
        # A short trial knows its bounds when half of its last window is all that is left of it.
        bounds = {} if request.batches or not front else self._judge(request, front, answer, until)
        try:
            outcomes, members, gang_s = ray.get(answer, timeout=max(0.0, until - time.monotonic()))
        except GetTimeoutError:
            cause = f"the gang did not answer {GRACE_S:.0f} s after the trial's deadline"
            members = ray.get(call(self.mailbox, Mailbox.expire, request.trial_id, cause))
            self._end_outcasts()
            return TrialResult(
                request.trial_id,
                request.layout,
                Status.HANG,
                cause,
                infrastructure=True,
                devices=lent_devices(members),
            )
        first = outcomes[0]
        if first.infrastructure:
            self._end_outcasts()
        if first.status == Status.OK:
            return outcomes, members, gang_s
        pruned = first.status == Status.PRUNED
        return TrialResult(
            request.trial_id,
            request.layout,
            Status(first.status),
            "; ".join([*filter(None, [first.cause]), *told_left(first)]) or None,
            metrics={early_stop.BOUND + name: bound for name, bound in bounds.items()} if pruned else {},
            traceback=first.traceback,
            infrastructure=first.infrastructure,
            devices=lent_devices(members[: len(request.ranks)]),
        )

    def _end_outcasts(self) -> None:
        """Kill the gang's workers that do not answer, for others to take their place."""
        end_workers(ray.get(call(self.mailbox, Mailbox.outcasts)))

    def _judge(
        self,
        request: TrialRequest,
        front: Sequence[Mapping[str, float]],
        answer: ObjectRef[Answer],
        until: float,
    ) -> dict[str, float]:
        """Once the trial is steady, end it if even the best it can come to is dominated. That best, by objective.

        Returns at once when `answer`, the trial's end, comes first, at the latest at `until` of `time.monotonic`.
        """
        steady = call(self.mailbox, Mailbox.steady, request.trial_id)
        ready, _ = ray.wait([steady, answer], timeout=max(0.0, until - time.monotonic()))
        seen = ray.get(steady) if steady in ready else None
        if seen is None:
            return {}
        progress, members = seen
        steps = progress[0].steady
        if steps is None or early_stop.remaining_s(request.procedure, max(steps.steps_s)) < early_stop.WORTH_S:
            return {}
        spans = [Span(rank.device, rank.steady.start_ns, rank.steady.end_ns) for rank in progress if rank.steady]
        (summary,) = summaries([node_windows(spans, members, self.telemetry)], self.telemetry)
        best = early_stop.bounds(self.problem, request.layout.num_gpus, steps, summary.energy_j)
        point = early_stop.rival(self.problem.goals, best, front)
        if point is not None:
            ray.get(call(self.mailbox, Mailbox.prune, request.trial_id, early_stop.cause(best, point)))
        return best

    def _measured(
        self, request: TrialRequest, outcomes: list[Outcome], members: list[Member], gang_s: float
    ) -> TrialResult:
        """The result of a trial whose ranks all ended well: of one run, or by two of fewer microbatches."""
        runs = self._runs(request, outcomes, members)
        whole = self._whole(request, outcomes, members, gang_s, runs)
        if len(runs) > 1:
            many, few = (Proxy(self.problem.workload.shape.layers, run) for run in runs)
            whole = over_batch(self.problem, whole, few, many)
        waited = pipeline_metrics(request.layout, whole.ranks, whole.metrics.get("step_time_s"))
        return replace(whole, metrics=whole.metrics | waited)

    def _whole(
        self,
        request: TrialRequest,
        outcomes: list[Outcome],
        members: list[Member],
        gang_s: float,
        runs: Sequence[TrialResult],
    ) -> TrialResult:
        """The first of a trial's runs, with what is of the trial as a whole."""
        ranks = rank_records(outcomes, members)
        reports = [outcome.report for outcome in outcomes if outcome.report is not None]
        said = dict.fromkeys(problem for report in reports for problem in report.problems)
        problems = [
            run.cause if len(runs) == 1 else f"at {run.layout.global_batch_size} sequences: {run.cause}"
            for run in runs
            if run.cause
        ]
        return replace(
            runs[0],
            layout=request.layout,
            cause="; ".join([*problems, *said, *breakdown_problems(outcomes), *told_left(outcomes[0])]) or None,
            metrics=runs[0].metrics
            | trial_metrics(reports, gang_s)
            | breakdown_metrics(rank.breakdown for rank in ranks),
            losses=reports[0].losses,
            environment=dict(self.environment) | reports[0].environment,
            traceback=next((outcome.traceback for outcome in outcomes if outcome.traceback is not None), None),
            ranks=ranks,
        )

    def _runs(self, request: TrialRequest, outcomes: list[Outcome], members: list[Member]) -> list[TrialResult]:
        """The trial's windows, one for each global batch size, each as a result of its own."""
        reports = [outcome.report for outcome in outcomes if outcome.report is not None]
        timings = reports[0].timings
        spans = [
            [Span(r.device, r.timings[batch].start_ns, r.timings[batch].end_ns) for r in reports] for batch in timings
        ]
        worked = [node_windows(of_batch, members, self.telemetry) for of_batch in spans]
        idled = [idle_windows(of_batch, members, self.telemetry) for of_batch in worked]
        seen = summaries([*worked, *(of_batch or () for of_batch in idled)], self.telemetry)
        ranks = rank_records(outcomes, members)
        runs = []
        for i, (batch, timing) in enumerate(timings.items()):
            summary, idle = seen[i], None if idled[i] is None else seen[len(worked) + i]
            run = TrialResult(
                trial_id=request.trial_id,
                layout=replace(request.layout, global_batch_size=batch),
                status=Status.OK,
                cause="; ".join(telemetry_problems(summary, idle)) or None,
                metrics=metrics(
                    reports[0].tokens_per_step or batch * self.problem.sequence_length,
                    reports,
                    timing,
                    summary,
                    idle,
                    self.problem,
                ),
                methods=methods(summary, idle),
                step_times_s=timing.window_steps_s,
                windows=worked[i],
                devices=device_records(worked[i], summary),
                # The profiled step is one of the first batch.
                straggler=straggler(ranks, summary.devices, request.layout) if i == 0 else None,
            )
            runs.append(run)
        return runs


def first_of(answer: ObjectRef[Answer]) -> Outcome:
    """What came of a request on the first of its workers, once all have answered: a crash if their machine is lost."""
    try:
        outcomes, _, _ = ray.get(answer)
    except RayError as error:
        return Outcome(Status.CRASH, f"the machine was lost: {type(error).__name__}", infrastructure=True)
    return outcomes[0]


def told_left(first: Outcome) -> list[str]:
    """What a trial left behind, by the first of its outcomes, as part of its cause."""
    return [f"left behind: {', '.join(first.left)}"] if first.left else []
