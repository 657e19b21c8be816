"""DeepSpeed's engine: ZeRO 0 to 3, its pipeline module and its tensor parallelism.

The JSON that DeepSpeed is configured with comes from `configuration` alone. DeepSpeed does not survive a second trial
in one process, so that this module must only be used in a process that ends with its trial.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn
from torch.utils.checkpoint import checkpoint

from search_spaces.config import TrialConfig
from search_spaces.models import ModelShape
from trainables.engines.base import BETAS, GRADIENT_CLIP, WEIGHT_DECAY, Job, Microbatch, StepOutput, learning_rate
from trainables.model import Block, Embedding, Head, Parts, Stage, language_model_loss

# Without this DeepSpeed compiles a C++ shared-memory all-reduce on CPU machines; gloo serves.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def configuration(config: TrialConfig) -> dict[str, Any]:
    """DeepSpeed's JSON configuration (deepspeed.ai/docs/config-json) for one layout."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": GRADIENT_CLIP,
        "bf16": {"enabled": config.precision == "bf16"},
        "zero_optimization": {"stage": config.zero_stage},
        "steps_per_print": 2**31,
    }
    if config.pipeline_parallel_size > 1:
        settings["pipeline"] = {"use_reentrant": False}
    if config.tensor_parallel_size > 1:
        settings["tensor_parallel"] = {
            "autotp_size": config.tensor_parallel_size,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [
                    {"patterns": [r".*\.(wq|wk|wv|gate|up)\.(weight|bias)$"], "partition_type": "column"},
                    {"patterns": [r".*\.(wo|down)\.(weight|bias)$"], "partition_type": "row"},
                    {"patterns": [r".*\.(tokens|positions|output)\.weight$"], "partition_type": "skip"},
                ],
            },
        }
    return settings


class PartSpec(LayerSpec):
    """A part of the model that DeepSpeed builds only on the stage that holds it; its type is what stages are cut by."""

    def __init__(self, part: type[nn.Module], make: Callable[[], nn.Module]) -> None:
        super().__init__(part)
        self.make = make

    def build(self, log: bool = False) -> nn.Module:
        return self.make()


class Recomputed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)


class DeepSpeedEngine:
    """A `trainables.engines.base.Engine` on DeepSpeed."""

    def __init__(self, job: Job) -> None:
        self.config = config = job.config
        deepspeed.init_distributed(dist_init_required=False)
        parts = Parts(job.model, job.sequence_length, job.seed, job.device)
        self.loss_function = torch.compile(language_model_loss) if config.compile else language_model_loss
        self.pipelined = config.pipeline_parallel_size > 1
        model = self._pipeline(parts, job.model) if self.pipelined else self._whole(parts, job.model)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=learning_rate(job.model),
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=job.device.type == "cuda",
        )
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(config))
        group = config.tensor_parallel_size
        self.data_parallel_rank = self.engine.grid.get_data_parallel_rank() if self.pipelined else job.rank // group

    def step(self, microbatches: Iterator[Microbatch]) -> StepOutput:
        ranks = self.config.num_gpus
        if self.pipelined:
            # DeepSpeed averages over the data-parallel ranks and tells every stage.
            loss = self.engine.train_batch(microbatches).detach() / ranks
        else:
            losses = []
            for inputs, labels in microbatches:
                loss = self.loss_function(self.engine(inputs), labels)
                self.engine.backward(loss)
                self.engine.step()
                losses.append(loss.detach())
            loss = torch.stack(losses).mean() / ranks
        norm = self.engine.get_global_grad_norm()
        return StepOutput(loss, torch.as_tensor(float("nan") if norm is None else norm))

    def _whole(self, parts: Parts, model: ModelShape) -> nn.Module:
        blocks: list[nn.Module] = []
        for layer in range(model.layers):
            block: nn.Module = parts.block(layer)
            if self.config.recompute == "full":
                block = Recomputed(block)
            blocks.append(self._compiled(block))
        stage = Stage(parts.embedding(), blocks, parts.head())
        if model.tie_embeddings:
            stage.head.output.weight = stage.embedding.tokens.weight  # type: ignore[union-attr]
        return stage

    def _compiled(self, block: nn.Module) -> nn.Module:
        if self.config.compile:
            block.compile()
        return block

    def _pipeline(self, parts: Parts, model: ModelShape) -> PipelineModule:
        config = self.config
        blocks = [
            PartSpec(Block, lambda layer=layer: self._compiled(parts.block(layer)))  # type: ignore[misc]
            for layer in range(model.layers)
        ]
        return PipelineModule(
            layers=[PartSpec(Embedding, parts.embedding), *blocks, PartSpec(Head, parts.head)],
            topology=PipeModelDataParallelTopology(
                num_pp=config.pipeline_parallel_size, num_mp=1, num_dp=config.data_parallel_size
            ),
            loss_fn=self.loss_function,
            partition_method="type:Block",
            activation_checkpoint_interval=1 if config.recompute == "full" else 0,
        )
