"""One rank of one trial, from an empty process to a report. Runs in a process that ends with the trial."""

from __future__ import annotations

import gc
import logging
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from trainables.batches import microbatches
from trainables.data import open_tokens
from trainables.engines.base import Job, StepOutput
from trainables.engines.build import build_engine
from trainables.measure import Protocol, Stretch, Timing, time_steps
from trainables.profiling import Profile, profile_step


@dataclass(frozen=True)
class TrialRequest:
    """All that a gang needs to know to run one trial. `data` is a source of `trainables.data.open_tokens`.

    `batches`: the global batch sizes to time, one after the other, each a divisor of the one before; the layout's own
    if there are none.
    """

    trial_id: str
    layout: Layout
    model: ModelShape
    data: str
    sequence_length: int
    protocol: Protocol
    deadline_s: float
    seed: int
    batches: tuple[int, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its rank, its device on the node, and the key-value store at which the ranks meet."""

    rank: int
    local_rank: int
    store_host: str
    store_port: int
    use_gpu: bool


@dataclass(frozen=True)
class RankReport:
    """What one rank measured.

    `coordinates` is the rank's place in the mesh by axis, `device` the GPU's UUID, None on CPU. `timings` are by global
    batch size in the order of time. Losses are those of the global batch; `profile` is that of one step after the first
    window, None if none was asked for.
    """

    rank: int
    coordinates: dict[str, int]
    device: str | None
    timings: dict[int, Timing]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    peak_memory_gib: float | None
    environment: dict[str, str]
    profile: Profile | None = None


@dataclass(frozen=True)
class Progress:
    """How far a rank is: its phase, its GPU's UUID (None on CPU and before it has one) and the trial's latest speed.

    `steady` are the latest steps that ended a warm-up by agreeing.
    """

    phase: str = "start"
    device: str | None = None
    tokens_per_s: float | None = None
    steady: Stretch | None = None


class WrongTraining(Exception):
    """The trial ran, but what it ran is not training: its loss is not finite or does not fall."""


def run_trial(request: TrialRequest, place: Place, tell: Callable[[Progress], None]) -> RankReport:
    """Train and time `request.config` as rank `place.rank`, and tell of each phase and step. Collective over the ranks.

    Raises `WrongTraining`, `torch.OutOfMemoryError` and whatever torch or DeepSpeed raise.
    """
    gc.freeze()  # the libraries: half a million objects, which a full collection would go through in some step
    _quieten()
    batches = request.batches or (request.layout.global_batch_size,)
    layout = replace(request.layout, global_batch_size=batches[0])
    progress = Progress()

    def on_phase(name: str) -> None:
        nonlocal progress
        progress = replace(progress, phase=name)
        tell(progress)

    def on_steady(steps: Stretch) -> None:
        nonlocal progress
        progress = replace(progress, steady=steps)

    on_phase("start")
    device, store = _join(request, place)
    progress = replace(progress, device=_device_uuid(device))
    on_phase("build")
    engine = build_engine(Job(layout, request.model, request.sequence_length, request.seed, place.rank, device))
    stream = open_tokens(request.data, request.model.vocab)
    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    synchronize = torch.cuda.synchronize if place.use_gpu else lambda: None
    began = time.monotonic_ns()

    def train() -> StepOutput:
        batch = microbatches(stream, layout, request.sequence_length, len(losses), engine.data_parallel_rank, device)
        return engine.step(batch)

    def slowest(seconds: float) -> float:
        longest = torch.tensor(seconds, device=device, dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return longest.item()

    def step() -> tuple[float, int]:
        nonlocal began, progress
        output = train()
        losses.append(output.loss.float())
        norms.append(output.grad_norm)
        synchronize()
        # The slowest rank's time is the step's. The exchange keeps the ranks in step, too.
        seconds = slowest((time.monotonic_ns() - began) / 1e9)
        began = time.monotonic_ns()
        progress = replace(progress, tokens_per_s=layout.global_batch_size * request.sequence_length / seconds)
        tell(progress)
        if len(losses) == 1:
            _settle()
            began = time.monotonic_ns()
        return seconds, began

    def meet() -> None:
        keys = [f"profiling/{rank}" for rank in range(layout.num_gpus)]
        store.set(keys[place.rank], "")
        store.wait(keys)

    timings: dict[int, Timing] = {}
    profile = None
    for batch in batches:
        if timings:
            layout = replace(layout, global_batch_size=batch)
            engine.set_global_batch_size(batch)
            began = time.monotonic_ns()
        timings[batch] = time_steps(step, request.protocol, layout.compile, on_phase, on_steady)
        on_phase("report")
        total = torch.stack(losses)
        dist.all_reduce(total)
        history = tuple(total.tolist())
        check_learning(history)
        if request.protocol.breakdown and profile is None:
            on_phase("breakdown")
            profile = profile_step(train, layout, place.use_gpu, meet, slowest)
    peak_memory_gib = torch.cuda.max_memory_reserved(device) / 2**30 if place.use_gpu else None
    report = RankReport(
        rank=place.rank,
        coordinates=layout.coordinates(place.rank),
        device=progress.device,
        timings=timings,
        losses=history,
        grad_norms=tuple(float(norm) for norm in norms),
        peak_memory_gib=peak_memory_gib,
        environment=_environment(device),
        profile=profile,
    )
    dist.barrier()
    return report


def check_learning(losses: tuple[float, ...]) -> None:
    """Raise `WrongTraining` unless all losses are finite and the last third lies below the first loss on average."""
    if not all(math.isfinite(loss) for loss in losses):
        raise WrongTraining(f"the loss is not finite: {losses[0]:.4g} at first, {losses[-1]:.4g} at last")
    tail = losses[-max(1, len(losses) // 3) :]
    if sum(tail) / len(tail) >= losses[0]:
        raise WrongTraining(f"the loss does not fall: {losses[0]:.4f} at first, {sum(tail) / len(tail):.4f} at last")


def _join(request: TrialRequest, place: Place) -> tuple[torch.device, dist.Store]:
    """Take the device and the place in the trial's own process group; the store is the trial's own, too."""
    size = request.layout.num_gpus
    # DeepSpeed reads its place from the environment.
    os.environ.update(RANK=str(place.rank), LOCAL_RANK=str(place.local_rank), WORLD_SIZE=str(size))
    device = torch.device("cuda", place.local_rank) if place.use_gpu else torch.device("cpu")
    if place.use_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    timeout = timedelta(seconds=2 * request.deadline_s)  # the deadline is kept from outside: a hang is not a crash
    shared = dist.TCPStore(place.store_host, place.store_port, is_master=False, timeout=timeout)
    store = dist.PrefixStore(request.trial_id, shared)
    dist.init_process_group(
        "nccl" if place.use_gpu else "gloo",
        store=store,
        rank=place.rank,
        world_size=size,
        timeout=timeout,
        device_id=device if place.use_gpu else None,
    )
    return device, store


def _device_uuid(device: torch.device) -> str | None:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def _environment(device: torch.device) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        found["gpu_name"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _settle() -> None:
    """Leave what was built and compiled so far out of Python's collections, which would halt one rank in some step."""
    gc.collect()
    gc.freeze()


def _quieten() -> None:
    """Keep the libraries' advice to their developers out of the logs; errors reach the report."""
    os.environ["KINETO_LOG_LEVEL"] = "99"
    warnings.filterwarnings("ignore", module="torch|deepspeed")
    for name in ("torch.distributed", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
