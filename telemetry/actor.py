"""Telemetry of a Ray cluster: one actor a node, each with its own polling thread."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from telemetry.devices import discover
from telemetry.sampler import Sampler
from telemetry.samples import SampleBuffer
from telemetry.window import MAX_GAP_NS, WindowSummary, summarise

PERIOD_S = 0.1
KEPT_S = 30 * 60
MIN_DEVICES = 8

# An energy counter refreshed every 100 ms and polled every 100 ms shows a tick after an edge within 200 ms of it.
_SETTLE_NS = 200_000_000
_SETTLE_TIMEOUT_S = 0.5


class Telemetry:
    """Watches the devices of one node from its creation on; `start_telemetry` makes it a Ray actor on each node."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._devices = discover(process_root=os.getppid())  # under Ray the raylet, ancestor of all the node's workers
        capacity = round(KEPT_S / PERIOD_S) * max(len(self._devices), MIN_DEVICES)
        self._buffer = SampleBuffer(capacity)
        Sampler(self._devices, self._buffer, node_id, PERIOD_S).start()

    def describe(self) -> dict[str, Any]:
        """`node_id`, `hostname` and `devices`: a dict of each device's `DeviceInfo`."""
        return {
            "node_id": self._node_id,
            "hostname": socket.gethostname(),
            "devices": [asdict(device.info) for device in self._devices],
        }

    def window(self, start_ns: int, end_ns: int, devices: Sequence[str]) -> WindowSummary:
        """The summary of a window that has just ended, after at most half a second's wait for the ticks past its end.

        The edges are this node's `time.monotonic_ns()`, at most the last half hour.
        """
        self._buffer.wait_for(end_ns + _SETTLE_NS, _SETTLE_TIMEOUT_S)
        margin_ns = 2 * MAX_GAP_NS
        return summarise(self._buffer.between(start_ns - margin_ns, end_ns + margin_ns), start_ns, end_ns, devices)

    def samples(self, start_ns: int, end_ns: int, devices: Sequence[str]) -> pa.Table:
        """The raw samples of some devices from `start_ns` to `end_ns`."""
        return self._buffer.between(start_ns, end_ns).filter(pc.field("device").isin(list(devices)))


def start_telemetry(node_ids: Sequence[str] | None = None) -> dict[str, ActorHandle]:
    """Start a `Telemetry` actor on each of the nodes (default: all alive ones) and return the handles by node id.

    Does not wait for them; a call of `describe` returns once its actor watches. They end with the caller's job.
    """
    if node_ids is None:
        node_ids = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    actor: Any = ray.remote(Telemetry)
    return {
        node_id: actor.options(
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
        ).remote(node_id)
        for node_id in node_ids
    }
