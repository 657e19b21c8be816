"""Trials whose ranks run as they do in a gang, each in a child of a nursery, but without Ray; a node's telemetry."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore

from search_spaces.engines import ENGINES
from search_spaces.layout import Layout
from trainables.child import Nursery, Outcome
from trainables.platforms.cpu import PLATFORM as CPU
from trainables.program import Place, TrialRequest
from trainables.training import Training

EVERYTHING = [Layout(engine, 1, 1, compile=True) for engine in ENGINES]
"""Layouts that need all that there is."""

RunRanks = Callable[[TrialRequest], list[Outcome]]


@pytest.fixture(scope="session")
def nursery() -> Nursery:
    return Nursery(CPU, Training.preload(EVERYTHING))


@pytest.fixture(scope="session")
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="session")
def run_ranks(nursery: Nursery, store: TCPStore) -> RunRanks:
    """Run a trial on as many workers as it asks for; the outcomes by worker. Its id must be new to the session."""

    def run(request: TrialRequest) -> list[Outcome]:
        failed, began = threading.Event(), time.monotonic()

        def rank_outcome(worker: int) -> Outcome:
            place = Place(request.ranks[worker], worker, "127.0.0.1", store.port, CPU)
            trial = nursery.trial(request, place, lambda: time.monotonic() - began, failed.is_set)
            with trial as outcome:
                if outcome.status != "ok":
                    failed.set()
                return outcome

        workers = len(request.ranks)
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(rank_outcome, range(workers)))

    return run


@pytest.fixture
def telemetry(request: pytest.FixtureRequest, ray_session: Any) -> Iterator[Any]:
    """The actor of a node's telemetry that the test's module calls `Watching`."""
    import ray  # which most of these tests do without

    actor: Any = ray.remote(request.module.Watching).options(num_cpus=0).remote()
    yield actor
    ray.get(actor.stop.remote())
    ray.kill(actor)
