"""Pipeline parallelism of the `megatron` engine: torch's schedules over the stages that a rank holds.

GPipe: Huang et al. 2019. 1F1B and interleaved 1F1B: Narayanan et al. 2021. Zero bubble, interleaved and V-shaped:
Qi et al. 2023.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from search_spaces.layout import ONE_STAGE_SCHEDULES, Layout
from search_spaces.schedules import Action, Pass
from trainables.engines.megatron.links import Links
from trainables.passes import Moment, Observer

Loss = Callable[[Tensor, Tensor], Tensor]

_ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MANY_STAGES = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
}
_META = torch.device("meta")


class LeanStage(PipelineStage):
    """A stage that holds receive buffers of the microbatches in flight only.

    torch, 2.11 to 2.13 at least, allocates those of all microbatches of a step beforehand and keeps them. Here they are
    on the meta device but for the time from posting a receive to the end of the pass that takes it. What autograd
    needs of it later it keeps itself.

    On GPUs, streams need no more care than they do in torch: posting a receive makes its stream wait for the current
    one, on which the buffer's memory was used before, and the current stream waits for the receive before the pass.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        hidden: Tensor,
        group: ProcessGroup,
        links: Links | None,
        device: torch.device,
        observe: Observer | None,
    ) -> None:
        """Stage `index` of `stages`, between which go tensors like `hidden`, of one microbatch, by `links` if there are
        any, and else by `group`, which has the pipeline's ranks.

        `observe` is told of passes as they begin and are done, and that all are before gradients are reduced.
        """
        # Not told, stages would try their modules and tell each other, before the first step.
        super().__init__(module, index, stages, device, input_args=hidden, output_args=hidden, group=group)
        self.links, self.observe = links, observe

    def _validate_fwd_input(self, *_: Any) -> None:
        """torch before 2.12 would find that tokens are not like hidden states."""

    def _validate_fwd_outputs(self, *_: Any) -> None:
        """Nor are logits."""

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        metadata = super()._prepare_forward_infra(1, *args, **kwargs)
        self.args_recv_info = _without_buffers(self.args_recv_info[0], num_microbatches)
        return metadata

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        metadata = super()._prepare_backward_infra(1, *args, **kwargs)
        self.grad_recv_info = _without_buffers(self.grad_recv_info[0], num_microbatches)
        self.chunks = num_microbatches
        return metadata

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _put_buffers(self.args_recv_info[fwd_chunk_id], self.device, requires_grad=True)
        return self._linked(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _put_buffers(self.grad_recv_info[bwd_chunk_id], self.device)
        return self._linked(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        for op in ops:
            op.tensor = op.tensor.detach()  # as from torch 2.12 on: what is sent must not hold the stage's graph
        return self._linked(ops)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._linked(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._begin(Pass.FORWARD, fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._tell(Moment.DONE)
        _put_buffers(self.args_recv_info[fwd_chunk_id], _META)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._begin(Pass.BACKWARD if full_backward else Pass.INPUT, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._tell(Moment.DONE)
        _put_buffers(self.grad_recv_info[bwd_chunk_id], _META)
        if loss is not None:
            loss.detach_()  # the schedule keeps losses to the end of the step; their graphs hold what was received

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._begin(Pass.WEIGHT, bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._tell(Moment.DONE)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self._tell(Moment.PASSED)
        super().perform_reduce_grad(grad_scale_factor)

    def _linked(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if self.links is not None:
            for op in ops:
                ends = (self.group_rank, op.group_peer) if op.op is dist.isend else (op.group_peer, self.group_rank)
                op.group = self.links.group(*ends)
        return ops

    def _begin(self, step: Pass, microbatch: int) -> None:
        self._tell(Action(self.stage_index, step, microbatch))

    def _tell(self, what: Action | Moment) -> None:
        if self.observe is not None:
            self.observe(what)


def _put_buffers(infos: Iterable[Any], device: torch.device, requires_grad: bool = False) -> None:
    """Give what is received new, empty buffers there. Inputs of the whole model have none."""
    for info in infos:
        old = getattr(info, "buffer", None)
        if old is not None:
            info.buffer = torch.empty_like(old, device=device, requires_grad=requires_grad)


def _without_buffers(infos: Sequence[Any], microbatches: int) -> dict[int, tuple[Any, ...]]:
    """Copies of one microbatch's for each, none of which has memory yet."""
    _put_buffers(infos, _META)
    return {index: tuple(map(copy.copy, infos)) for index in range(microbatches)}


class Pipeline:
    """One optimizer step's microbatches through the stages of all ranks of `group`."""

    def __init__(
        self,
        layout: Layout,
        stages: Mapping[int, nn.Module],
        group: ProcessGroup,
        links: Links | None,
        loss: Loss,
        hidden: Tensor,
        device: torch.device,
        observe: Observer | None = None,
    ) -> None:
        """`stages`: the rank's own, by their place in the model, between which go tensors like `hidden`, of one
        microbatch and without memory. `observe` is told of their passes."""
        last = layout.pipeline_stages - 1
        self.first, self.last = 0 in stages, last in stages
        parts: list[Any] = [
            LeanStage(stage, i, last + 1, hidden, group, links, device, observe) for i, stage in stages.items()
        ]
        rounds = layout.gradient_accumulation_steps

        def computed(output: Tensor, labels: Tensor) -> Tensor:
            value = loss(output, labels)
            if observe is not None:
                observe(Moment.DONE)
            return value

        self.schedule = (
            _ONE_STAGE[layout.pipeline_schedule](parts[0], rounds, loss_fn=computed)
            if layout.pipeline_schedule in ONE_STAGE_SCHEDULES
            else _MANY_STAGES[layout.pipeline_schedule](parts, rounds, loss_fn=computed)
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
