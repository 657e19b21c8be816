"""Trials of which some fail, one after the other on one nursery, and what they leave behind.

A trial that fails is of a program of its own, which first sets one of torch's global hooks in the last rank's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from trainables import child
from trainables.data import SYNTHETIC
from trainables.measure import Procedure
from trainables.model import Block
from trainables.platforms.cpu import PLATFORM as CPU
from trainables.program import Place, Progress, RankReport, TrialRequest
from trainables.training import Training

MODEL = ModelShape("llama", 2, 64, 4, 2, 176, 512, 64)
SHARDED = Layout("megatron", 2, 8, micro_batch_size=2, precision="fp32", zero_stage=3)
PIPELINE = replace(SHARDED, zero_stage=0, pipeline_parallel_size=2)
PROCEDURE = Procedure(steady_steps=2, warmup_tolerance=0.5, warmup_max_s=0.2, window_s=0.2, window_min_steps=10)
TRAINING = Training(MODEL, SYNTHETIC, sequence_length=32, seed=0)
REQUEST = TrialRequest("good", SHARDED, TRAINING, PROCEDURE, deadline_s=60)

FAULTS = {"backward": SHARDED, "killed": PIPELINE, "forward": SHARDED, "optimizer": SHARDED}
STEPS_BEFORE = 3
"""Optimizer steps or passes through a block that go well before the fault."""


def no_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def arm(fault: str) -> None:
    """Make this process fail after a while, in the given place."""
    calls = 0

    def strike(action: Callable[[], None]) -> None:
        nonlocal calls
        calls += 1
        if calls > STEPS_BEFORE:
            action()

    def in_block(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if not isinstance(module, Block):
            return
        if fault == "forward":
            strike(no_memory)
        elif fault == "killed":
            strike(lambda: os.kill(os.getpid(), signal.SIGKILL))
        elif output.requires_grad:
            output.register_hook(lambda gradient: strike(no_memory))

    if fault == "optimizer":
        register_optimizer_step_pre_hook(lambda *arguments: strike(no_memory))
    else:
        register_module_forward_hook(in_block)


@dataclass(frozen=True)
class Faulty(Training):
    """A training whose last rank fails after a while, in the place that `fault` names."""

    fault: str = ""

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        if place.rank == 1:
            arm(self.fault)
        return super().run(request, place, on_progress)


def left_behind() -> dict[str, int]:
    """What this process and its fork server hold: files, connections, threads, children; MiB; and shared memory."""
    worker = psutil.Process()
    servers = [process for process in worker.children() if "forkserver" in " ".join(process.cmdline())]
    family = [worker, *servers]
    return {
        "trial processes": sum(len(server.children()) for server in servers),
        "files": sum(process.num_fds() for process in family),
        "connections": sum(len(process.net_connections()) for process in family),
        "threads": sum(process.num_threads() for process in family),
        "memory MiB": sum(process.memory_info().rss for process in family) >> 20,
        "shared memory": len({*map(str, Path("/dev/shm").iterdir())} - mapped_by_others(family)),
    }


def mapped_by_others(family: list[psutil.Process]) -> set[str]:
    """The shared memory of what else runs on this machine."""
    mapped: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process not in family:
                mapped.update(of.path for of in process.memory_maps() if of.path.startswith("/dev/shm/"))
    return mapped


def main(count: int) -> None:
    """Run a good trial, `count` of which every third fails, and a good one; print what was seen, as JSON."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nursery = child.Nursery(CPU, [*Training.preload([SHARDED]), __name__])

    def run(request: TrialRequest) -> list[child.Outcome]:
        failed, began = threading.Event(), time.monotonic()

        def one(rank: int) -> child.Outcome:
            place = Place(rank, rank, "127.0.0.1", store.port, CPU)
            with nursery.trial(request, place, lambda: time.monotonic() - began, failed.is_set) as outcome:
                if outcome.status != "ok":
                    failed.set()
                return outcome

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))

    def good(name: str) -> float:
        """Median step time of a trial that must end well, in seconds."""
        outcomes = run(replace(REQUEST, trial_id=name))
        assert [(outcome.status, outcome.cause) for outcome in outcomes] == [("ok", None)] * 2, outcomes
        assert outcomes[0].report is not None
        return statistics.median(outcomes[0].report.timings[REQUEST.layout.global_batch_size].window_steps_s)

    at_first, seen = good("good at first"), []
    before = left_behind()
    for number in range(count):
        if number % 3 != 2:
            good(f"good {number}")
            continue
        fault = list(FAULTS)[number // 3 % len(FAULTS)]
        outcomes = run(
            replace(
                REQUEST,
                trial_id=f"{fault} {number}",
                layout=FAULTS[fault],
                program=Faulty(**vars(TRAINING), fault=fault),
            )
        )
        seen.append([fault, *[outcome.status for outcome in outcomes], outcomes[1].cause])
    at_last = good("good at last")
    for again in range(10):  # for what else runs here may slow steps down, and have shared memory of its own
        if at_last < 2 * at_first and left_behind()["shared memory"] <= before["shared memory"]:
            break
        at_last = min(at_last, good(f"good at last {again}"))
    print(json.dumps({"failed": seen, "step_s": [at_first, at_last], "left": [before, left_behind()]}))
