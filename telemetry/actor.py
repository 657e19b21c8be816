"""Telemetry of a Ray cluster: one actor a node, each with its own polling thread."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from telemetry import live, spool
from telemetry.devices import Device, DeviceInfo, discover
from telemetry.export import MetricsExporter
from telemetry.power import PowerLimits
from telemetry.sampler import Sampler
from telemetry.samples import SampleBuffer, SealedBatch, to_table
from telemetry.windows.trial import MARGIN_AFTER_NS, MARGIN_BEFORE_NS, WindowSummary, summarise

logger = logging.getLogger(__name__)

PERIOD_S = 0.1
KEPT_S = 10 * 60
SPOOL_PERIOD_S = 1.0
STOP_S = 5.0
EXPORT_PERIOD_S = 5.0
COVER_PERIOD_S = 1.0
JOINED_S = 60.0
NAMESPACE = "wattune-telemetry"
"""Where the actors are named: `NAME:NODE_ID`, with the name that `start_telemetry` was given."""

# An energy counter refreshed every 100 ms and polled every 100 ms shows a tick after an edge within 200 ms of it.
_SETTLE_NS = 200_000_000
_SETTLE_TIMEOUT_S = 0.5

# Eight GPUs, of which a tick of 100 ms reads one in full, and as much again.
_FULL_TIMEOUT_S = 1.6

_BATCHES_PER_PULL = 64

_NO_LIMITS = "power limits are not to be set: no --allow-power-limits was given"

WORK_S = 5.0
"""How long a `Work` holds."""


@dataclass(frozen=True)
class Work:
    """What a device is used for, as the trial's worker says from the trial's start about once a second; forgotten
    `WORK_S` later.

    `device` is the worker's, by its `DeviceInfo.uuid`; `phase` is a word such as `warmup` or `window`; `tokens_per_s`
    is the whole trial's speed, None while it has none.
    """

    device: str
    trial_id: str
    layout: str
    phase: str
    tokens_per_s: float | None


@dataclass(frozen=True)
class NodeState:
    """A node now: its devices, their latest samples, what throttles them (by uuid) and the work under way."""

    node_id: str
    hostname: str
    devices: tuple[DeviceInfo, ...]
    latest: dict[str, dict[str, Any]]
    throttled_by: dict[str, tuple[str, ...]]
    works: tuple[Work, ...]


@dataclass(frozen=True)
class Pulled:
    """A piece of a node's samples.

    `messages` are batches as Arrow IPC messages, in order of time, the first of which may begin before what was asked
    for; `cursor_ns` is what to ask for next, `more` whether there is more already. `missing_ns`: between these times
    samples may have been taken that are held no more.
    """

    messages: list[pa.Buffer]
    cursor_ns: int
    more: bool
    missing_ns: tuple[int, int] | None


class Telemetry:
    """Watches the devices of one node from its creation on; `start_telemetry` makes it a Ray actor on each node.

    The latest `kept_s` seconds are in memory. With a `spool_root`, a folder on this node's own disk, all samples are
    written there every `SPOOL_PERIOD_S` under `recording`, and what was there under this name before is answered too.
    `devices` are by default all that this node has. With `export`, their metrics are Ray's to show (an actor only).
    With `power_limits` it may set these, else it refuses to.
    """

    def __init__(
        self,
        node_id: str,
        recording: str,
        spool_root: Path | None = None,
        devices: Sequence[Device] | None = None,
        kept_s: float = KEPT_S,
        export: bool = False,
        power_limits: bool = False,
    ) -> None:
        self._node_id = node_id
        # Under Ray the parent is the raylet, ancestor of all the node's workers.
        self._devices = discover(process_root=os.getppid()) if devices is None else devices
        self._limits = PowerLimits(self._devices) if power_limits else None
        self._buffer = SampleBuffer(round(kept_s / PERIOD_S) * len(self._devices))
        self._working = threading.Lock()
        self._works: dict[tuple[str, str], tuple[float, Work]] = {}
        self._spool = None if spool_root is None else spool.Spool(spool_root, recording)
        self._exporter = MetricsExporter(node_id, [device.info for device in self._devices]) if export else None
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="telemetry-keeper", daemon=True)
        self._sampler = Sampler(self._devices, self._buffer, node_id, PERIOD_S)
        self._sampler.start()
        self._keeper.start()

    def stop(self) -> None:
        """End the threads, with all samples written and power limits as they were."""
        if self._limits is not None:
            self._limits.close()
        self._sampler.stop()
        self._stopping.set()
        self._keeper.join()

    def describe(self) -> dict[str, Any]:
        """`node_id`, `hostname` and `devices`: a dict of each device's `DeviceInfo`."""
        return {
            "node_id": self._node_id,
            "hostname": socket.gethostname(),
            "devices": [asdict(device.info) for device in self._devices],
        }

    def check_power(self, limits: Sequence[float]) -> str | None:
        """Why one of these power limits is none that the node's devices take, in a line; None if all are."""
        if self._limits is None:
            return _NO_LIMITS
        try:
            self._limits.check(limits)
        except OSError as error:
            return str(error)
        return None

    def limit_power(self, index: int, watts: float) -> str | None:
        """Set the power limit of the device with this number; why it cannot be, in a line, else None."""
        if self._limits is None:
            return _NO_LIMITS
        try:
            self._limits.set(index, watts)
        except OSError as error:
            return str(error)
        return None

    def holds_power(self, index: int, watts: float) -> bool:
        """Whether the device has the power limit that `limit_power` gave it."""
        return self._limits is not None and self._limits.holds(index, watts)

    def restore_power(self, index: int) -> None:
        """Put back the power limit that the device had, if `limit_power` changed it."""
        if self._limits is None:
            return
        try:
            self._limits.restore(index)
        except OSError as error:
            logger.error("the power limit of device %d is not restored: %s", index, error)

    def mark(self) -> None:
        """An edge of a window is now: have all counters read soon."""
        self._sampler.mark()

    def window(self, start_ns: int, end_ns: int, devices: Sequence[str]) -> WindowSummary:
        """The summary of a window that has ended, once all counters were read past its end; within about two seconds.

        The edges are this node's `time.monotonic_ns()`.
        """
        self._buffer.wait_for(end_ns + _SETTLE_NS, _SETTLE_TIMEOUT_S)
        self._await_full_reading(devices, end_ns)
        table = self._between(start_ns - MARGIN_BEFORE_NS, end_ns + MARGIN_AFTER_NS)
        infos = {device.info.uuid: device.info for device in self._devices}
        return summarise(table, start_ns, end_ns, devices, infos)

    def samples(self, start_ns: int, end_ns: int, devices: Sequence[str]) -> pa.Table:
        """The raw samples of some devices from `start_ns` to `end_ns`."""
        return self._between(start_ns, end_ns).filter(pc.field("device").isin(list(devices)))

    def pull(self, after_ns: int | None) -> Pulled:
        """The samples later than `after_ns`, at most about a minute of them; None asks for those from now on.

        The latest second of them may come with the next call: batches are made for disk, memory and all clients alike.
        """
        if after_ns is None:
            return Pulled([], self._buffer.latest_sealed_ns or 0, False, None)
        piece: list[SealedBatch] = []
        for batch in self._after(after_ns):
            if piece and (len(piece) == _BATCHES_PER_PULL or batch.follows_ns != piece[-1].last_ns):
                break
            piece.append(batch)
        else:
            batch = None
        if not piece:
            return Pulled([], after_ns, False, None)
        whole = after_ns == 0 or piece[0].continues(after_ns)
        return Pulled(
            messages=[batch.message for batch in piece],
            cursor_ns=piece[-1].last_ns,
            more=batch is not None,
            missing_ns=None if whole else (after_ns, piece[0].first_ns),
        )

    def working(self, work: Work) -> None:
        """Note what a device is being used for."""
        now = time.monotonic()
        with self._working:
            self._works = {key: noted for key, noted in self._works.items() if now - noted[0] < WORK_S}
            self._works[work.device, work.trial_id] = (now, work)

    def state(self) -> NodeState:
        """The node as it is now."""
        recent, now = self._recent(), time.monotonic()
        return NodeState(
            node_id=self._node_id,
            hostname=socket.gethostname(),
            devices=tuple(device.info for device in self._devices),
            latest=live.latest(recent),
            throttled_by=live.throttled_by(recent),
            works=tuple(work for noted_s, work in self._works.values() if now - noted_s < WORK_S),
        )

    def _await_full_reading(self, devices: Sequence[str], since_ns: int) -> None:
        self._sampler.mark(since_ns)
        deadline = time.monotonic() + _FULL_TIMEOUT_S
        while not self._sampler.was_full(devices, since_ns) and time.monotonic() < deadline:
            time.sleep(PERIOD_S / 4)
        self._buffer.wait_for(time.monotonic_ns(), _SETTLE_TIMEOUT_S)  # the tick of the last of them is over

    def _after(self, time_ns: int) -> Iterator[SealedBatch]:
        """The batches with samples later than `time_ns`, in order: from disk those that memory holds no more."""
        latest_ns = self._buffer.latest_sealed_ns
        if latest_ns is not None and latest_ns <= time_ns:
            return
        recent = self._buffer.after(time_ns)
        if self._spool is not None and not (recent and recent[0].continues(time_ns)):
            yield from spool.after(self._spool.folder, time_ns, recent[0].first_ns - 1 if recent else spool.END_NS)
        yield from recent

    def _between(self, start_ns: int, end_ns: int) -> pa.Table:
        self._buffer.seal()
        batches = takewhile(lambda sealed: sealed.first_ns <= end_ns, self._after(start_ns - 1))
        return to_table((sealed.batch for sealed in batches), start_ns, end_ns)

    def _keep(self) -> None:
        """Every `SPOOL_PERIOD_S` seal and spool what was sampled; every `EXPORT_PERIOD_S` show it as metrics."""
        written_ns, exported, stopping = 0, time.monotonic(), False
        writer = self._spool
        while not stopping:
            stopping = self._stopping.wait(SPOOL_PERIOD_S)
            self._buffer.seal()
            batches = self._buffer.after(written_ns)
            if batches:
                written_ns = batches[-1].last_ns
            if writer is not None:
                try:
                    writer.write(batches)
                except Exception as error:  # whatever it is, what is measured is still in memory
                    logger.error("telemetry is no longer written to %s: %s", writer.folder, error)
                    writer = None
            if self._exporter is not None and time.monotonic() - exported >= EXPORT_PERIOD_S:
                self._exporter.publish(live.latest(self._recent()))
                exported = time.monotonic()

    def _recent(self) -> pa.Table:
        now_ns = time.monotonic_ns()
        return self._buffer.between(now_ns - live.HISTORY_NS, now_ns)


