"""All samples of a cluster, as they come, for any client of it.

A subscriber asks each node's `Telemetry` actor for what came after the last it got. The actors know nothing of their
subscribers: one that is slow, or dies, costs them nothing, and what it missed is on the nodes' disks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from telemetry.actor import Pulled, Telemetry
from telemetry.samples import SCHEMA

logger = logging.getLogger(__name__)

PERIOD_S = 1.0

_ROUNDS = 10
"""Nodes are asked in so many groups a period: all at once would be a burst, one by one a call of `ray.wait` each."""


@dataclass(frozen=True)
class Delivery:
    """Samples of one node by `telemetry.samples.SCHEMA`, in order of time and right after those delivered before.

    Unless `missing_ns` says between which times of the node's clock some may have been taken that are lost.
    `cursor_ns` is the time of the last.
    """

    node_id: str
    batch: pa.RecordBatch
    cursor_ns: int
    missing_ns: tuple[int, int] | None


def subscribe(
    actors: Mapping[str, ActorHandle[Telemetry]],
    cursors_ns: Mapping[str, int] | None = None,
    period_s: float = PERIOD_S,
) -> Iterator[Delivery]:
    """Deliver the samples of these nodes (actors by node id) until all are gone, each node's every `period_s` seconds.

    A node's samples are delivered from its cursor in `cursors_ns` on, that of the last delivery for example, or 0 for
    all that it holds; else from now on. While the caller works on one delivery, at most one answer a node waits.
    """
    handles: Mapping[str, Any] = actors  # Ray's type has none of the actor's methods
    cursors: dict[str, int | None] = {node_id: (cursors_ns or {}).get(node_id) for node_id in actors}
    now = time.monotonic()
    due = {node_id: now + period_s * (place % _ROUNDS) / _ROUNDS for place, node_id in enumerate(actors)}
    asked: dict[ray.ObjectRef[Any], str] = {}
    while due:
        for node_id in [node_id for node_id, at in due.items() if at <= now]:
            due[node_id] += period_s * max(1, math.ceil((now - due[node_id]) / period_s))
            if node_id not in asked.values():
                asked[handles[node_id].pull.remote(cursors[node_id])] = node_id
        wait_s = max(min(due.values()) - time.monotonic(), 0.0)
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=wait_s) if asked else ([], None)
        for reference in answered:
            node_id = asked.pop(reference)
            try:
                pulled: Pulled = ray.get(reference)
            except RayActorError as error:
                logger.warning("node %s sends no more telemetry: %s", node_id, str(error).splitlines()[0])
                del due[node_id]
                continue
            after_ns, cursors[node_id] = cursors[node_id], pulled.cursor_ns
            if pulled.more:
                due[node_id] = now
            yield from _deliveries(node_id, pulled, after_ns or 0)
        time.sleep(max(min(due.values(), default=0.0) - time.monotonic(), 0.0))
        now = time.monotonic()


def _deliveries(node_id: str, pulled: Pulled, after_ns: int) -> Iterator[Delivery]:
    missing_ns = pulled.missing_ns
    for message in pulled.messages:
        batch = pa.ipc.read_record_batch(message, SCHEMA)
        batch = batch.slice(int(np.searchsorted(batch["time_ns"].to_numpy(), after_ns, side="right")))
        yield Delivery(node_id, batch, batch["time_ns"][-1].as_py(), missing_ns)
        missing_ns = None
