"""Measuring what a space's layouts consist of, on one GPU of the machines at hand: see `search_spaces.operators`."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError

from search_spaces.coefficients import Coefficients
from search_spaces.inventory import operators_of
from search_spaces.launches import specimen_of
from search_spaces.layout import Layout
from search_spaces.network import Network
from search_spaces.operators import Kind, Operator, OperatorTiming
from service.fitting import save_timings, timings
from service.home import Home
from service.remote import call
from service.trials.bench import Bench
from trainables.child import Outcome
from trainables.mailbox import Mailbox
from trainables.measure import Procedure
from trainables.operators import Operators
from trainables.program import TrialRequest
from trainables.slice import Slice
from trainables.training import Training

KERNELS_S, LAUNCHES_S = 40.0, 120.0
"""Seconds after which no other operator, and no other mode's launches, are begun to be measured."""

CPU_S = 10.0
"""On a CPU, for either."""

DEADLINE_S = 120.0
"""After which measuring hangs."""

QUICK = Procedure(steady_steps=2, warmup_tolerance=0.1, warmup_max_s=2.0, window_s=0.3, window_min_steps=5)
"""How a tiny model is timed."""

AT_ONCE = Network("collectives that take no time", 8, 1e30, 1e30, 1e-30, 1e-30)


@dataclass(frozen=True)
class MeasuredOperators:
    """How many of the `wanted` operators of a space were measured, the file that they are kept in, and why some were
    not, a line each: for others there was no time."""

    path: Path
    wanted: int
    measured: int
    left_out: tuple[str, ...]


def measure_operators(bench: Bench, start: Coefficients, home: Home) -> MeasuredOperators:
    """Have a worker measure the operators of the layouts of its problem, and keep what they take.

    First those that have not been measured here before, and of these those that take most time by `start`, launches
    that are to be compiled after all others. Whatever fails is left out. Raises `InputError` if what was measured
    before cannot be read.
    """
    problem, layouts = bench.problem, bench.problem.legal.layouts
    accelerator = problem.cluster.accelerator
    known = timings(home, accelerator)
    found = operators_of(layouts, problem.workload.run, start)
    wanted = sorted(found, key=lambda operator: (known.of(operator) is not None, _takes_long(operator)))
    measured, left_out = 0, list[str]()
    try:
        for one in itertools.chain(_kernels(bench, wanted), _launches(bench, wanted)):
            if isinstance(one, str):
                left_out.append(one)
            else:
                save_timings(home, accelerator, [one])  # which stands, whatever becomes of the others
                measured += 1
    except RayError as error:
        left_out.append(f"the machine was lost: {type(error).__name__}")
    return MeasuredOperators(home.operators(accelerator), len(wanted), measured, tuple(left_out))


def _takes_long(operator: Operator) -> bool:
    """Whether to measure it takes twice as long as others: half of that is the compiler's."""
    return operator.kind == Kind.LAUNCH and operator.compiled


def _kernels(bench: Bench, operators: Sequence[Operator]) -> Iterator[OperatorTiming | str]:
    """What each but launches takes, or why it was not measured."""
    kernels = tuple(operator for operator in operators if operator.kind != Kind.LAUNCH)
    program = Operators(kernels, _budget_s(bench, KERNELS_S))
    request = TrialRequest("operators", Layout("megatron", 1, 1), program, QUICK, DEADLINE_S)
    outcome = _outcome(bench, request)
    if (report := outcome.report) is None:
        yield f"operators: {outcome.cause}"
    else:
        yield from report.operators
        yield from report.problems


def _launches(bench: Bench, operators: Sequence[Operator]) -> Iterator[OperatorTiming | str]:
    """What each launch takes, or why it was not measured. Each by a training of its own."""
    launches = [operator for operator in operators if operator.kind == Kind.LAUNCH]
    until = time.monotonic() + _budget_s(bench, LAUNCHES_S)
    for number, launch in enumerate(launches):
        if time.monotonic() > until:
            return
        specimen = specimen_of(launch)
        training = Training(specimen.model, "synthetic", specimen.sequence_length, seed=0)
        program = Slice(training, rank=0, network=AT_ONCE)
        request = TrialRequest(f"launch-{number}", specimen.layout, program, QUICK, DEADLINE_S, specimen.batches)
        outcome = _outcome(bench, request)
        if (report := outcome.report) is None:
            yield f"{launch.label}: {outcome.cause}"
            continue
        few, many = (statistics.median(report.timings[batch].window_steps_s) for batch in specimen.batches)
        if many > few:
            yield OperatorTiming(launch, specimen.launch_s((few, many)))
        else:
            yield f"{launch.label}: more microbatches took no longer"


def _outcome(bench: Bench, request: TrialRequest) -> Outcome:
    outcomes, _, _ = ray.get(call(bench.mailbox, Mailbox.evaluate, request, bench.workers))
    first: Outcome = outcomes[0]
    return first


def _budget_s(bench: Bench, seconds: float) -> float:
    return CPU_S if bench.problem.cluster.device.platform == "cpu" else seconds
