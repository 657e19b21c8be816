"""Calibrating the cost model: short trials of the most informative layouts on the machines at hand, and the fit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from search_spaces.cost import Coefficients
from search_spaces.layout import Layout
from search_spaces.network import Curve
from service.checks import check_data, check_machine, check_power_limits
from service.cluster import check_cluster, ray_session
from service.driver import Driver, gang_sizes
from service.errors import InputError, NoAnswerError
from service.fitting import (
    Observation,
    as_measured,
    design,
    expected,
    fit,
    network_by,
    observations,
    ratios,
    save,
    save_curves,
)
from service.home import Home
from service.home import tracking_uri as store_uri
from service.operators import QUICK, MeasuredOperators, measure_operators
from service.problem import Problem
from service.queue.actor import Member
from service.queue.admission import admit
from service.queue.policy import read_policy
from service.record import store
from service.record.results import Results
from service.record.tracking import Tracker
from service.sampling.agenda import CalibrationAgenda
from service.spec import new_search_id
from service.trials.bench import Bench, first_of
from service.trials.gang import room
from trainables.collectives import Collectives
from trainables.laps import Laps
from trainables.program import TrialRequest

TRIALS = 16
"""Layouts that are run, at most; fewer if the problem's budget has fewer."""

SIZES = tuple(2**power for power in range(10, 31, 2))
"""Bytes of the collectives that are measured: 1 KiB to 1 GiB."""

CPU_SIZES = SIZES[:5]
"""Between processes on CPUs, which would take seconds for more."""

BUDGET_S, DEADLINE_S = 15.0, 120.0
"""Seconds after which nothing more is measured, and after which the measuring hangs."""


@dataclass(frozen=True)
class Error:
    """Mean of |predicted / measured - 1| over the trials; None where nothing was measured."""

    step_time: float | None
    power: float | None


@dataclass(frozen=True)
class Calibrated:
    """What a calibration came to: its record, its file, the trials it rests on, and its errors on just these trials,
    and what was measured besides: no operators if it was stopped before. `spent_s`: seconds by what they went into.
    `sliced`: whether no rank of a trial met another."""

    search_id: str
    path: Path
    trials: int
    before: Error
    after: Error
    operators: MeasuredOperators | None
    collectives: Measured | None
    spent_s: dict[str, float]
    sliced: bool = False

    @property
    def took(self) -> str:
        """Such as ``126 s: start 20 s, operators 60 s (kernels 40 s, launches 20 s), trials 44 s, rest 2 s``."""
        within = {"operators": self.operators.spent_s if self.operators is not None else {}}
        parts = []
        for name, seconds in self.spent_s.items():
            of_it = ", ".join(f"{part} {spent:.0f} s" for part, spent in within.get(name, {}).items())
            parts.append(f"{name} {seconds:.0f} s" + f" ({of_it})" * bool(of_it))
        return f"{sum(self.spent_s.values()):.0f} s: {', '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        values = asdict(self) | {"path": str(self.path)}
        for name, besides in (("operators", self.operators), ("collectives", self.collectives)):
            if besides is not None:
                values[name]["path"] = str(besides.path)
        return values


@dataclass(frozen=True)
class Measured:
    """What came of measuring collectives: the curves and their file, or why there are none. Medians over the largest
    sizes: `beside`, their time beside matrix products in that alone; `slowed`, how much longer these then take, in the
    collectives' time alone."""

    path: Path
    curves: tuple[Curve, ...]
    cause: str | None = None

    @property
    def beside(self) -> float:
        return statistics.median(curve.beside_s[-1] / curve.seconds[-1] for curve in self.curves)

    @property
    def slowed(self) -> float:
        return statistics.median(curve.slowed[-1] for curve in self.curves)