class Fleet(dict[str, ActorHandle[Telemetry]]):
    """The `Telemetry` actors of `name`, by node id. A node that joins the cluster later has one within seconds.

    `start_telemetry` makes it, and its process owns the actors. In another process, to which it can be sent, it holds
    those that there were then and looks the others up: `RayActorError` for a node that has none. `power_limits`:
    whether the actors may set these.
    """

    def __init__(
        self, name: str, actors: Mapping[str, ActorHandle[Telemetry]] | None = None, power_limits: bool = False
    ) -> None:
        super().__init__(actors or {})
        self.name, self.power_limits = name, power_limits
        self.stopping = threading.Event()
        self.keeper: threading.Thread | None = None

    def __missing__(self, node_id: str) -> ActorHandle[Telemetry]:
        try:
            return ray.get_actor(f"{self.name}:{node_id}", namespace=NAMESPACE)
        except ValueError:
            raise RayActorError(error_msg=f"node {node_id} has no telemetry") from None

    def __reduce__(self) -> tuple[type[Fleet], tuple[str, dict[str, ActorHandle[Telemetry]], bool]]:
        return Fleet, (self.name, dict(self), self.power_limits)

    def awaited(self, node_id: str) -> ActorHandle[Telemetry]:
        """The node's actor once it watches; `RayActorError` if there is none within `JOINED_S`, or it died."""
        deadline = time.monotonic() + JOINED_S
        while True:
            try:
                actor = self[node_id]
                break
            except RayActorError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PERIOD_S)
        handle: Any = actor  # Ray's type has none of the actor's methods
        ray.get(handle.describe.remote())
        return actor

    def cover(self, spool_root: Path | None) -> None:
        """Start what is missing on the nodes that are alive."""
        nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
        missing = [node["NodeID"] for node in nodes() if node["Alive"] and node["NodeID"] not in self]
        if not missing:
            return
        actor: Any = ray.remote(Telemetry)  # of which Ray never lets go
        for node_id in missing:
            self[node_id] = actor.options(
                name=f"{self.name}:{node_id}",
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=3,
                max_concurrency=16,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            ).remote(node_id, f"{self.name}-{node_id}", spool_root, export=True, power_limits=self.power_limits)

    def keep_covered(self, spool_root: Path | None) -> None:
        """Cover nodes that join, until stopped or Ray is shut down here."""
        while not self.stopping.wait(COVER_PERIOD_S) and ray.is_initialized():
            try:
                self.cover(spool_root)
            except Exception as error:  # whatever it is, the nodes there are have theirs
                logger.warning("nodes that joined may have no telemetry yet: %s", error)


