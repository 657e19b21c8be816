"""Megatron-style layouts on torch's own primitives: DeviceMesh, DTensor, FSDP2 and pipeline schedules.

Tensor and sequence parallelism follow Shoeybi et al. 2019 and Korthikanti et al. 2022, the pipeline schedule is 1F1B
(Narayanan et al. 2021), and the ZeRO stages (Rajbhandari et al. 2020) are FSDP2 with different times of gathering
parameters and reducing gradients:

=====  ======================================  =============================
stage  parameters                              gradients
=====  ======================================  =============================
0      replicated                              all-reduced once a step
1      gathered once a step                    reduce-scattered once a step
2      gathered once a step                    reduce-scattered a microbatch
3      gathered for each forward and backward  reduce-scattered a microbatch
=====  ======================================  =============================
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tensor import DTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from search_spaces.config import TrialConfig
from trainables.engines.base import BETAS, GRADIENT_CLIP, WEIGHT_DECAY, Job, Microbatch, StepOutput, learning_rate
from trainables.model import Block, Embedding, Head, Parts, Stage, language_model_loss


class Layout:
    """The mesh of one trial, tensor parallel innermost, and how one part of the model is laid over it."""

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        self.config = config
        dp = config.data_parallel_size
        replicate, shard = (dp, 1) if config.zero_stage == 0 else (1, dp)
        self.mesh = init_device_mesh(
            device.type,
            (config.pipeline_parallel_size, replicate, shard, config.tensor_parallel_size),
            mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"),
        )
        self.sharding: dict[str, Any] = {
            "mesh": self.mesh["dp_replicate", "dp_shard"] if config.zero_stage == 0 else self.mesh["dp_shard"],
            "reshard_after_forward": config.zero_stage == 3,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if config.precision == "bf16" else None, reduce_dtype=torch.float32
            ),
        }

    @property
    def data_parallel_rank(self) -> int:
        return self.mesh.get_local_rank("dp_replicate") + self.mesh.get_local_rank("dp_shard")

    def block(self, block: Block) -> nn.Module:
        """Tensor parallel, recomputed, compiled, sharded: in this order, each wraps the one before."""
        self._tensor_parallel(block, self._block_plan(block))
        module: nn.Module = checkpoint_wrapper(block) if self.config.recompute == "full" else block
        if self.config.compile:
            module.compile()
        fully_shard(module, **self.sharding)
        return module

    def embedding(self, embedding: Embedding) -> Embedding:
        hidden = Shard(1) if self.config.sequence_parallel else Replicate()
        plan: dict[str, Any] = {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden)}
        if embedding.positions is not None:
            plan["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden)
        self._tensor_parallel(embedding, plan)
        return embedding

    def head(self, head: Head) -> Head:
        hidden = Shard(1) if self.config.sequence_parallel else Replicate()
        plan: dict[str, Any] = {
            "output": ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1), use_local_output=False)
        }
        if self.config.sequence_parallel:
            plan["norm"] = SequenceParallel()
        self._tensor_parallel(head, plan)
        return head

    def _block_plan(self, block: Block) -> dict[str, Any]:
        hidden = Shard(1) if self.config.sequence_parallel else Replicate()
        whole = PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(Replicate(),))
        plan: dict[str, Any] = {
            "attention": whole,
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=hidden),
            "ffn": whole,
            "ffn.up": ColwiseParallel(),
            "ffn.down": RowwiseParallel(output_layouts=hidden),
        }
        if hasattr(block.ffn, "gate"):
            plan["ffn.gate"] = ColwiseParallel()
        if self.config.sequence_parallel:
            plan["attention_norm"] = plan["ffn_norm"] = SequenceParallel()
        return plan

    def _tensor_parallel(self, module: nn.Module, plan: dict[str, Any]) -> None:
        if self.config.tensor_parallel_size > 1:
            # Each rank drew the whole tensor from the same seed, so that nothing needs to be sent.
            parallelize_module(module, self.mesh["tp"], plan, src_data_rank=None)


class MegatronEngine:
    """A `trainables.engines.base.Engine` on torch alone."""

    def __init__(self, job: Job) -> None:
        self.config = config = job.config
        self.layout = Layout(config, job.device)
        self.data_parallel_rank = self.layout.data_parallel_rank
        stage_index, stages = self.layout.mesh.get_local_rank("pp"), config.pipeline_parallel_size
        self.is_last = stage_index == stages - 1
        self.stage = self._build(job, stage_index, stages)
        self.groups = self._parameters_by_mesh()
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters} for parameters in self.groups],
            lr=learning_rate(job.model),
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
        self.loss_function: Callable[[Tensor, Tensor], Tensor] = language_model_loss
        if config.compile and config.tensor_parallel_size == 1:
            self.loss_function = torch.compile(language_model_loss)
        self.schedule = None
        if stages > 1:
            stage = PipelineStage(self.stage, stage_index, stages, job.device, group=self.layout.mesh.get_group("pp"))
            self.schedule = Schedule1F1B(stage, config.gradient_accumulation_steps, loss_fn=self.loss_function)

    def step(self, microbatches: Iterator[Microbatch]) -> StepOutput:
        self.optimizer.zero_grad()
        with loss_parallel() if self.config.tensor_parallel_size > 1 else contextlib.nullcontext():
            losses = self._accumulate(microbatches) if self.schedule is None else self._pipeline(microbatches)
        grad_norm = self._clip()
        self.optimizer.step()
        return StepOutput(self._contribution(losses), grad_norm)

    def _build(self, job: Job, stage_index: int, stages: int) -> Stage:
        """Make and shard one part after the other, so that never more than one lies whole on the device."""
        parts, layout = Parts(job.model, job.sequence_length, job.seed, job.device), self.layout
        share = job.model.layers // stages
        embedding = layout.embedding(parts.embedding()) if stage_index == 0 else None
        tied = job.model.tie_embeddings
        if embedding is not None and not tied:
            fully_shard(embedding, **layout.sharding)
        layers = range(stage_index * share, (stage_index + 1) * share)
        blocks = [layout.block(parts.block(layer)) for layer in layers]
        head = layout.head(parts.head()) if self.is_last else None
        if head is not None and embedding is not None and tied:
            head.output.weight = embedding.tokens.weight  # both lie in the root's own shard group
        elif head is not None:
            fully_shard(head, **layout.sharding)
        stage = Stage(embedding, blocks, head)
        fully_shard(stage, **layout.sharding)
        return stage

    def _parameters_by_mesh(self) -> list[list[nn.Parameter]]:
        """Fused kernels take DTensors of one mesh at a time."""
        groups: dict[DeviceMesh, list[nn.Parameter]] = defaultdict(list)
        for parameter in self.stage.parameters():
            groups[parameter.device_mesh].append(parameter)  # type: ignore[attr-defined]
        return list(groups.values())

    def _accumulate(self, microbatches: Iterator[Microbatch]) -> list[Tensor]:
        """Forward and backward of all microbatches without a pipeline."""
        losses: list[Tensor] = []
        steps, stage = self.config.gradient_accumulation_steps, self.config.zero_stage
        assert isinstance(self.stage, FSDPModule)
        for index, (inputs, labels) in enumerate(microbatches):
            last = index == steps - 1
            self.stage.set_is_last_backward(last)
            self.stage.set_requires_gradient_sync(last or stage >= 2)
            self.stage.set_reshard_after_backward(last or stage == 3)
            loss = self.loss_function(self.stage(inputs), labels)
            (loss / steps).backward()
            losses.append(loss.detach())
        return losses

    def _pipeline(self, microbatches: Iterator[Microbatch]) -> list[Tensor]:
        """One 1F1B round; the schedule splits the step's sequences into the microbatches again."""
        assert self.schedule is not None
        inputs, labels = (torch.cat(tensors) for tensors in zip(*microbatches, strict=True))
        losses: list[Tensor] = []
        first = self.stage.embedding is not None
        self.schedule.step(
            *((inputs,) if first else ()),
            target=labels if self.is_last else None,
            losses=losses if self.is_last else None,
            return_outputs=False,
        )
        return [loss.detach() for loss in losses]

    def _clip(self) -> Tensor:
        """Clip to `GRADIENT_CLIP` by the norm of the whole model's gradient and return that norm."""
        square = torch.zeros((), device=self.layout.mesh.device_type)
        for parameters in self.groups:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            square += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
        if self.config.pipeline_parallel_size > 1:
            dist.all_reduce(square, group=self.layout.mesh.get_group("pp"))
        total = square.sqrt()
        for parameters in self.groups:
            torch.nn.utils.clip_grads_with_norm_(parameters, GRADIENT_CLIP, total)
        return total

    def _contribution(self, losses: list[Tensor]) -> Tensor:
        if not self.is_last:
            return torch.zeros((), device=self.layout.mesh.device_type)
        mean = torch.stack([loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in losses]).mean()
        return mean / (self.config.data_parallel_size * self.config.tensor_parallel_size)