def calibrate(problem: Problem, tracking_uri: str | None = None) -> Calibrated:
    """Run some of the problem's layouts, on the Ray cluster of `RAY_ADDRESS` or here, and fit the cost model to them.

    They are run as the problem explores, by gangs or by slices. The collectives of the GPUs at hand and the operators
    of which the layouts consist are measured first, so that what is run settles what they leave in doubt. The
    coefficients and what was measured are kept in the state directory, for all searches on the problem's accelerator.
    Raises `InputError` for an accelerator of which no data sheet is known and for whatever `service.search.run` does,
    `NoAnswerError` if no trial ended well.
    """
    laps, accelerator = Laps(), problem.cluster.accelerator
    if problem.trainer is not None:
        raise InputError("trainer: the cost model is calibrated by Wattune's own engines: leave it out")
    if (start := expected(problem.cluster)) is None:
        raise InputError(f"cluster.accelerator: there is no cost model of {accelerator!r} to calibrate")
    check_power_limits(problem, False)
    check_data(problem, read_policy().data)
    check_machine(problem.least)
    problem = replace(problem.located(), name=f"{problem.name[:51]}-calibration")
    layouts, count = problem.legal.layouts, min(TRIALS, problem.budget.trials)
    chosen = design(layouts, problem.workload, start, count)
    if not chosen:
        raise InputError("space: no layout surely fits the GPUs' memory, as a calibration wants it")
    home = Home.locate().create()

    def known() -> Coefficients:
        """What is to be expected by what was measured."""
        return as_measured(start, home, problem.cluster)

    known()  # what was measured before may not be readable: then nothing is to be run
    store.check(store_uri(tracking_uri))
    search_id = new_search_id(problem)
    with home.driving(search_id), ray_session(problem.cluster):
        check_cluster(problem.least)
        problem = problem.on(at_hand := room(problem.cluster))
        queue = Member()
        tracker = Tracker(store_uri(tracking_uri), home)
        admission = admit(queue, store_uri(tracking_uri), problem.data)
        agenda = CalibrationAgenda(problem, chosen, workers=sum(gang_sizes(problem, at_hand)))
        collectives, operators = list[Measured](), list[MeasuredOperators]()

        def beforehand(bench: Bench) -> None:
            laps.end("start")
            if len(bench.workers or ()) > 1:
                driver.display.say("measuring collectives")
                collectives.append(measure_collectives(bench, home))
                laps.end("collectives")
            driver.display.say("measuring operators, for a minute or two")
            operators.append(measure_operators(bench, start, home))
            laps.end("operators")
            measured = known()
            agenda.change(design(layouts, problem.workload, measured, count))
            driver.network = network_by(measured, problem.cluster)

        driver = Driver(problem, search_id, home, tracker, agenda, None, admission, beforehand)
        driver.run()
        laps.end("trials")
    observed = observations(Results(store_uri(tracking_uri)).search(search_id), problem.workload)
    if not observed:
        raise NoAnswerError(f"search {search_id}: no trial came to a result; see `wattune status {search_id}`")
    fitted = fit(observed, known(), problem.measurement.sliced)
    save(home, accelerator, fitted)
    before, after = errors(observed, start), errors(observed, fitted)
    laps.end("rest")
    return Calibrated(
        search_id,
        home.calibration(accelerator),
        len(observed),
        before,
        after,
        operators[0] if operators else None,
        collectives[0] if collectives else None,
        laps.seconds,
        problem.measurement.sliced,
    )


def measure_collectives(bench: Bench, home: Home) -> Measured:
    """Have the workers of a bench measure the collectives between their accelerators, and keep them."""
    cluster, workers = bench.problem.cluster, bench.workers
    assert workers is not None
    program = Collectives(CPU_SIZES if cluster.device.platform == "cpu" else SIZES, BUDGET_S)
    request = TrialRequest("collectives", Layout("megatron", len(workers), len(workers)), program, QUICK, DEADLINE_S)
    file = home.collectives(cluster.accelerator)
    first = first_of(bench.asked(request))
    if first.report is None or not first.report.curves:
        return Measured(file, (), first.cause or "the time was not enough for any")
    save_curves(home, cluster.accelerator, first.report.curves)
    return Measured(file, first.report.curves)


def errors(observed: Sequence[Observation], calibration: Coefficients) -> Error:
    """How far predictions are from what was measured."""
    pairs = [ratios(one, calibration) for one in observed]
    times = [abs(slower - 1) for slower, _ in pairs]
    powers = [abs(hotter - 1) for _, hotter in pairs if hotter is not None]
    return Error(*(statistics.fmean(values) if values else None for values in (times, powers)))
