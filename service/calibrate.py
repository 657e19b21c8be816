"""Calibrating the cost model: short trials of the most informative layouts on the machines at hand, and the fit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from search_spaces.cost import Coefficients
from service.checks import check_data, check_machine
from service.cluster import check_cluster, ray_session
from service.driver import Driver
from service.errors import InputError, NoAnswerError
from service.fitting import Observation, design, expected, fit, observations, ratios, save
from service.home import Home
from service.home import tracking_uri as store_uri
from service.problem import Problem
from service.record import store
from service.record.results import Results
from service.record.tracking import Tracker
from service.sampling.agenda import CalibrationAgenda
from service.spec import new_search_id

TRIALS = 16
"""Layouts that are run, at most; fewer if the problem's budget has fewer."""


@dataclass(frozen=True)
class Error:
    """Mean of |predicted / measured - 1| over the trials; None where nothing was measured."""

    step_time: float | None
    power: float | None


@dataclass(frozen=True)
class Calibrated:
    """What a calibration came to: its record, its file, the trials it rests on, and its errors on just these trials."""

    search_id: str
    path: Path
    trials: int
    before: Error
    after: Error


def calibrate(problem: Problem, tracking_uri: str | None = None) -> Calibrated:
    """Run some of the problem's layouts, on the Ray cluster of `RAY_ADDRESS` or here, and fit the cost model to them.

    The coefficients are kept in the state directory, for all searches on the problem's accelerator. Raises `InputError`
    for an accelerator of which no data sheet is known and for whatever `service.search.run` does, `NoAnswerError` if no
    trial ended well.
    """
    accelerator = problem.cluster.accelerator
    if (start := expected(problem.cluster)) is None:
        raise InputError(f"cluster.accelerator: there is no cost model of {accelerator!r} to calibrate")
    check_data(problem)
    check_machine(problem.cluster)
    problem = replace(problem.located(), name=f"{problem.name[:51]}-calibration")
    layouts = design(problem.legal.layouts, problem.workload, start, min(TRIALS, problem.budget.trials))
    if not layouts:
        raise InputError("space: no layout surely fits the GPUs' memory, as a calibration wants it")
    home = Home.locate().create()
    store.check(store_uri(tracking_uri))
    search_id = new_search_id(problem)
    with home.driving(search_id), ray_session(problem.cluster):
        check_cluster(problem.cluster)
        tracker = Tracker(store_uri(tracking_uri), home)
        Driver(problem, search_id, home, tracker, CalibrationAgenda(problem, layouts)).run()
    observed = observations(Results(store_uri(tracking_uri)).search(search_id), problem.workload)
    if not observed:
        raise NoAnswerError(f"search {search_id}: no trial came to a result; see `wattune status {search_id}`")
    fitted = fit(observed, start)
    save(home, accelerator, fitted)
    return Calibrated(
        search_id, home.calibration(accelerator), len(observed), errors(observed, start), errors(observed, fitted)
    )


def errors(observed: Sequence[Observation], calibration: Coefficients) -> Error:
    """How far predictions are from what was measured."""
    pairs = [ratios(one, calibration) for one in observed]
    times = [abs(slower - 1) for slower, _ in pairs]
    powers = [abs(hotter - 1) for _, hotter in pairs if hotter is not None]
    return Error(*(statistics.fmean(values) if values else None for values in (times, powers)))
