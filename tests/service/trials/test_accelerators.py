"""A Ray cluster whose nodes announce accelerators of several types, which nobody computes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ray.util.accelerators import accelerators

from search_spaces.hardware import ACCELERATORS
from service.problem import Cluster
from service.trials.accelerators import TYPES, resources_per_worker
from tests.conftest import STARTS

MIXED = """
import json, sys
import ray
from pathlib import Path
from ray.cluster_utils import Cluster as Nodes
from service.cluster import check_cluster
from service.errors import InputError
from service.problem import Cluster
from service.trials.accelerators import nodes as of_type, resources_per_worker
from service.trials.gang import Gang, awaited, close_gangs, room
from telemetry.actor import start_telemetry, stop_telemetry

TYPES = json.loads(sys.argv[1])
nodes = Nodes()
nodes.add_node(num_cpus=0, num_gpus=0, include_dashboard=False)
for kind, gpus in TYPES:
    nodes.add_node(num_cpus=4, num_gpus=gpus, resources={f"accelerator_type:{kind}": 1})
nodes.wait_for_nodes()
ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")

def cluster(accelerator, gpus=2):
    return Cluster(gpus_per_node=gpus, accelerator=accelerator)

def refused(asked):
    try:
        check_cluster(asked)
    except InputError as error:
        return str(error)

told = {"types": {node["NodeID"]: name.partition(":")[2] for node in ray.nodes() for name in node["Resources"]
                  if name.startswith("accelerator_type:")}}
told["reserved"] = {name: resources_per_worker(cluster(name)) for name in ("h100", "mi250", "a100", "gpu", "cpu")}
told["nodes"] = {name: list(of_type(cluster(name))) for name in ("h100", "mi250", "cpu")}
told["room"] = {name: room(cluster(name)) for name in ("h100", "h200", "mi250", "cpu")}
told["refused"] = {f"{n} {k}": refused(cluster(k, n)) for n, k in
                   [(2, "h100"), (3, "h100"), (3, "h200"), (2, "a100"), (2, "gpu"), (2, "cpu")]}
telemetry = start_telemetry()
gang = Gang("pinned", 2, cluster("h200"), Path(sys.argv[2]), telemetry, ())
told["members"] = [member.node_id for member in ray.get(gang.mailbox.ready.remote([]), timeout=240)]
told["awaited"] = {name: awaited(cluster(name), 2) for name in ("h100", "h200")}
close_gangs([gang])
stop_telemetry(telemetry)
print(json.dumps(told))
"""
NODES = [["H100", 2], ["H200", 3], ["AMD-Instinct-MI250X", 2]]


def test_workers_reserve_a_gpu_only_where_there_are_gpus() -> None:
    assert resources_per_worker(Cluster(gpus_per_node=2, accelerator="cpu", cpus_per_worker=0.5)) == {"CPU": 0.5}
    h200 = Cluster(gpus_per_node=8, accelerator="h200", cpus_per_worker=2)
    assert resources_per_worker(h200).items() >= {"CPU": 2, "GPU": 1}.items()


def test_every_accelerator_that_a_spec_can_name_has_a_type_of_ray_s() -> None:
    assert set(TYPES) == set(ACCELERATORS) - {"gpu", "cpu"}
    known = {value for value in vars(accelerators).values() if isinstance(value, str)}
    assert {one for names in TYPES.values() for one in names} <= known


@pytest.mark.slow
def test_a_search_is_pinned_to_the_nodes_of_its_accelerator(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[3]), "WATTUNE_HOME": str(tmp_path / "home")}
    for _ in range(STARTS):
        with tempfile.TemporaryDirectory(prefix="wattune-ray-", ignore_cleanup_errors=True) as folder:
            ran = subprocess.run(
                [sys.executable, "-c", MIXED, json.dumps(NODES), str(tmp_path)],
                env=environment | {"RAY_TMPDIR": folder},
                capture_output=True,
                text=True,
                timeout=500,
            )
        if "failed to startup" not in ran.stderr:
            break
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout.splitlines()[-1])

    bit = {"CPU": 1.0, "GPU": 1}
    assert told["reserved"] == {
        "h100": bit | {"accelerator_type:H100": 0.001},
        "mi250": bit | {"accelerator_type:AMD-Instinct-MI250X": 0.001},
        "a100": bit,
        "gpu": bit,
        "cpu": {"CPU": 1.0},
    }
    assert [told["types"][node] for node in told["nodes"]["h100"]] == ["H100"]
    assert [told["types"][node] for node in told["nodes"]["mi250"]] == ["AMD-Instinct-MI250X"]
    assert len(told["nodes"]["cpu"]) == 4, "with the head, which has no GPU"
    assert told["room"] == {"h100": 2, "h200": 3, "mi250": 2, "cpu": 12}
    several = "the Ray cluster has accelerators of several types, AMD-Instinct-MI250X, H100, H200"
    assert told["refused"] == {
        "2 h100": None,
        "3 h100": "cluster: 1 x 3 h100 workers need 3 GPU, the Ray cluster has 2",
        "3 h200": None,
        "2 a100": f"cluster.accelerator: {several}: 'a100' names none of them",
        "2 gpu": f"cluster.accelerator: {several}: 'gpu' names none of them",
        "2 cpu": None,
    }
    assert [told["types"][node] for node in told["members"]] == ["H200", "H200"]
    assert told["awaited"] == {"h100": None, "h200": "2 GPUs: 1 of 3 free"}
