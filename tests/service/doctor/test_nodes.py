"""A Ray cluster of two nodes on this machine, each with a fake driver of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import STARTS
from tests.telemetry.scenarios import ROOT, compile_nvml

CLUSTER = """
import json, sys, time
import ray
from ray.cluster_utils import Cluster
from service.client import Wattune

drivers = json.loads(sys.argv[1])
cluster = Cluster()
for settings in drivers:
    cluster.add_node(num_cpus=1, num_gpus=1, env_vars=settings, include_dashboard=False)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

@ray.remote(num_gpus=1)
class Gang:
    def up(self):
        return ray.get_runtime_context().get_node_id()

held = Gang.options(scheduling_strategy="DEFAULT").remote()
ray.get(held.up.remote())
examination = Wattune().doctor(cluster.address)
ray.get(held.up.remote())  # it was left alone
print(json.dumps(examination.to_dict()))
"""


@pytest.mark.slow
def test_every_node_of_a_cluster_is_examined_and_what_differs_is_told(tmp_path: Path) -> None:
    """One GPU is lent to somebody, the other has a driver and no CUDA behind it, so that its probe fails."""
    if not compile_nvml(tmp_path):
        pytest.skip("no C compiler to build the fake driver with")
    common = {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_BUSY": "0", "FAKE_MEMORY": "1", "FAKE_HEAT": "0"}
    common |= {"FAKE_UNCORRECTED": "0"}
    drivers = [common | {"FAKE_DRIVER": version} for version in ("580.159.04", "570.86.10")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(ROOT), "WATTUNE_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", CLUSTER, json.dumps(drivers)]
    for _ in range(STARTS):
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        if "failed to startup" not in ran.stderr:
            break
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer = json.loads(ran.stdout.splitlines()[-1])
    found = {(one["check"], one["verdict"]): one for one in answer["findings"]}
    assert len(answer["facts"]["nodes"]) == 2
    assert answer["facts"]["lost"] == {}
    assert "driver 5" in found["driver", "wrong"]["seen"]
    assert "Ray has lent it to others" in found["answers", "unknown"]["seen"]
    assert "matrix products failed" in found["products", "wrong"]["seen"]
    assert found["host clocks", "ok"]["seen"].endswith("s apart")
    assert found["object store", "ok"]["seen"].startswith("objects come at")
    names = [node["name"] for node in answer["facts"]["nodes"]]
    assert len(set(names)) == 2, "two nodes of one host have names of their own"
