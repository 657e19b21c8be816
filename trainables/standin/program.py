"""A program that knows nothing of it, alone in torch.distributed: what `trainables/alone` calls in its own process."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from search_spaces.network import Collective, Network
from trainables.standin.group import Peers
from trainables.standin.join import BACKEND, register, tell_compiler
from trainables.standin.ledger import Call, Ledger

SETTING = "WATTUNE_STANDIN"
"""The variable that names the file of the `Setting`."""

STORE_S = 10.0
"""How long the program may wait for what another rank was to write to torch.distributed's store."""


@dataclass(frozen=True)
class Setting:
    """Rank `rank` of `size`, which computes on `device`, as torch names it, and may reserve `usable_bytes` there, None
    for all. `network` tells how long collectives take. In the file `seen` are the process that has joined, and each
    kind of collective that it called for, a line each."""

    rank: int
    size: int
    device: str
    network: Network
    usable_bytes: float | None
    seen: str

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Setting:
        values = json.loads(path.read_text())
        return cls(**values | {"network": Network.from_dict(values["network"])})


class Kinds(Ledger):
    """Keeps no calls, but tells their kinds, as they come for the first time."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.kinds = path, set[Collective]()

    def append(self, call: Call) -> None:
        if call.kind not in self.kinds:
            self.kinds.add(call.kind)
            with self.path.open("a") as file:
                file.write(f"{call.kind}\n")


def join_alone(init_process_group: Callable[..., None], *arguments: Any, **named: Any) -> None:
    """`init_process_group` as the program calls it, but for the other ranks, which are stood in for."""
    setting = Setting.read(Path(os.environ[SETTING]))
    asked = inspect.signature(init_process_group).bind(*arguments, **named).arguments
    _check(asked, setting)
    _stand_in(setting)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=STORE_S))
    place = {"init_method": None, "store": store, "rank": setting.rank, "world_size": setting.size}
    init_process_group(**asked | place)


@cache
def _stand_in(setting: Setting) -> None:
    """Have torch make all groups of this process of ranks that are not there. Once, however often the program joins."""
    device = torch.device(setting.device)
    register(Peers(device, setting.network.seconds, Kinds(Path(setting.seen))))
    tell_compiler()
    c10d._new_process_group_helper = redirected(c10d._new_process_group_helper, BACKEND)
    if setting.usable_bytes is not None and device.type == "cuda":
        from trainables.platforms.cuda import PLATFORM

        PLATFORM.limit_memory(device, setting.usable_bytes)


def _check(asked: dict[str, Any], setting: Setting) -> None:
    """Raise `RuntimeError` for a world that cannot be stood in for, and take note of who joins."""
    if "mpi" in str(asked.get("backend")).lower():
        raise RuntimeError("the backend mpi starts its own ranks: a rank that runs alone takes nccl or gloo")
    for name, own in (("world_size", setting.size), ("rank", setting.rank)):
        if asked.get(name, -1) not in (-1, own):
            raise RuntimeError(f"init_process_group is called with {name} {asked[name]}, but {name.upper()} is {own}")
    seen, this = Path(setting.seen), f"{os.getpid()}\n"
    try:
        with seen.open("x") as file:
            file.write(this)
    except FileExistsError:
        if not seen.read_text().startswith(this):
            raise RuntimeError("two processes call init_process_group: a rank that runs alone is one of them") from None


def redirected(helper: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """torch's maker of process groups, which makes them all of one backend, under the names of those that were asked
    for."""

    def make(
        size: int, rank: int, ranks: list[int], asked: str, store: dist.Store, *rest: Any, **named: Any
    ) -> tuple[Any, Any]:
        if "device_id" in named:
            named["device_id"] = None  # or torch would have a communicator made ahead
        group, own_store = helper(size, rank, ranks, backend, store, *rest, **named)
        if group in c10d._world.pg_map:
            c10d._world.pg_map[group] = (asked, own_store)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(asked)))
        return group, own_store

    return make
