from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import ray


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    """The one Ray of all tests that need it, on this machine alone and apart from any other that may run here."""
    # A path below pytest's own directories would be too long for Ray's sockets.
    directory = tempfile.mkdtemp(prefix="wattune-tests-")
    context = ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=directory,
        _system_config={"metrics_report_interval_ms": 1000},  # of 10 s by default
    )
    yield context
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)
