"""Searches on one Ray cluster of three nodes: they take turns, keep apart, and all come to their end."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import combinations, product
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import CliRunner

from service.cli import main
from service.home import Home
from service.record.results import Results, TrialRecord
from tests.conftest import STARTS, free_port
from tests.service.test_jobs import wait_until

Begin = Callable[..., subprocess.Popen[bytes]]
WATTUNE = [sys.executable, "-m", "service.cli"]
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
POLICY = {"slice_minutes": 0.5, "quota": {"gpu_hours": {"eve": 0, "default": 100}}}
SPEC: dict[str, Any] = {
    "model": "tiny-llama",
    "data": "synthetic",
    "sequence_length": 64,
    "global_batch_size": 8,
    "cluster": {"nodes": 3, "gpus_per_node": 1, "accelerator": "cpu", "cpus_per_worker": 1},
    "space": {
        "engine": ["megatron", "deepspeed"],
        "num_gpus": 1,
        "micro_batch_size": [1, 2, 4, 8],
        "recompute": ["none", "full"],
        "precision": "fp32",
    },
    "measurement": {"window_s": 4, "window_min_steps": 3, "warmup_max_s": 1, "deadline_s": 240},
    "budget": {"trials": 16},
    "finalists": {"count": 1, "repeats": 2, "window_s": 1},
    "sentinel_every": 0,
    "sampler": "exhaustive",
}


@pytest.fixture
def address(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray cluster of three nodes of one CPU each, with `POLICY`."""
    policy, temp = tmp_path / "policy.yaml", tempfile.mkdtemp(prefix="wattune-ray-")
    policy.write_text(yaml.safe_dump(POLICY))
    gcs = f"127.0.0.1:{free_port()}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_"))}
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", token := secrets.token_hex(16))
    environment |= {"WATTUNE_POLICY": str(policy), "RAY_worker_niceness": "0"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    ports = ["--min-worker-port=0", "--max-worker-port=0"]
    head = ["--head", f"--port={gcs.partition(':')[2]}", f"--temp-dir={temp}", "--include-dashboard=false"]
    head += [f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"]
    nodes: list[psutil.Popen] = []

    def up(*place: str) -> bool:
        """Start a node; whether it is up, for which Ray gives it 30 s, which may be too short on a busy machine."""
        log = tmp_path / f"node-{len(nodes)}.log"
        with log.open("w") as sink:
            command = [*RAY, *ports, *place]
            nodes.append(psutil.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT))
        wait_until(lambda: "Ray runtime started" in log.read_text() or nodes[-1].poll() is not None, 240)
        return nodes[-1].poll() is None

    try:
        for place in (head, [f"--address={gcs}"], [f"--address={gcs}"]):
            assert any(up(*place) for _ in range(STARTS))
        yield gcs
    finally:
        processes = [process for node in nodes for process in (node, *node.children(recursive=True))]
        for process in processes:
            if process.is_running():
                process.kill()
        psutil.wait_procs(processes, timeout=10)
        shutil.rmtree(temp, ignore_errors=True)


@pytest.fixture
def begin(address: str, tmp_path: Path) -> Iterator[Begin]:
    """`wattune run` of a search on the cluster, by a process of its own that does not outlive the test."""
    begun: list[subprocess.Popen[bytes]] = []

    def run(name: str, **changes: Any) -> subprocess.Popen[bytes]:
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(SPEC | {"name": name} | changes))
        command = [*WATTUNE, "run", str(tmp_path / f"{name}.yaml"), "--search-id", name]
        with (tmp_path / f"{name}.log").open("w") as log:
            environment = os.environ | {"RAY_ADDRESS": address}
            begun.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        return begun[-1]

    yield run
    for process in begun:
        process.kill()
        process.wait()


def spans(home: Home, trials: list[TrialRecord]) -> list[tuple[str, datetime, datetime, bool | None]]:
    """Of each trial its node, start, end, and whether it had others beside it."""
    found = []
    for trial in trials:
        result = Results(home.tracking_uri).result_of(trial)
        assert result is not None
        assert trial.started is not None
        assert trial.ended is not None
        (window,) = result.windows
        found.append((window.node_id, trial.started, trial.ended, trial.beside))
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_searches_share_a_cluster_fairly_and_apart(begin: Begin, address: str, home: Home, tmp_path: Path) -> None:
    running = {name: begin(name) for name in ("one", "two")}
    low = {"priority": -1, "budget": {"trials": 2}, "finalists": {"count": 0}}
    running["low"] = begin("low", **low)
    place = re.compile(r"^low +queued 1 of 1, about \d\d:\d\d UTC ", re.MULTILINE)
    wait_until(lambda: place.search(CliRunner().invoke(main, ["list"]).stdout), 400)

    eve = subprocess.run(
        [*WATTUNE, "run", str(tmp_path / "two.yaml"), "--search-id", "eves"],
        env=os.environ | {"RAY_ADDRESS": address, "WATTUNE_USER": "eve"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (eve.returncode, eve.stdout) == (2, "")
    assert eve.stderr == (
        "wattune: quota: user eve has used 0 of 0 GPU-hours, all that this cluster's WATTUNE_POLICY allows\n"
    )

    for name, process in running.items():
        assert process.wait(timeout=900) == 0, (tmp_path / f"{name}.log").read_text()
    records = {name: Results(home.tracking_uri).search(name) for name in running}
    assert {record.status for record in records.values()} == {"finished"}
    placed = {}
    for name, record in records.items():
        assert {trial.status for trial in record.trials} == {"ok"}
        explored = sum(trial.purpose == "search" for trial in record.trials)
        assert explored == {"low": 2}.get(name, 16)
        placed[name] = spans(home, list(record.trials))
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in running}
    assert "others wait: a gang is given back" in logs["one"] + logs["two"]
    assert "queued: 1 of 1" in logs["low"]

    for (_, here), (_, there) in combinations(placed.items(), 2):
        for (node, start, end, _), (other, begun, over, _) in product(here, there):
            assert node != other or over <= start or end <= begun, "one node, one search"
    assert {beside for trials in placed.values() for *_, beside in trials} == {False}

    del placed["low"]
    both = (
        max(min(s for _, s, _, _ in p) for p in placed.values()),
        min(max(e for _, _, e, _ in p) for p in placed.values()),
    )
    had = {
        name: sum(max(0.0, (min(end, both[1]) - max(start, both[0])).total_seconds()) for _, start, end, _ in trials)
        for name, trials in placed.items()
    }
    assert 0.25 < had["one"] / sum(had.values()) < 0.75, had
