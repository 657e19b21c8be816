"""A trial that is cancelled while it runs: the search goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from service.client import Wattune
from service.home import Home
from tests.service.test_jobs import wait_until

WATTUNE = [sys.executable, "-m", "service.cli"]
SPEC = {
    "name": "cancelled",
    "model": "tiny-llama",
    "data": "synthetic",
    "sequence_length": 32,
    "global_batch_size": 8,
    "cluster": {"gpus_per_node": 1, "accelerator": "cpu", "cpus_per_worker": 0.5},
    "space": {"micro_batch_size": [1, 2], "precision": "fp32"},
    "measurement": {"window_s": 30, "window_min_steps": 3, "warmup_max_s": 1, "deadline_s": 400, "short_trials": False},
    "finalists": {"count": 0},
    "sentinel_every": 0,
    "sampler": "exhaustive",
}


@pytest.mark.slow
def test_a_cancelled_trial_is_recorded_as_that_and_the_next_one_runs(home: Home, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))}
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(
            [*WATTUNE, "run", str(tmp_path / "spec.yaml"), "--search-id", "s", "--json"],
            env=environment | {"WATTUNE_HOME": str(home.path), "WATTUNE_USER": "ada"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        said = (tmp_path / "log").read_text
        wait_until(lambda: "start" in said() or driver.poll() is not None, 240)
        wait_until(lambda: "running" in Wattune().status("s").trials, 120)
        cancelled = subprocess.run(
            [*WATTUNE, "cancel", "s", Wattune().trials("s")[0].trial_id],
            env=environment | {"WATTUNE_HOME": str(home.path), "WATTUNE_USER": "ada"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert cancelled.returncode == 0, cancelled.stderr
        printed, _ = driver.communicate(timeout=400)
    finally:
        driver.kill()
    assert driver.returncode == 0, said()
    first, second = Wattune().trials("s")
    assert (first.status, first.cause, first.metrics) == ("cancelled", "cancelled by ada", {})
    assert second.status == "ok"
    assert Wattune().status("s").status == "finished"
    assert second.trial_id in printed, "the front, as JSON"
    assert printed.startswith("{")
    assert "cancelled" in said()
