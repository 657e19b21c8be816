"""A few steps of training whose collectives are written down: by ranks of a real gang, or by one that is all alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo

from search_spaces.engines import engine_of
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.network import Collective
from trainables.batches import microbatches
from trainables.data import SYNTHETIC, open_tokens
from trainables.engines.base import Job
from trainables.engines.build import build_engine
from trainables.platforms.cpu import Cpu
from trainables.program import Place, Progress, RankProgram, RankReport, TrialRequest
from trainables.standin.group import Peers, StandIn
from trainables.standin.join import join
from trainables.standin.ledger import Call, Ledger
from trainables.standin.moves import Move
from trainables.training import Training
from trainables.world import GangWorld

STEPS = 3
CPU = torch.device("cpu")


def no_time(kind: Collective, size: int, ranks: tuple[int, ...], beside: bool) -> float:
    return 0.0


class Nothing:
    """A lane that carries nothing."""

    beside = False

    def carry(self, kind: Collective, moves: Sequence[Move], seconds: float, asynchronous: bool) -> dist.Work:
        return dist.Work()

    def pause(self, seconds: float) -> None:
        raise AssertionError("nothing waits for messages here")


class Recorded(StandIn):
    """A group of gloo that is called for the same, and enters it in a stand-in's ledger."""

    def __init__(self, options: Any, ledger: Ledger) -> None:
        ranks = options.global_ranks_in_group or range(options.group_size)
        peers = Peers(CPU, no_time, ledger)
        super().__init__(ranks, options.group_rank, options.group_id, peers, Nothing())
        gloo = ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
        self.real = ProcessGroup(options.store, options.group_rank, options.group_size)
        self.real._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.real._register_backend(CPU, ProcessGroup.BackendType.GLOO, gloo)


def recorded(form: str) -> Callable[..., dist.Work]:
    def call(group: Recorded, *arguments: Any, **named: Any) -> dist.Work:
        getattr(StandIn, form)(group, *arguments, **named)
        work: dist.Work = getattr(group.real, form)(*arguments, **named)
        return work

    return call


for form, function in vars(StandIn).items():
    if callable(function) and hasattr(ProcessGroup, form) and not form.startswith("__") and "coalescing" not in form:
        setattr(Recorded, form, recorded(form))


class RecordedCpu(Cpu):
    """Ranks on the host, whose collectives gloo does and a ledger keeps."""

    backend: ClassVar[str] = "recorded"


@dataclass(frozen=True)
class Written(RankProgram):
    """Trains `STEPS` steps, with `alone` as that rank under a stand-in for the others.

    Reports losses, norms of gradients, and, in `environment`, the calls of each step.
    """

    model: ModelShape
    sequence_length: int
    alone: int | None = None

    @staticmethod
    def preload(layouts: Iterable[Layout]) -> list[str]:
        return Training.preload(layouts)

    def ranks(self, layout: Layout) -> Sequence[int]:
        return super().ranks(layout) if self.alone is None else (self.alone,)

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        layout, rank = request.layout, place.rank
        ledger = self._together(request, place) if self.alone is None else self._alone(place, layout)
        alone = self.alone is not None
        engine = build_engine(Job(layout, self.model, self.sequence_length, 0, rank, CPU, alone=alone))
        stream = open_tokens(SYNTHETIC, self.model.vocab)
        outputs, calls = [], []
        for step in range(STEPS):
            ledger.clear()
            batch = microbatches(stream, layout, self.sequence_length, step, engine.data_parallel_rank, CPU)
            outputs.append(engine.step(batch))
            calls.append([astuple(call) for call in ledger])
        return RankReport(
            rank=rank,
            coordinates=layout.coordinates(rank),
            device=None,
            timings={},
            losses=tuple(float(output.loss) for output in outputs),
            grad_norms=tuple(float(output.grad_norm) for output in outputs),
            peak_memory_gib=None,
            environment={"calls": json.dumps(calls)},
        )

    def _alone(self, place: Place, layout: Layout) -> Ledger:
        os.environ.update(RANK=str(place.rank), LOCAL_RANK="0", WORLD_SIZE=str(layout.num_gpus))
        in_place = engine_of(layout).keeps_parameters(layout)
        return join(place.rank, layout.num_gpus, no_time, place.platform.take(0), in_place).ledger

    @staticmethod
    def _together(request: TrialRequest, place: Place) -> Ledger:
        ledger = Ledger()
        backend = RecordedCpu.backend
        dist.Backend.register_backend(
            backend, lambda options, _: Recorded(options, ledger), extended_api=True, devices=["cpu"]
        )
        GangWorld(request, replace(place, platform=RecordedCpu()))
        return ledger


def calls_of(report: RankReport) -> list[list[Call]]:
    """By step."""
    steps = json.loads(report.environment["calls"])
    return [[Call(Collective(kind), size, tuple(ranks)) for kind, size, ranks in step] for step in steps]
