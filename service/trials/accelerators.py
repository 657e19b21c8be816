"""Which nodes of a Ray cluster a search runs on, where their accelerators are of several types.

Ray finds out the type of a node's GPUs and announces it as a resource of the node, `accelerator_type:H100`, of which
there is 1. A worker that reserves a bit of it is on such a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from service.errors import InputError
from service.problem import Cluster
from trainables.platforms.base import platform_of

TYPES: dict[str, tuple[str, ...]] = {
    "h100": ("H100",),
    "h200": ("H200",),
    "a100": ("A100-80G", "A100"),
    "a100-40": ("A100-40G", "A100"),
    "b200": ("B200",),
    "mi300x": ("AMD-Instinct-MI300X-OAM", "AMD-Instinct-MI300X-HF"),
    "mi325x": ("AMD-Instinct-MI325X-OAM",),
    "mi250": ("AMD-Instinct-MI250X-MI250", "AMD-Instinct-MI250X"),
}
"""Ray's types (`ray.util.accelerators`) of what a spec calls an accelerator; the first that a cluster has is meant. By
itself Ray tells no A100 of 40 GB from one of 80 GB: whoever has both gives nodes the longer names as well."""

PREFIX = "accelerator_type:"
BIT = 0.001
"""What a worker reserves of it, as Ray's own option `accelerator_type` does."""


def resources_per_worker(cluster: Cluster) -> dict[str, float]:
    """What Ray reserves for one worker of a gang: where the cluster has the accelerator's type, also some of that."""
    resources = {"CPU": cluster.cpus_per_worker}
    device = platform_of(cluster.device).ray_resource
    if device is None:
        return resources
    announced = frozenset[str]().union(*_types()) if ray.is_initialized() else frozenset()
    found = [name for name in TYPES.get(cluster.accelerator, ()) if name in announced]
    return resources | {device: 1} | {PREFIX + name: BIT for name in found[:1]}


def check_type(cluster: Cluster) -> None:
    """Raise `InputError` where nodes have accelerators of several types, and which are meant cannot be told."""
    if platform_of(cluster.device).ray_resource is None or len(types := _types()) < 2:
        return
    announced = frozenset[str]().union(*types)
    if announced.isdisjoint(TYPES.get(cluster.accelerator, ())):
        raise InputError(
            f"cluster.accelerator: the Ray cluster has accelerators of several types, {', '.join(sorted(announced))}: "
            f"{cluster.accelerator!r} names none of them"
        )


def nodes(cluster: Cluster) -> frozenset[str]:
    """The nodes that workers may be on, by Ray's ids: those with accelerators of the type that they reserve some of."""
    types = [name for name in resources_per_worker(cluster) if name.startswith(PREFIX)]
    return frozenset(node["NodeID"] for node in _nodes() if all(name in node["Resources"] for name in types))


def at_hand(cluster: Cluster) -> dict[str, float]:
    """The resources of these nodes together, by Ray's names."""
    return _together(cluster, {node["NodeID"]: node["Resources"] for node in _nodes()})


def free(cluster: Cluster) -> dict[str, float]:
    """What of `at_hand` nobody has at present."""
    return _together(cluster, ray._private.state.available_resources_per_node())


def _together(cluster: Cluster, by_node: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for node in nodes(cluster):
        for name, amount in by_node.get(node, {}).items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _types() -> set[frozenset[str]]:
    """What nodes with GPUs announce as the type of these."""
    return {
        frozenset(name.removeprefix(PREFIX) for name in node["Resources"] if name.startswith(PREFIX))
        for node in _nodes()
        if node["Resources"].get("GPU")
    }


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]
