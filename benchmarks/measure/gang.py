"""One warm gang for as long as a benchmark lasts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import ray

from search_spaces.layout import Layout
from service.cluster import ray_session
from service.fitting import network
from service.home import Home
from service.problem import Problem
from service.result import TrialResult
from service.trials.bench import Bench
from service.trials.evaluate import run_trial
from service.trials.gang import Gang, close_gangs
from telemetry.actor import start_telemetry, stop_telemetry
from trainables.slice import Slice

RunTrial = Callable[[str, Layout, Problem], TrialResult]
"""Runs a layout of a spec on the gang, under an id that no other trial of the gang has."""


@contextlib.contextmanager
def one_gang(spec: Problem, size: int) -> Iterator[RunTrial]:
    """Ray, telemetry and a gang of `size` workers on the spec's cluster, up before the first trial."""
    with tempfile.TemporaryDirectory() as storage, ray_session(spec.cluster):
        telemetry = start_telemetry()
        gang = Gang("benchmark", size, spec.cluster, Path(storage), telemetry, Slice.preload(spec.legal.layouts))
        ray.get(gang.mailbox.ready.remote())
        try:
            yield lambda trial_id, layout, of: run_trial(
                Bench(of, gang.mailbox, telemetry, {}, network(Home.locate(), of.cluster)), trial_id, layout
            )
        finally:
            close_gangs([gang])
            stop_telemetry(telemetry)


def require_ok(result: TrialResult) -> dict[str, float]:
    """The metrics that a trial has. Raises SystemExit, which says why, if it did not end well."""
    if result.status != "ok":
        raise SystemExit(f"{result.trial_id}: {result.layout.label}: {result.status}: {result.cause}")
    return {name: value for name, value in result.metrics.items() if value is not None}
