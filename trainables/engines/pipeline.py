"""Pipeline parallelism of the `megatron` engine: torch's schedules over the stages that a rank holds.

GPipe: Huang et al. 2019. 1F1B and interleaved 1F1B: Narayanan et al. 2021. Zero bubble, interleaved and V-shaped:
Qi et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from search_spaces.config import ONE_STAGE_SCHEDULES, TrialConfig

Loss = Callable[[Tensor, Tensor], Tensor]

_ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MANY_STAGES = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
}


class Pipeline:
    """One optimizer step's microbatches through the stages of all ranks of `group`."""

    def __init__(
        self, config: TrialConfig, stages: dict[int, nn.Module], group: ProcessGroup, loss: Loss, device: torch.device
    ) -> None:
        """`stages`: the rank's own, by their place in the model."""
        last = config.pipeline_stages - 1
        self.first, self.last = 0 in stages, last in stages
        parts: list[Any] = [PipelineStage(stage, i, last + 1, device, group=group) for i, stage in stages.items()]
        rounds = config.gradient_accumulation_steps
        self.schedule = (
            _ONE_STAGE[config.pipeline_schedule](parts[0], rounds, loss_fn=loss)
            if config.pipeline_schedule in ONE_STAGE_SCHEDULES
            else _MANY_STAGES[config.pipeline_schedule](parts, rounds, loss_fn=loss)
        )

    def step(self, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        """Forward and backward of all microbatches, of which both tensors are the concatenation along dimension 0.

        Returns the loss of each microbatch where the last stage is, else nothing. Gradients are their mean's.
        """
        losses: list[Tensor] = []
        self.schedule.step(
            *((inputs,) if self.first else ()),
            target=labels if self.last else None,
            losses=losses if self.last else None,
            return_outputs=False,
        )
        return [loss.detach() for loss in losses]


class TiedTable:
    """Two copies of a tied token table, on the first and the last stage, kept equal as Megatron-LM does."""

    def __init__(self, tables: Sequence[Tensor], group: ProcessGroup) -> None:
        """`tables`: the copy that this rank holds, or none."""
        self.table = tables[0] if tables else None
        self.group = group
        self.peer = group.size() - 1 - group.rank()

    def sum_gradients(self) -> None:
        """Give both copies the sum of their gradients, so that the same updates follow."""
        if self.table is None or self.table.grad is None:
            return
        gradient = self.table.grad
        mine = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        theirs = torch.empty_like(mine)
        peer = dist.get_global_rank(self.group, self.peer)
        exchange = [dist.P2POp(dist.isend, mine, peer, self.group), dist.P2POp(dist.irecv, theirs, peer, self.group)]
        for request in dist.batch_isend_irecv(exchange):
            request.wait()
        mine.add_(theirs)
