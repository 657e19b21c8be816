"""Two searches at once on one MLflow server, over SQLite and over PostgreSQL, which is away for a minute."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.home import Home
from service.record.results import Results
from tests.conftest import free_port
from tests.service.record.test_tracking import mlflow_server
from tests.service.test_jobs import wait_until

AWAY_S = 60.0
TRIALS = 24
"""Of each search: those that are left when the server goes take longer than it is away."""

SPEC: dict[str, Any] = {
    "model": "tiny-llama",
    "data": "synthetic",
    "sequence_length": 64,
    "global_batch_size": 8,
    "cluster": {"gpus_per_node": 1, "accelerator": "cpu", "cpus_per_worker": 1},
    "space": {
        "engine": ["megatron", "deepspeed"],
        "micro_batch_size": [1, 2, 4, 8],
        "recompute": ["none", "selective", "full"],
        "precision": "fp32",
    },
    "measurement": {"window_s": 4, "window_min_steps": 3, "warmup_max_s": 1, "deadline_s": 240},
    "budget": {"trials": TRIALS},
    "finalists": {"count": 0},
    "sentinel_every": 0,
    "sampler": "random",
}
OUTCOME = re.compile(r"^\[ *\d+:\d\d\] (?:ok|oom|crash|hang|invalid|pruned) ", re.MULTILINE)


@contextlib.contextmanager
def sqlite(home: Home) -> Iterator[str]:
    """A database in a file; its URI."""
    yield home.tracking_uri


@contextlib.contextmanager
def postgresql(home: Home) -> Iterator[str]:
    """A database of a PostgreSQL of its own, which listens at a socket in its folder alone; its URI."""
    if shutil.which("postgres") is None or shutil.which("initdb") is None:
        pytest.skip("there is no PostgreSQL on the PATH: initdb and postgres")
    user = "nobody" if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="wattune-postgres-"))  # a socket's path is to be short
    shutil.chown(folder, user or os.geteuid())
    data, options = folder / "data", dict[str, Any](user=user, cwd=folder)
    try:
        command = ["initdb", "--username=wattune", "--auth=trust", "--no-sync", f"--pgdata={data}"]
        subprocess.run(command, check=True, capture_output=True, **options)
        command = ["postgres", "-D", str(data), "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"]
        with (home.path / "postgres.log").open("w") as log:
            server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **options)
        try:
            wait_until(lambda: (folder / ".s.PGSQL.5432").exists() or server.poll() is not None, 60)
            yield f"postgresql+psycopg://wattune@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)  # at once, whoever is still connected
            server.wait(30)
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("database", [sqlite, postgresql])
def test_two_searches_lose_nothing_to_a_server_that_is_away_for_a_minute(
    database: Callable[[Home], contextlib.AbstractContextManager[str]], home: Home
) -> None:
    names, port = ("one", "two"), free_port()
    logs = {name: home.path / f"{name}.log" for name in names}
    drivers = []
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_"))}

    def ended(name: str) -> int:
        return len(OUTCOME.findall(logs[name].read_text()))

    with database(home) as backend, contextlib.ExitStack() as last:
        with mlflow_server(home, port, backend) as uri:
            for name in names:
                spec = home.path / f"{name}.yaml"
                spec.write_text(yaml.safe_dump(SPEC | {"name": name}))
                command = [sys.executable, "-m", "service.cli", "run", str(spec), "--search-id", name]
                with logs[name].open("w") as log:
                    drivers.append(
                        subprocess.Popen(
                            command,
                            env=environment | {"MLFLOW_TRACKING_URI": uri},
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )
                last.callback(drivers[-1].wait)
                last.callback(drivers[-1].terminate)
            wait_until(lambda: min(map(ended, names)) >= 2 or any(one.poll() is not None for one in drivers), 600)
        left = datetime.now(UTC)
        time.sleep(AWAY_S)
        back = datetime.now(UTC)
        assert [one.poll() for one in drivers] == [None, None], "they go on without it"
        with mlflow_server(home, port, backend) as uri:
            for name, driver in zip(names, drivers, strict=True):
                assert driver.wait(900) == 0, logs[name].read_text()
                record = Results(uri).search(name)
                assert record.status == "finished"
                assert [trial.status for trial in record.trials] == ["ok"] * TRIALS
                assert len({trial.layout for trial in record.trials}) == ended(name) == TRIALS
                assert any(trial.ended is not None and left < trial.ended < back for trial in record.trials)
                assert not list(home.spool(name).glob("unsent/*"))
                assert "is not recorded" not in logs[name].read_text()
