"""The training function of a gang's Ray Train run: take a trial from the mailbox, run it in a child, hand it in.

Neither a worker nor Ray Train's controller, which both import this, imports torch: their children have it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ray
import ray.train
from ray.exceptions import RayError
from ray.train.backend import Backend, BackendConfig

from telemetry.actor import NodeState, Work
from telemetry.devices.cpu import cpu_uuid
from trainables.bounds import refusal
from trainables.child import Nursery, Outcome
from trainables.leftovers import Leftovers
from trainables.mailbox import Member, Order
from trainables.objects import fetch, is_uri
from trainables.platforms.base import Platform, platform_of
from trainables.power import PowerLimit
from trainables.program import Place, Progress, TrialRequest
from trainables.status import Status

BEAT_S = 5.0
"""How often a worker says that it is alive."""

TELEMETRY_S = 1.0
MEASURED = {"window", "waiting"}
"""Phases whose power is asked for."""

STAMPED = {"warmup", "window"}
"""Phases whose steps end at edges of what is measured."""

MARK_S = 0.5
"""How long after the last one counters are read again, in steps of which is told once they have long ended: half of
what a reading may be away from an edge (`telemetry.counters.MAX_GAP_NS`)."""


class OneByOne(Backend):
    """Has Ray Train start a worker anew that died, and leave the others alone: none of them needs the others.

    What their children need of each other, these make for themselves.
    """

    has_replica_groups = True


class GangConfig(BackendConfig):
    """Workers without a process group. They must not open CUDA contexts: their children own the GPUs."""

    @property
    def backend_cls(self) -> type[Backend]:
        return OneByOne


class Follower:
    """Passes one rank's progress on to the node's telemetry; the one that `marks`, the edges of `MEASURED`, too.

    A program of a user's may tell of a step's end long after it: by the hook when the next step has been given to the
    GPU, by a log at its next line. While a step is waited for, counters are read every `MARK_S`: where an edge is, is
    not known before it is past.

    `on_window` is given the progress with which a window begins.
    """

    def __init__(
        self, request: TrialRequest, telemetry: Any, device: str, marks: bool, on_window: Callable[[Progress], object]
    ) -> None:
        """`telemetry`: the handle of the node's actor; `device`: what that calls the worker's."""
        self.request, self.telemetry, self.device = request, telemetry, device
        self.marks, self.on_window = marks, on_window
        self.phase, self.sent_at, self.marked_at = "", 0.0, 0.0

    def follow(self, progress: Progress) -> None:
        if self.marks and self._edge(progress):
            self.telemetry.mark.remote()
            self.marked_at = time.monotonic()
        if progress.phase == "window" != self.phase:
            self.on_window(progress)
        if progress.phase != self.phase or time.monotonic() - self.sent_at >= TELEMETRY_S:
            self.telemetry.working.remote(self._work(progress))
            self.sent_at = time.monotonic()
        self.phase = progress.phase

    def _edge(self, progress: Progress) -> bool:
        """Whether something that is measured begins or ends now, or may have."""
        if progress.phase != self.phase:
            return bool(MEASURED & {progress.phase, self.phase})
        late = progress.awaits is not None and progress.phase in STAMPED
        return late and time.monotonic() - self.marked_at >= MARK_S

    def _work(self, progress: Progress) -> Work:
        return Work(
            device=self.device,
            trial_id=self.request.trial_id,
            layout=self.request.layout.label,
            phase=progress.phase,
            tokens_per_s=progress.tokens_per_s,
        )


def worker_loop(config: dict[str, Any]) -> None:
    """Serve trials until the mailbox is closed.

    `config`: `mailbox`, the actor's handle; `telemetry`, the cluster's `Fleet`; `accelerator`, an `Accelerator`;
    `preload`, what trials import; `data`, what they read, or None: no trial is to wait for a copy of what is on an
    object store; and `places`, those below which it has to lie whenever a trial begins, None without a bound. Raises
    `RayError` if one of these actors is lost: Ray Train then starts the worker anew.
    """
    mailbox = config["mailbox"]
    worker = ray.train.get_context().get_world_rank()
    host = ray.util.get_node_ip_address()
    runtime = ray.get_runtime_context()
    node_id = runtime.get_node_id()
    watching = config["telemetry"].awaited(node_id)
    sys.modules["__main__"].__file__ = None  # or each child would import the script of a Ray worker as its own
    platform = platform_of(config["accelerator"])
    if platform.ray_resource is not None:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compile_threads(platform, node_id)))
    devices = runtime.get_accelerator_ids().get(platform.ray_resource or "", [])
    device = devices[0] if devices else None
    uuid = own_uuid(watching, device)
    used_gib = partial(memory_gib, watching, None if device is None else uuid)
    leftovers = Leftovers(f"{mailbox._actor_id.hex()}/{worker}", used_gib)
    power = PowerLimit(watching, device, uuid, config["telemetry"].power_limits)
    nursery = Nursery(platform, config["preload"])
    store_port = nursery.keep_store(host)
    data, places = config["data"], config["places"]
    if data is not None and is_uri(data) and refusal(data, places) is None:
        with contextlib.suppress(OSError, ValueError):  # which trials tell in their causes
            fetch(data)
    member = Member(worker, node_id, host, store_port, uuid, device, os.getpid())
    ray.get(mailbox.join.remote(member))
    number = 0
    with beating(mailbox, worker):
        while (order := ray.get(mailbox.next.remote(worker, number))) is not None:
            number, began = order.number, time.monotonic()
            over = mailbox.aborted.remote(number)
            place = place_of(worker, order, platform)
            follower = Follower(
                order.request,
                watching,
                uuid,
                marks=place.local_rank == 0,
                on_window=lambda progress: mailbox.note.remote(worker, number, progress),  # noqa: B023
            )
            trial = nursery.trial(
                order.request,
                place,
                elapsed_s=lambda: time.monotonic() - began,  # noqa: B023
                aborted=lambda: bool(ray.wait([over], timeout=0)[0]),  # noqa: B023
                follow=follower.follow,
            )
            follower.follow(Progress())  # whatever becomes of its process, the trial has this device
            leftovers.begin()
            refused = refusal(data, places) or power.set(order.request.layout.power_limit_w)
            if refused is None:
                with trial as outcome:
                    ray.get(mailbox.hand_in.remote(worker, number, power.checked(outcome)))
            else:
                ray.get(mailbox.hand_in.remote(worker, number, Outcome(Status.CRASH, refused)))
            power.restore()
            ray.get(mailbox.leave.remote(worker, number, leftovers.end()))
    nursery.close()


@contextlib.contextmanager
def beating(mailbox: Any, worker: int) -> Iterator[None]:
    """Meanwhile a thread tells the mailbox every few seconds that this worker is alive."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            mailbox.beat.remote(worker)

    threading.Thread(target=beat, name="beat", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def compile_threads(platform: Platform, node_id: str) -> int:
    """How many processes may compile for one rank: of the node's cores its GPU's share, less one that launches kernels.

    With torch's own number, up to 32 for each rank, one trial that compiles slows the host of those beside it.
    """
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    gpus = max(1, int(node["Resources"].get(platform.ray_resource, 1)))
    return max(1, len(os.sched_getaffinity(0)) // gpus - 1)


def own_uuid(telemetry: Any, device: str | None) -> str:
    """What the node's telemetry calls a worker's device: the GPU that Ray calls `device`, the CPUs if that is None. A
    GPU that telemetry does not watch has Ray's name. `telemetry`: the handle of the node's actor."""
    if device is None:
        return cpu_uuid()
    state: NodeState = ray.get(telemetry.state.remote())
    return next((info.uuid for info in state.devices if info.is_called(device)), device)


def memory_gib(telemetry: Any, gpu: str | None) -> float | None:
    """What is in use of a GPU's memory, by its UUID, as the node's telemetry saw it last; None on CPU, and where nobody
    knows. `telemetry`: the handle of the node's actor."""
    if gpu is None:
        return None
    try:
        state: NodeState = ray.get(telemetry.state.remote())
    except RayError:
        return None
    used: float | None = state.latest.get(gpu, {}).get("memory_used_gib")
    return used


def place_of(worker: int, order: Order, platform: Platform) -> Place:
    """Where `worker` runs its rank of a trial: beside those who take part on the same node, in the trial's order."""
    at = order.place(worker)
    me, first = order.members[at], order.members[0]
    here = [member for member in order.members if member.node_id == me.node_id]
    return Place(
        rank=order.request.ranks[at],
        local_rank=here.index(me),
        store_host=first.host,
        store_port=first.store_port,
        platform=platform,
        node=me.node_id,
        devices=tuple(member.device for member in here if member.device is not None),
    )
