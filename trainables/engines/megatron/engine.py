"""Megatron-style layouts on torch's own primitives: DeviceMesh, DTensor, FSDP2 and pipeline schedules.

The ZeRO stages (Rajbhandari et al. 2020) are FSDP2 with different times of gathering parameters and reducing gradients:

=====  ======================================  =============================
stage  parameters                              gradients
=====  ======================================  =============================
0      replicated                              all-reduced once a step
1      gathered once a step                    reduce-scattered once a step
2      gathered once a step                    reduce-scattered a microbatch
3      gathered for each forward and backward  reduce-scattered a microbatch
=====  ======================================  =============================

With hybrid sharding the shards' sums are all-reduced between the copies, once a step.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from trainables.engines.base import (
    BETAS,
    GRADIENT_CLIP,
    WEIGHT_DECAY,
    Job,
    Microbatch,
    StepOutput,
    TrainingEngine,
)
from trainables.engines.megatron.context import positions
from trainables.engines.megatron.mesh import Mesh
from trainables.engines.megatron.parallelize import Parallelizer
from trainables.engines.megatron.pipeline import Pipeline, TiedTable
from trainables.model import Embedding, Head, Parts, Stage, compiled_loss, language_model_loss
from trainables.moe import ExpertLayout, Experts, MoE
from trainables.passes import Moment


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one mesh; each rank of the expert and tensor groups has other `experts`, or other parts of them."""

    parameters: list[nn.Parameter]
    experts: bool

    def gradients(self, besides: Tensor | None = None) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None and p is not besides]


def build(job: Job) -> TrainingEngine:
    """The engine, with the job's model laid out. Collective."""
    return MegatronEngine(job)


