"""Measuring what a space's layouts consist of, on one GPU of the machines at hand: see `search_spaces.operators`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError

from search_spaces.coefficients import Coefficients
from search_spaces.inventory import operators_of
from search_spaces.layout import Layout
from search_spaces.operators import Kind, OperatorTiming
from service.fitting import save_timings, timings
from service.home import Home
from service.remote import call
from service.trials.bench import Bench
from trainables.child import Outcome
from trainables.launches import Launches
from trainables.mailbox import Mailbox
from trainables.measure import Procedure
from trainables.operators import Operators
from trainables.program import TrialRequest

KERNELS_S, LAUNCHES_S = 40.0, 60.0
"""Seconds after which no other operator, and no other modes' launches, are begun to be measured."""

CPU_S = 10.0
"""On a CPU, for either."""

DEADLINE_S = 240.0
"""After which measuring hangs."""

QUICK = Procedure(steady_steps=2, warmup_tolerance=0.1, warmup_max_s=2.0, window_s=0.3, window_min_steps=5)
"""How a tiny model is made ready."""


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

    First those that have not been measured here before, and of these those that take most time by `start`. Whatever
    fails is left out. Raises `InputError` if what was measured before cannot be read.
    """
    problem, layouts = bench.problem, bench.problem.legal.layouts
    accelerator = problem.cluster.accelerator
    known = timings(home, accelerator)
    found = operators_of(layouts, problem.workload.run, start)
    wanted = sorted(found, key=lambda operator: known.of(operator) is not None)
    launches = tuple(operator for operator in wanted if operator.kind == Kind.LAUNCH)
    kernels = tuple(operator for operator in wanted if operator.kind != Kind.LAUNCH)
    programs = Operators(kernels, _budget_s(bench, KERNELS_S)), Launches(launches, _budget_s(bench, LAUNCHES_S))
    measured, left_out = 0, list[str]()
    try:
        for one in itertools.chain.from_iterable(_measured(bench, program) for program in programs):
            if isinstance(one, str):
                left_out.append(one)
            else:
                save_timings(home, accelerator, [one])  # which stands, whatever becomes of the others
                measured += 1
    except RayError as error:
        left_out.append(f"the machine was lost: {type(error).__name__}")
    return MeasuredOperators(home.operators(accelerator), len(wanted), measured, tuple(left_out))


def _measured(bench: Bench, program: Operators | Launches) -> Iterator[OperatorTiming | str]:
    """What each of a program's operators takes, or why it was not measured."""
    name = type(program).__name__.lower()
    request = TrialRequest(name, Layout("megatron", 1, 1), program, QUICK, DEADLINE_S)
    outcomes, _, _ = ray.get(call(bench.mailbox, Mailbox.evaluate, request, bench.workers))
    first: Outcome = outcomes[0]
    if first.cause is not None:
        yield f"{name}: {first.cause}"
    if first.report is not None:
        yield from first.report.operators
        yield from first.report.problems


def _budget_s(bench: Bench, seconds: float) -> float:
    return CPU_S if bench.problem.cluster.device.platform == "cpu" else seconds
