"""The way into a world whose other ranks are not there."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trainables.standin.group import Peers, Seconds, StandIn
from trainables.standin.lane import lane_of
from trainables.standin.ledger import Ledger

BACKEND = "standin"


def join(rank: int, size: int, seconds: Seconds, device: torch.device, in_place: bool = False) -> Peers:
    """Make this process rank `rank` of `size` in torch.distributed, all alone, computing on `device`.

    Returns what all groups have in common. Collectives take `seconds`. With `in_place`, what is gathered in
    place keeps what was there of other ranks.
    """
    peers = Peers(device, seconds, Ledger(), in_place)
    register(peers)
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
    return peers


def register(peers: Peers) -> None:
    """Have torch make groups of the backend `BACKEND` in which this process is alone, with `peers` stood in for."""

    def group(options: Any, _: object) -> StandIn:
        """torch names no ranks for the whole world."""
        ranks = options.global_ranks_in_group or range(options.group_size)
        return StandIn(ranks, options.group_rank, options.group_id, peers, lane_of(peers.device))

    dist.Backend.register_backend(BACKEND, group, extended_api=True, devices=["cpu", "cuda"])


def tell_compiler() -> None:
    """Have torch's compiler know groups that are stood in for. Up to 2.11 at least it goes by a group's very class, and
    would end a graph at every collective."""
    from torch._dynamo.variables import distributed as compiled

    known = getattr(getattr(compiled, "ProcessGroupVariable", None), "is_process_group", None)
    if known is not None:
        compiled.ProcessGroupVariable.is_process_group = staticmethod(
            lambda value: isinstance(value, StandIn) or known(value)
        )
