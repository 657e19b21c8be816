"""Ray clusters of this machine, each of whose nodes has variables of its own, such as a fake driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import STARTS
from tests.telemetry.scenarios import ROOT

CLUSTER = """
import json, sys, time
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from service.client import Wattune
from service.doctor.examination import text

cluster = Cluster()
nodes = [cluster.add_node(num_cpus=1, include_dashboard=False, **options) for options in json.loads(sys.argv[1])]
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

@ray.remote(num_gpus=1)
class Gang:
    def up(self):
        return ray.get_runtime_context().get_node_id()

held = Gang.options(scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[0].node_id, soft=False)).remote()
ray.get(held.up.remote())
examination = Wattune().doctor(cluster.address)
ray.get(held.up.remote())  # it was left alone
ids = [node.node_id for node in nodes]
print(json.dumps(examination.to_dict() | {"lines": text(examination).splitlines(), "ids": ids}))
"""


@dataclass(frozen=True)
class Node:
    """A node with such variables, and so many GPUs to lend."""

    variables: dict[str, str]
    gpus: int = 1


def examined(folder: Path, nodes: Sequence[Node]) -> dict[str, Any]:
    """What the doctor says of a cluster of nodes, of which the first has its GPU lent to somebody: its JSON, with the
    `lines` that it prints and the nodes' `ids`, by which it names them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(ROOT), "WATTUNE_HOME": str(folder / "home")}
    environment["LD_PRELOAD"] = ""  # if there is none, Ray puts a library of its own in place of a node's
    options = [{"num_gpus": node.gpus, "env_vars": node.variables} for node in nodes]
    command = [sys.executable, "-c", CLUSTER, json.dumps(options)]
    for _ in range(STARTS):
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        if "failed to startup" not in ran.stderr:
            break
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def nvidia(folder: Path, version: str, **settings: object) -> dict[str, str]:
    """Variables of a node of one quiet GPU, whose driver is in a folder."""
    quiet: dict[str, object] = {"busy": 0, "memory": 1, "heat": 0, "uncorrected": 0}
    told = {f"FAKE_{name.upper()}": str(value) for name, value in (quiet | settings).items()}
    return {"LD_LIBRARY_PATH": str(folder), "FAKE_DRIVER": version} | told