class MegatronEngine:
    """Trains with torch alone."""

    def __init__(self, job: Job) -> None:
        self.layout = layout = job.layout
        self.shape, self.observe = job.model, job.observe
        self.mesh = mesh = Mesh(layout, job.device)
        place = layout.coordinates(job.rank)
        self.data_parallel_rank = place["dp"]
        self.positions = positions(job.sequence_length, layout.context_parallel_size, place["cp"], job.device)
        parallelizer = Parallelizer(layout, mesh)
        parts = Parts(job.model, self.positions, job.seed, self._expert_layout())
        mine = layout.stages_of(place["pp"])
        self.stages = {index: self._build(index, parts, parallelizer) for index in mine}
        self.holds_loss = layout.pipeline_stages - 1 in self.stages
        self.loss_function: Callable[[Tensor, Tensor], Tensor] = language_model_loss
        if layout.compile and layout.tensor_parallel_size == 1:
            self.loss_function = compiled_loss()
        self.pipeline = self._schedule()
        self.tied = None
        if self.pipeline is not None and job.model.tie_embeddings:
            self.tied = TiedTable(self._tables(), mesh.pipeline_group)
        self.groups = self._parameter_groups()
        self.optimizer = torch.optim.AdamW(
            [{"params": group.parameters} for group in self.groups],
            lr=job.learning_rate,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )

    def step(self, microbatches: Iterator[Microbatch]) -> StepOutput:
        self.optimizer.zero_grad()
        local = self._own_tokens(microbatches)
        with loss_parallel() if self.layout.tensor_parallel_size > 1 else contextlib.nullcontext():
            losses = self._accumulate(local) if self.pipeline is None else self._pipeline(local)
        self._complete_gradients()
        grad_norm = self._clip()
        self.optimizer.step()
        return StepOutput(self._contribution(losses), grad_norm)

    def set_global_batch_size(self, size: int) -> None:
        before = self.layout.gradient_accumulation_steps
        self.layout = replace(self.layout, global_batch_size=size)
        self.pipeline = self._schedule()
        if self.pipeline is None:
            for mixture in (m for stage in self.stages.values() for m in stage.modules() if isinstance(m, MoE)):
                mixture.balance_scale *= before / self.layout.gradient_accumulation_steps

    def _schedule(self) -> Pipeline | None:
        """The order of one step's microbatches through the stages; None without a pipeline."""
        if self.layout.pipeline_parallel_size == 1:
            return None
        return Pipeline(
            self.layout,
            self.stages,
            self.mesh.pipeline_group,
            self.mesh.pipeline_links,
            self.loss_function,
            self._hidden_states(),
            self.mesh.device,
            self.observe,
        )

    def _hidden_states(self) -> Tensor:
        """What one stage passes to the next of a microbatch, without memory."""
        layout = self.layout
        tokens = len(self.positions) // (layout.tensor_parallel_size if layout.splits_sequence else 1)
        shape = (layout.micro_batch_size, tokens, self.shape.hidden)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    @property
    def dtype(self) -> torch.dtype:
        """That of hidden states, and of what they are multiplied with outside fp8."""
        return torch.float32 if self.layout.precision == "fp32" else torch.bfloat16

    def _build(self, index: int, parts: Parts, parallelizer: Parallelizer) -> Stage:
        """Make and shard one part after the other, so that never more than one lies whole on the device."""
        last = index == self.layout.pipeline_stages - 1
        tied = parts.shape.tie_embeddings and index == 0 and last
        embedding = parallelizer.embedding(parts.embedding()) if index == 0 else None
        if embedding is not None and not tied:
            parallelizer.shard(embedding)
        layers = self.layout.layers_by_stage(parts.shape.layers)[index]
        blocks = [parallelizer.block(parts.block(layer)) for layer in layers]
        head = parallelizer.head(parts.head()) if last else None
        if tied:
            assert head is not None
            assert embedding is not None
            head.output.weight = embedding.tokens.weight  # both lie in the root's own shard group
        elif head is not None:
            parallelizer.shard(head)
        stage = Stage(embedding, blocks, head)
        parallelizer.root(stage)
        return stage

    def _tables(self) -> list[Tensor]:
        """The rank's copies of a token table that the first and the last pipeline rank hold."""
        stages = self.stages.values()
        first = [stage.embedding.tokens.weight for stage in stages if isinstance(stage.embedding, Embedding)]
        return first + [stage.head.output.weight for stage in stages if isinstance(stage.head, Head)]

    def _expert_layout(self) -> ExpertLayout:
        """A pipeline divides gradients by the number of microbatches at the end, not each microbatch's loss."""
        layout, mesh = self.layout, self.mesh
        return ExpertLayout(
            expert_group=mesh.expert_group,
            tensor_ranks=mesh.tensor_ranks,
            context_group=mesh.context_group,
            loss_scale=1.0 if layout.pipeline_parallel_size > 1 else 1 / layout.gradient_accumulation_steps,
        )

    def _parameter_groups(self) -> list[ParameterGroup]:
        """Fused kernels take DTensors of one mesh at a time; experts are of their own ranks alone."""
        groups: dict[tuple[DeviceMesh, bool], list[nn.Parameter]] = defaultdict(list)
        for stage in self.stages.values():
            of_experts = {p for m in stage.modules() if isinstance(m, Experts) for p in m.parameters()}
            for parameter in stage.parameters():
                groups[parameter.device_mesh, parameter in of_experts].append(parameter)  # type: ignore[attr-defined]
        return [ParameterGroup(parameters, experts) for (_, experts), parameters in groups.items()]

    def _own_tokens(self, microbatches: Iterator[Microbatch]) -> Iterator[Microbatch]:
        """What this context-parallel rank holds of each sequence."""
        for inputs, labels in microbatches:
            if self.layout.context_parallel_size > 1:
                inputs, labels = inputs[:, self.positions], labels[:, self.positions]
            yield inputs, labels

    def _accumulate(self, microbatches: Iterator[Microbatch]) -> list[Tensor]:
        """Forward and backward of all microbatches without a pipeline."""
        losses: list[Tensor] = []
        steps, zero = self.layout.gradient_accumulation_steps, self.layout.zero_stage
        stage = self.stages[0]
        assert isinstance(stage, FSDPModule)
        for index, (inputs, labels) in enumerate(microbatches):
            last = index == steps - 1
            stage.set_is_last_backward(last)
            stage.set_requires_gradient_sync(last or zero >= 2)
            stage.set_requires_all_reduce(last)
            stage.set_reshard_after_backward(last or zero == 3)
            loss = self.loss_function(stage(inputs), labels)
            (loss / steps).backward()
            losses.append(loss.detach())
        return losses

    def _pipeline(self, microbatches: Iterator[Microbatch]) -> list[Tensor]:
        """The pipeline splits the step's sequences into the microbatches again."""
        assert self.pipeline is not None
        inputs, labels = (torch.cat(tensors) for tensors in zip(*microbatches, strict=True))
        return self.pipeline.step(inputs, labels)

    def _complete_gradients(self) -> None:
        """What FSDP does not know of: other copies of a tied table, and tokens that came to experts from elsewhere."""
        if self.tied is not None:
            self.tied.sum_gradients()
        if self.layout.expert_parallel_size > 1:
            # FSDP took the mean over the ranks that hold these experts, of all those that sent them tokens.
            for group in self.groups:
                if group.experts:
                    torch._foreach_mul_(group.gradients(), 1 / self.layout.expert_parallel_size)

    def _clip(self) -> Tensor:
        """Clip to `GRADIENT_CLIP` by the norm of the whole model's gradient and return that norm."""
        square = torch.zeros((), device=self.mesh.device)
        second_copy = self.tied.table if self.tied is not None and self.holds_loss else None
        for group in self.groups:
            norm = torch.nn.utils.get_total_norm(group.gradients(besides=second_copy))
            part = (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
            if group.experts:
                for ranks in (self.mesh.expert_group, self.mesh.tensor.get_group()):
                    if ranks is not None and ranks.size() > 1:
                        dist.all_reduce(part, group=ranks)
            square += part
        if self.layout.pipeline_parallel_size > 1:
            dist.all_reduce(square, group=self.mesh.pipeline_group)
            if self.observe is not None:
                self.observe(Moment.AGREED)
        total = square.sqrt()
        for group in self.groups:
            torch.nn.utils.clip_grads_with_norm_(group.parameters, GRADIENT_CLIP, total)
        return total

    def _contribution(self, losses: list[Tensor]) -> Tensor:
        if not self.holds_loss:
            return torch.zeros((), device=self.mesh.device)
        mean = torch.stack([loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in losses]).mean()
        return mean / (self.layout.shard_ranks * self.layout.tensor_parallel_size)
