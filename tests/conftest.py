from __future__ import annotations

import gc
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest
import ray

# What tests start shares few cores: one thread a process, no pool of compilers, and code for the CPU that need not be
# fast. torch reads these when it is imported, here or in a child.
FRUGAL = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
os.environ.update(FRUGAL | os.environ)

# What fails, fails for everybody and each time, however slow the machine is.
hypothesis.settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("steady")

STARTS = 3
"""Times that Ray may fail to start: on a busy machine it may take longer than the 30 s that it gives itself."""

LOOKS_S, ANSWER_S = 0.5, 0.5
"""How often Ray Train's cleaners look for their controllers, and how long they wait to be told: a run's end waits for
both, 12 s by default, as the tests' Ray has no dashboard, which answers."""

SHARED = ("ray_session", "running_cluster", "nursery")
"""Fixtures that take seconds to set up: with `-n`, all tests that use one run on one worker."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What tests import, and the tests, stay: looking for garbage among them takes as long as importing them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other tests of a file run on one worker, too: they share layouts, and what was found of these."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            used, file = getattr(item, "fixturenames", ()), f"{item.path.parent.name}/{item.path.stem}"
            group = next((fixture for fixture in SHARED if fixture in used), file)
            item.add_marker(pytest.mark.xdist_group(group))


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    """The one Ray of all tests that need it, on this machine alone and apart from any other that may run here."""
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback  # takes seconds

    # A path below pytest's own directories would be too long for Ray's sockets.
    directory = tempfile.mkdtemp(prefix="wattune-tests-")
    for attempt in range(1, STARTS + 1):
        try:
            context = ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=directory,
                # Metrics every second, not every ten; and workers that stand back behind no other test.
                _system_config={"metrics_report_interval_ms": 1000, "worker_niceness": 0},
            )
            break
        except Exception:  # Ray raises plain ones
            if attempt == STARTS:
                raise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlacementGroupCleanerCallback.__init__, "__defaults__", (LOOKS_S, ANSWER_S, None))
        yield context
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)
