"""The windows of a trial: when each node's GPUs worked, which of the gang's did not, and what telemetry saw of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import ray
from ray.actor import ActorHandle

from service.remote import call
from service.result import NodeWindow
from telemetry.actor import Telemetry
from telemetry.devices import is_host
from telemetry.windows.trial import WindowSummary, combine
from trainables.mailbox import Member

Nodes = Mapping[str, ActorHandle[Telemetry]]
"""The telemetry of each node, by its id."""


@dataclass(frozen=True)
class Span:
    """Steps of a worker: its GPU, None on CPU, and the stamps in ns at their ends on its node's monotonic clock."""

    device: str | None
    start_ns: int
    end_ns: int


def node_windows(spans: Sequence[Span], members: Sequence[Member], telemetry: Nodes) -> tuple[NodeWindow, ...]:
    """The window on each node that took part, by the stamps of the node's first worker, with the GPUs that worked.

    `spans` and `members` are by worker. On a node without GPUs the device is the node's own.
    """
    by_node: dict[str, list[Span]] = {}
    for span, member in zip(spans, members, strict=False):
        by_node.setdefault(member.node_id, []).append(span)
    windows = []
    for node_id, here in by_node.items():
        devices = tuple(span.device for span in here if span.device is not None)
        if not devices:
            description = ray.get(call(telemetry[node_id], Telemetry.describe))
            devices = tuple(device["uuid"] for device in description["devices"])
        windows.append(NodeWindow(node_id, here[0].start_ns, here[0].end_ns, devices))
    return tuple(windows)


def idle_windows(
    windows: Sequence[NodeWindow], members: Sequence[Member], telemetry: Nodes
) -> tuple[NodeWindow, ...] | None:
    """`windows` with the GPUs of the gang that the trial left idle; none where all worked, or there is none.

    Which GPUs are those of idle workers is only known of a gang that has all GPUs of its nodes: None if it has not.
    Nodes without any rank of the trial are left out: nobody stamped the window there.
    """
    idle: list[NodeWindow] = []
    for window in windows:
        workers = sum(member.node_id == window.node_id for member in members)
        if workers <= len(window.devices):
            continue
        description = ray.get(call(telemetry[window.node_id], Telemetry.describe))
        gpus = [device["uuid"] for device in description["devices"] if not is_host(device["kind"])]
        if gpus and len(gpus) != workers:
            return None
        if left := tuple(gpu for gpu in gpus if gpu not in window.devices):
            idle.append(replace(window, devices=left))
    return tuple(idle)


def summaries(windows: Sequence[Sequence[NodeWindow]], telemetry: Nodes) -> list[WindowSummary]:
    """What telemetry saw in each of some windows, given by their nodes' parts."""
    asked = [
        [call(telemetry[part.node_id], Telemetry.window, part.start_ns, part.end_ns, part.devices) for part in window]
        for window in windows
    ]
    return [combine(ray.get(parts)) for parts in asked]