def start_telemetry(name: str | None = None, spool_root: Path | None = None, power_limits: bool = False) -> Fleet:
    """Start a `Telemetry` actor on each node that is alive, and later on each that joins.

    `name`, by default a random one, has to be the cluster's only one of that name; other clients find the actors by
    `find_telemetry`. `spool_root` is a folder on each node's own disk. Does not wait for them; a call of `describe`
    returns once its actor watches. They end with the caller's job; one that dies before is started again, and calls
    under way are made again. `power_limits`: whether they may set power limits, which takes a person's word.
    """
    fleet = Fleet(name or uuid.uuid4().hex, power_limits=power_limits)
    fleet.cover(spool_root)
    fleet.keeper = threading.Thread(target=fleet.keep_covered, args=(spool_root,), name="telemetry-fleet", daemon=True)
    fleet.keeper.start()
    return fleet


def stop_telemetry(fleet: Fleet) -> None:
    """End the actors that `start_telemetry` started, with all samples written."""
    fleet.stopping.set()
    if fleet.keeper is not None:
        fleet.keeper.join(STOP_S)
    handles: list[Any] = list(fleet.values())
    stopping = [handle.stop.remote() for handle in handles]
    ray.wait(stopping, num_returns=len(stopping), timeout=STOP_S)
    for handle in handles:
        ray.kill(handle)


def find_telemetry() -> dict[tuple[str, str], ActorHandle[Telemetry]]:
    """All `Telemetry` actors of the cluster, by the name that `start_telemetry` was given and node id.

    Every search has its own: a node has as many as there are searches.
    """
    handles = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE:
            name, _, node_id = entry["name"].rpartition(":")
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                handles[name, node_id] = ray.get_actor(entry["name"], namespace=NAMESPACE)
    return handles
