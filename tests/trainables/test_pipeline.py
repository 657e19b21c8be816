"""Memory of a pipelined step: receive buffers of the microbatches in flight, however many microbatches a step has."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.multiprocessing.reductions import StorageWeakRef

from search_spaces.layout import ONE_STAGE_SCHEDULES, SCHEDULES, Layout
from trainables.engines.megatron.links import Links
from trainables.engines.megatron.pipeline import Pipeline

RANKS, WIDTH = 2, 8
FEW, MANY = 8, 24

Kind = Literal["fwd", "bwd"]
KINDS: tuple[Kind, ...] = ("fwd", "bwd")


class Buffers:
    """Receive buffers of all stages of this process: those that torch has for later, and what came and still lives."""

    def __init__(self) -> None:
        self.most: dict[Kind, int] = defaultdict(int)
        self._stages: dict[int, PipelineStage] = {}
        self._posted: dict[Kind, list[StorageWeakRef]] = defaultdict(list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count whenever a receive is posted."""
        for kind in KINDS:
            monkeypatch.setattr(PipelineStage, f"get_{kind}_recv_ops", self._counting(kind))

    def alive(self, kind: Kind) -> int:
        """How many there are now."""
        storages = {storage.cdata for storage in self._posted[kind] if not storage.expired()}
        return len(storages.union(*(self._kept(stage, kind) for stage in self._stages.values())))

    def _counting(self, kind: Kind) -> Any:
        post = getattr(PipelineStage, f"get_{kind}_recv_ops")

        def counted(stage: PipelineStage, chunk: int) -> list[dist.P2POp]:
            ops: list[dist.P2POp] = post(stage, chunk)
            self._stages[stage.stage_index] = stage
            self._posted[kind] += [StorageWeakRef(op.tensor.untyped_storage()) for op in ops]
            self.most[kind] = max(self.most[kind], self.alive(kind))
            return ops

        return counted

    @staticmethod
    def _kept(stage: PipelineStage, kind: Kind) -> Iterator[int]:
        for infos in (stage.args_recv_info if kind == "fwd" else stage.grad_recv_info).values():
            for buffer in (getattr(info, "buffer", None) for info in infos):
                if buffer is not None and not buffer.is_meta and buffer.untyped_storage().nbytes():
                    yield buffer.untyped_storage()._cdata


def count_buffers(rank: int, schedule: str, microbatches: int) -> dict[str, list[int]]:
    """By kind, the most receive buffers at once in two steps, and those after them."""
    layout = Layout("megatron", RANKS, microbatches, pipeline_parallel_size=RANKS, pipeline_schedule=schedule)
    if schedule not in ONE_STAGE_SCHEDULES:
        layout = replace(layout, virtual_pipeline_stages=2)
    stages: dict[int, nn.Module] = {index: nn.Linear(WIDTH, WIDTH) for index in layout.stages_of(rank)}
    group = dist.group.WORLD
    assert group is not None
    buffers = Buffers()
    with pytest.MonkeyPatch.context() as monkeypatch:
        buffers.watch(monkeypatch)
        hidden = torch.empty(1, WIDTH, device="meta", requires_grad=True)
        links = None if schedule in ONE_STAGE_SCHEDULES else Links([range(RANKS)], torch.device("cpu"))
        pipeline = Pipeline(layout, stages, group, links, nn.functional.mse_loss, hidden, torch.device("cpu"))
        for _ in range(2):
            pipeline.step(torch.randn(microbatches, WIDTH), torch.randn(microbatches, WIDTH))
    return {kind: [buffers.most[kind], buffers.alive(kind)] for kind in KINDS}


def run_rank(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    counts = {schedule: [count_buffers(rank, schedule, size) for size in (FEW, MANY)] for schedule in SCHEDULES}
    Path(folder, f"{rank}.json").write_text(json.dumps(counts))
    dist.destroy_process_group()


@pytest.mark.slow
def test_receive_buffers_are_of_microbatches_in_flight(tmp_path: Path) -> None:
    """GPipe has the activations of all in flight, but not the gradients."""
    torch.multiprocessing.start_processes(run_rank, (str(tmp_path),), nprocs=RANKS, start_method="forkserver")
    posted = 0
    for rank in range(RANKS):
        counts = json.loads((tmp_path / f"{rank}.json").read_text())
        for schedule, kind in itertools.product(SCHEDULES, KINDS):
            (few, few_after), (many, many_after) = (found[kind] for found in counts[schedule])
            case = f"{schedule}, {kind}, rank {rank}"
            assert few_after == many_after == 0, case
            if schedule == "gpipe" and kind == "fwd":
                assert (few, many) in [(FEW, MANY), (0, 0)], case
            else:
                assert few == many < FEW, case
            posted += many
    assert posted > 0
