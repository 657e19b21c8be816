"""The head of a cluster that ends under a search."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from service.client import Wattune
from service.home import Home
from service.record.results import Results
from service.spec import dump_spec
from tests.service.test_jobs import Cluster, spec, wait_until

WATTUNE = [sys.executable, "-m", "service.cli"]


def joined(cluster: Cluster, home: Home, output: Path, *arguments: str) -> psutil.Popen:
    """`wattune` on a cluster."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))}
    environment |= {"RAY_ADDRESS": cluster.gcs, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster.token}
    with output.open("w") as sink:
        command = [*WATTUNE, *arguments]
        return psutil.Popen(
            command, env=environment | {"WATTUNE_HOME": str(home.path)}, stdout=sink, stderr=subprocess.STDOUT
        )


@pytest.mark.slow
def test_a_search_whose_head_ends_says_so_in_a_line_and_goes_on_with_another(home: Home, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(dump_spec(spec()))
    output = tmp_path / "output.txt"
    (tmp_path / "first").mkdir()
    cluster = Cluster(tmp_path / "first")
    try:
        wait_until(lambda: "Ray runtime started" in cluster.log.read_text(), 120)
        driver = joined(cluster, home, output, "run", str(tmp_path / "spec.yaml"), "--search-id", "headless")
        wait_until(lambda: "trial 1 of at most 3" in output.read_text() or driver.poll() is not None, 240)
    finally:
        cluster.close()
    assert driver.wait(60) == 3, output.read_text()
    (said,) = [line for line in output.read_text().splitlines() if line.startswith("wattune:")]
    assert said.endswith("resume the search once Ray is back")
    assert Wattune().status("headless").status == "interrupted"

    (tmp_path / "second").mkdir()
    cluster = Cluster(tmp_path / "second")
    try:
        wait_until(lambda: "Ray runtime started" in cluster.log.read_text(), 120)
        driver = joined(cluster, home, output, "resume", "headless")
        assert driver.wait(300) == 0, output.read_text()
    finally:
        cluster.close()
    record = Results(home.tracking_uri).search("headless")
    finished = [trial.label for trial in record.trials if trial.status == "ok"]
    assert (record.status, len(finished), len(set(finished))) == ("finished", 3, 3)
