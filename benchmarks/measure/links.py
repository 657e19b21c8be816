"""How long a pipeline's step takes when all of a rank's messages go by one group, and by groups of their own.

    python -m benchmarks.measure.links [--ranks 4] [--virtual 2] [--microbatches M] [--pass-ms 40] [--steps 3]

Passes do nothing but last, backward ones twice as long as forward ones, so that what is seen is messages and what waits
for them: interleaved 1F1B as the `megatron` engine runs it, and 1F1B with as much work beside it. On GPUs the ranks are
processes that share those at hand, each taken by NCCL for a node of its own; without a GPU they talk by gloo, in whose
groups nothing waits in line. Prints the median seconds of a step beside what playing the schedule foretells.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from search_spaces.layout import Layout
from search_spaces.messages import Post, scripts
from search_spaces.playing import play
from search_spaces.schedules import Pass
from service.answers.tables import render
from trainables.engines.megatron.links import Links
from trainables.engines.megatron.pipeline import Pipeline
from trainables.platforms.cuda import SPIN_HZ

WIDTH, TRIED_S = 1024, 0.2
ONE_GROUP, LINKS = "one group", "links"
Last = Callable[[float], None]


class _Lasting(torch.autograd.Function):
    """The identity, which lasts so long."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, last: Last, seconds: float) -> Tensor:
        ctx.last, ctx.seconds = last, seconds
        last(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.last(2 * ctx.seconds)
        return gradient, None, None


class Stage(nn.Module):
    """Passes on what it is given, which takes `seconds` forward and twice as long backward."""

    def __init__(self, last: Last, seconds: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))
        self.last, self.seconds = last, seconds

    def forward(self, hidden: Tensor) -> Tensor:
        return _Lasting.apply(hidden * self.factor, self.last, self.seconds)


def layouts(ranks: int, virtual: int, microbatches: int) -> dict[str, Layout]:
    """By how messages go: the plain schedule, and the interleaved one in both ways."""
    plain = Layout("megatron", ranks, microbatches, pipeline_parallel_size=ranks)
    interleaved = Layout(
        "megatron",
        ranks,
        microbatches,
        pipeline_parallel_size=ranks,
        virtual_pipeline_stages=virtual,
        pipeline_schedule="interleaved_1f1b",
    )
    return {"1f1b": plain, ONE_GROUP: interleaved, LINKS: interleaved}


def foretold_s(name: str, layout: Layout, forward_s: float) -> float:
    """Of a step whose messages take no time; `forward_s` is that of a rank's whole share of the model."""
    steps = scripts(layout)
    if name == ONE_GROUP:
        steps = tuple(
            tuple(step._replace(line=()) if isinstance(step, Post) else step for step in script) for script in steps
        )
    one = forward_s / layout.virtual_pipeline_stages
    played = play(
        steps, lambda _, action: one if action.step is Pass.FORWARD else 2 * one, lambda sender, receiver: 0.0
    )
    return played.seconds


def _lasting_on(device: torch.device) -> tuple[Last, float]:
    """What has the device last so many seconds, and how many times as long that lasts in truth."""
    if device.type == "cpu":
        return time.sleep, 1.0

    def last(seconds: float) -> None:
        torch.cuda._sleep(round(seconds * SPIN_HZ))

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    last(TRIED_S)
    start.record()
    last(TRIED_S)
    end.record()
    end.synchronize()
    return last, start.elapsed_time(end) / 1e3 / TRIED_S


def _measure(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """One rank: the seconds of its steps, of each way."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
        # A communicator would not have two ranks on one GPU of one node.
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    dist.init_process_group(
        "nccl" if gpus else "gloo",
        store=dist.FileStore(f"{folder}/store", arguments.ranks),
        rank=rank,
        world_size=arguments.ranks,
        device_id=device if gpus else None,
    )
    forward_s = arguments.pass_ms / 1e3
    last, longer = _lasting_on(device)
    if rank == 0:
        Path(folder, "longer").write_text(str(longer))
    for name, layout in layouts(arguments.ranks, arguments.virtual, arguments.microbatches).items():
        one = forward_s / layout.virtual_pipeline_stages
        stages: dict[int, nn.Module] = {stage: Stage(last, one).to(device) for stage in layout.stages_of(rank)}
        world = dist.group.WORLD
        assert world is not None
        links = Links([range(arguments.ranks)], device) if name == LINKS else None
        hidden = torch.empty(1, WIDTH, device="meta", requires_grad=True)
        pipeline = Pipeline(layout, stages, world, links, nn.functional.mse_loss, hidden, device)
        batch = torch.ones(arguments.microbatches, WIDTH, device=device)
        taken = []
        for _ in range(arguments.steps + 1):
            dist.barrier()
            began = time.perf_counter()
            pipeline.step(batch, batch)
            if gpus:
                torch.cuda.synchronize()
            dist.barrier()
            taken.append(time.perf_counter() - began)
        if rank == 0:
            Path(folder, name.replace(" ", "-")).write_text(str(statistics.median(taken[1:])))
    dist.destroy_process_group()


def measured(arguments: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Seconds of a step, of each way, and those of a microbatch forward through all stages of a rank."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_measure, (arguments, folder), nprocs=arguments.ranks)
        names = layouts(arguments.ranks, arguments.virtual, arguments.microbatches)
        found = {name: float(Path(folder, name.replace(" ", "-")).read_text()) for name in names}
        return found, arguments.pass_ms / 1e3 * float(Path(folder, "longer").read_text())


def table(found: dict[str, float], forward_s: float, arguments: argparse.Namespace) -> str:
    """Each way beside what playing it foretells, and the work of a rank without any waiting."""
    shapes = layouts(arguments.ranks, arguments.virtual, arguments.microbatches)
    work = 3 * arguments.microbatches * forward_s
    rows = []
    for name, seconds in found.items():
        said = foretold_s(name, shapes[name], forward_s)
        ways = f"{shapes[name].pipeline_schedule}, {name}" if name in (ONE_GROUP, LINKS) else name
        rows.append([ways, f"{seconds:.3f}", f"{said:.3f}", f"{seconds / work:.2f}", f"{said / work:.2f}"])
    return render(["schedule", "s a step", "played", "of the work", "played"], rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--virtual", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--pass-ms", type=float, default=40.0)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args(argv)
    print(table(*measured(arguments), arguments))


if __name__ == "__main__":
    main()
