"""The training function of a gang's Ray Train run: take a trial from the mailbox, run it in a child, hand it in."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig
from torch.distributed import TCPStore

from telemetry.actor import Work
from telemetry.devices.cpu import cpu_uuid
from trainables.child import Nursery
from trainables.mailbox import Member
from trainables.platforms.base import platform_of
from trainables.program import Place, Progress, TrialRequest

TELEMETRY_S = 1.0
MEASURED = {"window", "waiting"}
"""Phases whose power is asked for."""


class GangTorchConfig(TorchConfig):
    """A gloo world for the workers themselves. They must not open CUDA contexts: their children own the GPUs."""

    @property
    def train_func_context(self) -> Any:
        return contextlib.nullcontext


class Follower:
    """Passes one rank's progress on to the node's telemetry; the one that `marks`, the edges of `MEASURED`, too.

    `on_window` is given the progress with which a window begins.
    """

    def __init__(
        self, request: TrialRequest, telemetry: Any, marks: bool, on_window: Callable[[Progress], object]
    ) -> None:
        """`telemetry`: the handle of the node's actor."""
        self.request, self.telemetry, self.marks, self.on_window = request, telemetry, marks, on_window
        self.phase, self.sent_at = "", 0.0

    def follow(self, progress: Progress) -> None:
        if self.marks and progress.phase != self.phase and MEASURED & {progress.phase, self.phase}:
            self.telemetry.mark.remote()
        if progress.phase == "window" != self.phase:
            self.on_window(progress)
        if progress.phase != self.phase or time.monotonic() - self.sent_at >= TELEMETRY_S:
            self.telemetry.working.remote(self._work(progress))
            self.sent_at = time.monotonic()
        self.phase = progress.phase

    def _work(self, progress: Progress) -> Work:
        return Work(
            device=progress.device or cpu_uuid(),
            trial_id=self.request.trial_id,
            layout=self.request.layout.label,
            phase=progress.phase,
            tokens_per_s=progress.tokens_per_s,
        )


def worker_loop(config: dict[str, Any]) -> None:
    """Serve trials until the mailbox is closed.

    `config`: `mailbox`, the actor's handle; `telemetry`, the cluster's `Fleet`; `accelerator`, an `Accelerator`; and
    `preload`, what trials import. Raises `RayError` if one of these actors is lost: Ray Train then starts the gang
    anew.
    """
    mailbox = config["mailbox"]
    context = ray.train.get_context()
    worker = context.get_world_rank()
    host = ray.util.get_node_ip_address()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if worker == 0 else None
    sys.modules["__main__"].__file__ = None  # or each child would import the script of a Ray worker as its own
    platform = platform_of(config["accelerator"])
    nursery = Nursery(platform, config["preload"])
    member = Member(
        rank=worker,
        local_rank=context.get_local_rank(),
        node_id=ray.get_runtime_context().get_node_id(),
        host=host,
        store_port=store.port if store else None,
    )
    watching = config["telemetry"].awaited(member.node_id)
    ray.get(mailbox.join.remote(_incarnation(), member))
    number = 0
    while (order := ray.get(mailbox.next.remote(worker, number))) is not None:
        number, began = order.number, time.monotonic()
        over = mailbox.aborted.remote(number)
        store_host, store_port = order.store
        place = Place(order.request.ranks[worker], member.local_rank, store_host, store_port, platform, member.node_id)
        follower = Follower(
            order.request,
            watching,
            marks=member.local_rank == 0,
            on_window=lambda progress: mailbox.note.remote(worker, number, progress),  # noqa: B023
        )
        trial = nursery.trial(
            order.request,
            place,
            elapsed_s=lambda: time.monotonic() - began,  # noqa: B023
            aborted=lambda: bool(ray.wait([over], timeout=0)[0]),  # noqa: B023
            follow=follower.follow,
        )
        with trial as outcome:
            ray.get(mailbox.hand_in.remote(worker, number, outcome))
    nursery.close()


def _incarnation() -> str:
    """A name that the workers of one start of the gang share: rank 0's actor id, sent to all by broadcast."""
    import torch.distributed as dist

    names: list[Any] = [ray.get_runtime_context().get_actor_id()]
    dist.broadcast_object_list(names, src=0, device=torch.device("cpu"))
    name: str = names[0]
    return name
