"""Warm gangs for as long as a benchmark lasts."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import ray

from benchmarks import import_path
from search_spaces.layout import Layout
from service.cluster import ray_session
from service.fitting import network
from service.history import slower
from service.home import Home
from service.problem import Cluster, Problem
from service.record.provenance import described
from service.result import TrialResult
from service.trials.bench import Bench
from service.trials.evaluate import run_trial
from service.trials.gang import Gang, close_gangs, room
from service.trials.slices import network_of
from telemetry.actor import Fleet, start_telemetry, stop_telemetry
from trainables.program import TrialRequest
from trainables.slice import Slice
from trainables.training import Training

Told = TypeVar("Told")
Free = TypeVar("Free")
RunTrial = Callable[[str, Layout, Problem], TrialResult]
"""Runs a layout of a spec on the gang, under an id that no other trial of the gang has."""


@dataclass(frozen=True)
class Warm:
    """A gang that is up, with the nodes' telemetry. `known`: how much slower the slowest GPU is than each."""

    gang: Gang
    telemetry: Fleet
    known: Mapping[str, float]

    def bench(self, of: Problem) -> Bench:
        return Bench(of, self.gang.mailbox, self.telemetry, {}, network(Home.locate(), of.cluster), self.known)

    def __call__(self, trial_id: str, layout: Layout, of: Problem) -> TrialResult:
        """`RunTrial`."""
        return run_trial(self.bench(of), trial_id, layout)


@contextlib.contextmanager
def one_gang(spec: Problem, size: int) -> Iterator[RunTrial]:
    """Ray, telemetry and a gang of `size` workers on the spec's cluster, up before the first trial."""
    with some_gangs(spec.cluster, size, spec.legal.layouts, most=1) as (run,):
        yield run


@contextlib.contextmanager
def some_gangs(cluster: Cluster, size: int, layouts: Iterable[Layout], most: int) -> Iterator[list[Warm]]:
    """Ray, telemetry and as many gangs of `size` workers as there is room for, but at least one and `most` at most, on
    a cluster, for trials of `layouts`; up before the first trial. Each may be used by a thread of its own."""
    with _up(cluster, size, layouts, most) as (telemetry, gangs):
        known = slower(Home.locate(), [device["uuid"] for device in described(telemetry)])
        yield [Warm(gang, telemetry, known) for gang in gangs]


@contextlib.contextmanager
def one_bench(spec: Problem, size: int) -> Iterator[Bench]:
    """Likewise one gang, for requests that no layout alone makes, such as of programs of this package: its workers find
    them wherever the command was started."""
    os.environ["PYTHONPATH"] = import_path()
    with _up(spec.cluster, size, spec.legal.layouts, most=1) as (telemetry, (gang,)):
        yield Bench(spec, gang.mailbox, telemetry, {}, network(Home.locate(), spec.cluster))


@contextlib.contextmanager
def _up(cluster: Cluster, size: int, layouts: Iterable[Layout], most: int) -> Iterator[tuple[Fleet, list[Gang]]]:
    with tempfile.TemporaryDirectory() as storage, ray_session(cluster):
        telemetry, preload = start_telemetry(), Slice.preload(layouts)
        count = max(1, min(most, room(cluster) // size))
        gangs = [Gang(f"benchmark-{i}", size, cluster, Path(storage), telemetry, preload) for i in range(count)]
        for gang in gangs:
            ray.get(gang.mailbox.ready.remote())
        try:
            yield telemetry, gangs
        finally:
            close_gangs(gangs)
            stop_telemetry(telemetry)


def sliced(problem: Problem) -> Problem:
    """The same, explored by slices."""
    return replace(problem, measurement=replace(problem.measurement, explore="slices"))


def spread(gangs: Sequence[Free], jobs: Iterable[Callable[[Free], Told]]) -> Iterator[Told]:
    """What each job tells, as it is over; each has a gang to itself, the first that is free."""
    free: SimpleQueue[Free] = SimpleQueue()
    for gang in gangs:
        free.put(gang)

    def one(job: Callable[[Free], Told]) -> Told:
        run = free.get()
        try:
            return job(run)
        finally:
            free.put(run)

    with ThreadPoolExecutor(len(gangs)) as pool:
        for future in as_completed([pool.submit(one, job) for job in jobs]):
            yield future.result()


def first_alone(bench: Bench, request: TrialRequest) -> TrialRequest:
    """The same trial by its first rank alone, of the whole batch."""
    assert isinstance(request.program, Training)
    program = Slice(request.program, 0, network_of(bench, request.layout))
    return replace(request, program=program, batches=())


def require_ok(result: TrialResult) -> dict[str, float]:
    """The metrics that a trial has. Raises SystemExit, which says why, if it did not end well."""
    if result.status != "ok":
        raise SystemExit(f"{result.trial_id}: {result.layout.label}: {result.status}: {result.cause}")
    return {name: value for name, value in result.metrics.items() if value is not None}
