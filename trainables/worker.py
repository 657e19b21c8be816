"""The training function of a gang's Ray Train run: take a trial from the mailbox, run it in a child, hand it in."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig
from torch.distributed import TCPStore

from trainables.child import Nursery
from trainables.mailbox import Member
from trainables.trial import Place


class GangTorchConfig(TorchConfig):
    """A gloo world for the workers themselves. They must not open CUDA contexts: their children own the GPUs."""

    @property
    def train_func_context(self) -> Any:
        return contextlib.nullcontext


def worker_loop(config: dict[str, Any]) -> None:
    """Serve trials until the mailbox is closed. `config`: `mailbox`, the actor's handle, and `use_gpu`."""
    mailbox = config["mailbox"]
    context = ray.train.get_context()
    worker = context.get_world_rank()
    host = ray.util.get_node_ip_address()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if worker == 0 else None
    sys.modules["__main__"].__file__ = None  # or each child would import the script of a Ray worker as its own
    nursery = Nursery(config["use_gpu"])
    member = Member(
        rank=worker,
        local_rank=context.get_local_rank(),
        node_id=ray.get_runtime_context().get_node_id(),
        host=host,
        store_port=store.port if store else None,
    )
    ray.get(mailbox.join.remote(_incarnation(), member))
    number = 0
    while (order := ray.get(mailbox.next.remote(worker, number))) is not None:
        number, began = order.number, time.monotonic()
        over = mailbox.aborted.remote(number)
        store_host, store_port = order.store
        rank = order.request.config.worker_rank(worker)
        place = Place(rank, member.local_rank, store_host, store_port, config["use_gpu"])
        trial = nursery.trial(
            order.request,
            place,
            elapsed_s=lambda: time.monotonic() - began,  # noqa: B023
            aborted=lambda: bool(ray.wait([over], timeout=0)[0]),  # noqa: B023
        )
        with trial as outcome:
            ray.get(mailbox.hand_in.remote(worker, number, outcome))


def _incarnation() -> str:
    """A name that the workers of one start of the gang share: rank 0's actor id, told to all by broadcast."""
    import torch.distributed as dist

    names: list[Any] = [ray.get_runtime_context().get_actor_id()]
    dist.broadcast_object_list(names, src=0, device=torch.device("cpu"))
    return names[0]
