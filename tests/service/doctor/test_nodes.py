"""Ray clusters of this machine, each of whose nodes has a fake driver of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import STARTS
from tests.telemetry.scenarios import ROOT, compile_amdsmi, compile_nvml, install_amdsmi

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


def examined(folder: Path, nodes: list[dict[str, str]]) -> dict[str, Any]:
    """The answer of the doctor for a cluster of nodes with such variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(ROOT), "WATTUNE_HOME": str(folder / "home")}
    command = [sys.executable, "-c", CLUSTER, json.dumps(nodes)]
    for _ in range(STARTS):
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        if "failed to startup" not in ran.stderr:
            break
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert answer["facts"]["lost"] == {}
    return answer


def nvidia(folder: Path, version: str) -> dict[str, str]:
    """A node of one quiet GPU, whose driver is in a folder."""
    quiet = {"FAKE_BUSY": "0", "FAKE_MEMORY": "1", "FAKE_HEAT": "0", "FAKE_UNCORRECTED": "0"}
    return {"LD_LIBRARY_PATH": str(folder), "FAKE_DRIVER": version} | quiet


@pytest.mark.slow
def test_every_node_of_a_cluster_is_examined_and_what_differs_is_told(tmp_path: Path) -> None:
    """One GPU is lent to somebody, the other has a driver and no CUDA behind it, so that its probe fails."""
    if not compile_nvml(tmp_path):
        pytest.skip("no C compiler to build the fake driver with")
    answer = examined(tmp_path, [nvidia(tmp_path, version) for version in ("580.159.04", "570.86.10")])
    found = {(one["check"], one["verdict"]): one for one in answer["findings"]}
    assert len(answer["facts"]["nodes"]) == 2
    assert "driver 5" in found["driver", "wrong"]["seen"]
    assert "Ray has lent it to others" in found["answers", "unknown"]["seen"]
    assert "matrix products failed" in found["products", "wrong"]["seen"]
    assert found["host clocks", "ok"]["seen"].endswith("s apart")
    assert found["object store", "ok"]["seen"].startswith("objects come at")
    names = [node["name"] for node in answer["facts"]["nodes"]]
    assert len(set(names)) == 2, "two nodes of one host have names of their own"


@pytest.mark.slow
def test_a_cluster_of_both_vendors_is_examined_and_its_drivers_need_not_be_alike(tmp_path: Path) -> None:
    binding, rocm = tmp_path / "amdsmi", tmp_path / "rocm"
    rocm.mkdir()
    if not compile_nvml(tmp_path):
        pytest.skip("no C compiler to build the fake driver with")
    if lack := install_amdsmi(binding) or compile_amdsmi(rocm, binding):
        pytest.skip(lack)
    amd = {"LD_LIBRARY_PATH": str(rocm), "PYTHONPATH": os.pathsep.join([str(ROOT), str(binding)])}
    answer = examined(tmp_path, [nvidia(tmp_path, "580.159.04"), amd | {"FAKE_MODEL": "mi300"}])
    kinds = [{device["info"]["kind"] for device in node["devices"]} for node in answer["facts"]["nodes"]]
    assert sorted(map(sorted, kinds)) == [["amd"], ["nvidia"]]
    (driver,) = (one for one in answer["findings"] if one["check"] == "driver")
    assert driver["verdict"] == "ok"
    assert "nvidia 580.159.04" in driver["seen"]
