"""Measuring what a space's layouts consist of, on one GPU of the machines at hand: see `search_spaces.operators`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import ray
from packaging.version import Version
from ray.exceptions import RayError

from search_spaces.coefficients import Coefficients
from search_spaces.inventory import operators_of
from search_spaces.layout import Layout
from search_spaces.operators import Kind, Operator, Timings
from service.fitting import save_timings, timings
from service.home import Home
from service.remote import call
from service.trials.bench import Bench
from trainables.child import Outcome
from trainables.mailbox import Mailbox
from trainables.measure import Procedure
from trainables.operators import Operators
from trainables.program import TrialRequest

KERNELS_S, LAUNCHES_S = 40.0, 100.0
"""Seconds after which no other kernel, and no other modes' launches, are begun to be measured."""

CPU_KERNELS_S, CPU_LAUNCHES_S = 10.0, 20.0
"""On a CPU."""

DEADLINE_S = 400.0
"""After which measuring hangs."""

QUICK = Procedure(steady_steps=2, warmup_tolerance=0.1, warmup_max_s=2.0, window_s=0.3, window_min_steps=5)
"""How a tiny model is made ready."""


@dataclass(frozen=True)
class MeasuredOperators:
    """How many of the `wanted` operators of a space were measured, the file that they are kept in, and why some were
    not, a line each: for others there was no time. `kept` were measured by earlier calibrations, and not again.
    `spent_s`: seconds by what they went into, `kernels` and then `launches`."""

    path: Path
    wanted: int
    measured: int
    kept: int
    left_out: tuple[str, ...]
    spent_s: dict[str, float]


def measure_operators(bench: Bench, start: Coefficients, home: Home) -> MeasuredOperators:
    """Have a worker measure the operators of the layouts of its problem, and keep what they take.

    First those that take most time by `start`, of those that are wanted. Whatever fails is left out. Raises
    `InputError` if what was measured before cannot be read.
    """
    problem, layouts = bench.problem, bench.problem.legal.layouts
    accelerator = problem.cluster.accelerator
    found = operators_of(layouts, problem.workload.run, start)
    known, torch = timings(home, accelerator), Version(version("torch")).base_version
    wanted = [operator for operator in found if is_wanted(operator, known, torch)]
    kept = len(found) - len(wanted)
    on_cpu = problem.cluster.device.platform == "cpu"
    kernels_s, launches_s = (CPU_KERNELS_S, CPU_LAUNCHES_S) if on_cpu else (KERNELS_S, LAUNCHES_S)
    program = Operators(
        tuple(operator for operator in wanted if operator.kind != Kind.LAUNCH),
        tuple(operator for operator in wanted if operator.kind == Kind.LAUNCH),
        kernels_s,
        launches_s,
    )
    request = TrialRequest("operators", Layout("megatron", 1, 1), program, QUICK, DEADLINE_S)
    try:
        outcomes, _, _ = ray.get(call(bench.mailbox, Mailbox.evaluate, request, bench.workers))
    except RayError as error:
        lost = f"the machine was lost: {type(error).__name__}"
        return MeasuredOperators(home.operators(accelerator), len(wanted), 0, kept, (lost,), {})
    first: Outcome = outcomes[0]
    left_out = [] if first.cause is None else [f"operators: {first.cause}"]
    measured, spent_s = 0, dict[str, float]()
    if first.report is not None:
        save_timings(home, accelerator, first.report.operators)
        left_out += first.report.problems
        measured, spent_s = len(first.report.operators), first.report.spent_s
    return MeasuredOperators(home.operators(accelerator), len(wanted), measured, kept, tuple(left_out), spent_s)


def is_wanted(operator: Operator, known: Timings, torch: str) -> bool:
    """Whether an operator is to be measured where some are known, with this release of torch. The same kernels take the
    accelerator as long as before; how long a launch takes is up to the host, and to what else it does these days."""
    row = known.of(operator)
    return operator.kind == Kind.LAUNCH or row is None or row.torch != torch
