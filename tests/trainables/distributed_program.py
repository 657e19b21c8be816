"""A program of a user's that talks to its other ranks by torch.distributed, and perhaps in other ways too.

It knows nothing of Wattune but the hook.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
import wattune_steps
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--does", default="")
does = parser.parse_args().does
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

if does == "sockets":
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.accept()
if does == "its own store":
    dist.TCPStore(*master, is_master=False, timeout=timedelta(seconds=60))
if does != "alone":
    dist.init_process_group("mpi" if does == "mpi" else "gloo")
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "gloo")
if does == "waits":
    dist.distributed_c10d._get_default_store().get("of rank 1")
if does == "objects":
    pair = dist.new_group([0, 1])
    assert dist.get_backend(pair) == "gloo"
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank}, group=pair)
    assert gathered[rank] == {"rank": rank}
    sent = [rank]
    dist.broadcast_object_list(sent, src=0)
    assert sent == [0]
    dist.monitored_barrier()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    while not work.is_completed():
        pass
if does == "messages":
    mine, theirs = torch.ones(2), torch.zeros(2)
    for one in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, (rank + 1) % size), dist.P2POp(dist.irecv, theirs, (rank - 1) % size)]
    ):
        one.wait()
if does == "again":
    dist.destroy_process_group()
    dist.init_process_group("gloo")

torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
if does == "fsdp":
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
if does == "fsdp1":
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters())
if does.startswith("zero"):
    import deepspeed

    # It would be compiled first, and is for hosts alone.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    stage = {"stage": int(does[-1])}
    settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": stage, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    while True:
        data = torch.ones(4, 32)
        loss = nn.functional.mse_loss(engine(data), data)
        engine.backward(loss)
        engine.step()
        wattune_steps.step(loss=loss)
while True:
    data = torch.ones(4, 32)
    loss = nn.functional.mse_loss(model(data), data)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    wattune_steps.step(loss=loss)
