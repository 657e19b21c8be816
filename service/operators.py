"""Measuring what a space's layouts consist of, on all GPUs at hand: see `search_spaces.operators`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version
from ray import ObjectRef

from search_spaces.coefficients import Coefficients
from search_spaces.inventory import operators_of
from search_spaces.layout import Layout
from search_spaces.operators import Kind, Operator, Timings
from service.fitting import save_timings, timings
from service.home import Home
from service.trials.bench import Answer, Bench, first_of
from trainables.measure import Procedure
from trainables.operators import Operators
from trainables.program import RankReport, TrialRequest

SIDE_BY_SIDE = 2
"""Workers that measure, at most: getting ready takes the processors of the host, which they share."""

KERNELS_S, LAUNCHES_S = 40.0, 100.0
"""Seconds after which a GPU begins to measure no other kernel, and no other modes' launches, which come after these."""

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
    """Have workers of a bench measure the operators of the layouts of its problem, each its share, and keep what they
    take.

    First those that take most time by `start`, of those that are wanted. Whatever fails is left out. Raises
    `InputError` if what was measured before cannot be read.
    """
    problem, layouts = bench.problem, bench.problem.legal.layouts
    accelerator = problem.cluster.accelerator
    found = operators_of(layouts, problem.workload.run, start)
    known, torch = timings(home, accelerator), Version(version("torch")).base_version
    wanted = [operator for operator in found if is_wanted(operator, known, torch)]
    on_cpu = problem.cluster.device.platform == "cpu"
    whole = Operators(
        tuple(operator for operator in wanted if operator.kind != Kind.LAUNCH),
        tuple(operator for operator in wanted if operator.kind == Kind.LAUNCH),
        *((CPU_KERNELS_S, CPU_LAUNCHES_S) if on_cpu else (KERNELS_S, LAUNCHES_S)),
    )
    workers = (bench.workers or (0,))[:SIDE_BY_SIDE]
    answers = [_asked(bench, share, worker) for worker, share in zip(workers, whole.shares(len(workers)), strict=True)]
    reports, left_out, spent_s = list[RankReport](), list[str](), dict[str, float]()
    for answer in answers:
        first = first_of(answer)
        left_out += [] if first.cause is None else [f"operators: {first.cause}"]
        reports += [] if first.report is None else [first.report]
    for report in reports:
        spent_s |= {name: max(seconds, spent_s.get(name, 0.0)) for name, seconds in report.spent_s.items()}
    measured = [timing for report in reports for timing in report.operators]
    save_timings(home, accelerator, measured)
    return MeasuredOperators(
        home.operators(accelerator),
        len(wanted),
        len(measured),
        kept=len(found) - len(wanted),
        left_out=(*left_out, *(problem for report in reports for problem in report.problems)),
        spent_s=spent_s,
    )


def _asked(bench: Bench, program: Operators, worker: int) -> ObjectRef[Answer]:
    """What a worker will answer."""
    request = TrialRequest(f"operators-{worker}", Layout("megatron", 1, 1), program, QUICK, DEADLINE_S)
    return replace(bench, workers=(worker,)).asked(request)


def is_wanted(operator: Operator, known: Timings, torch: str) -> bool:
    """Whether an operator is to be measured where some are known, with this release of torch. The same kernels take the
    accelerator as long as before; how long a launch takes is up to the host, and to what else it does these days."""
    row = known.of(operator)
    return operator.kind == Kind.LAUNCH or row is None or row.torch != torch
