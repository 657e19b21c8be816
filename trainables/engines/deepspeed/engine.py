"""DeepSpeed's engine: ZeRO, offloading, pipelines, tensor parallelism, Ulysses and experts as DeepSpeed has them.

The JSON that DeepSpeed is configured with comes from `configuration` beside this. DeepSpeed does not survive a
second trial in one process, so that this module must only be used in a process that ends with its trial.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import importlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import TopKGate, top1gating, top2gating, topkgating
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, ReduceTiedGrads
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups, safe_set_full_fp32_param, safe_set_local_fp32_param, set_z3_leaf_modules
from torch import Tensor, nn

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.schedules import Action, Pass
from trainables.engines.base import (
    BETAS,
    GRADIENT_CLIP,
    WEIGHT_DECAY,
    Job,
    Microbatch,
    StepOutput,
    TrainingEngine,
)
from trainables.engines.deepspeed.configuration import configuration
from trainables.engines.deepspeed.ulysses import Ulysses
from trainables.model import Block, Embedding, Parts, Stage, compiled_loss, language_model_loss
from trainables.moe import attach_loss, balance_loss, choose_experts, evenly
from trainables.passes import Moment, Observer
from trainables.recompute import recomputed

# Without this DeepSpeed compiles a C++ shared-memory all-reduce on CPU machines; gloo serves.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
# DeepSpeed imports this, and with it torch's compiler, when it makes an optimizer: now, rather than in each trial.
importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")

# Which layers of `trainables.model` DeepSpeed's tensor parallelism splits, and how.
SPLIT_LAYERS = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.(wq|wk|wv|gate|up)\.(weight|bias)$"], "partition_type": "column"},
        {"patterns": [r".*\.(wo|down)\.(weight|bias)$"], "partition_type": "row"},
        {"patterns": [r".*\.(tokens|positions|output)\.weight$"], "partition_type": "skip"},
    ],
}


def settings_of(layout: Layout) -> dict[str, Any]:
    """DeepSpeed's configuration of a layout of the models of `trainables.model`."""
    settings = configuration(layout) | {"gradient_clipping": GRADIENT_CLIP, "steps_per_print": 2**31}
    if layout.tensor_parallel_size > 1:
        settings["tensor_parallel"]["partition_config"] = SPLIT_LAYERS
    return settings


def gathering_as_large(model: ModelShape) -> dict[str, int]:
    """What has ZeRO-3 gather a tiny model's blocks anew in each microbatch, ahead of time, and keep vectors alone,
    as it does with large ones by its defaults, by which all of a tiny one stays gathered. It is 1.4 gathers a block
    then, as with 3 billion parameters; GPT-3 1.3B has 0.6, 7 billion 1.9 (`search_spaces.replay.gathering`)."""
    return {
        "stage3_param_persistence_threshold": 4 * model.hidden,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": model.block_parameters,
    }


class PartSpec(LayerSpec):
    """A part of the model that DeepSpeed builds only on the stage that holds it; its type is what stages are cut by."""

    def __init__(self, part: type[nn.Module], make: Callable[[], nn.Module]) -> None:
        super().__init__(part)
        self.make = make

    def build(self, log: bool = False) -> nn.Module:
        return self.make()


class TiedSpec(TiedLayerSpec):
    """A part whose parameter `weight` is also that of the other part with the same key, on another stage."""

    def __init__(self, key: str, weight: str, part: type[nn.Module], make: Callable[[], nn.Module]) -> None:
        super().__init__(key, part, tied_weight_attr=weight)
        self.make = make

    def build(self, log: bool = False) -> nn.Module:
        return self.make()


class EvenGate(TopKGate):
    """DeepSpeed's routing, by scores that send equally many tokens to all experts; none is dropped. `logits`: of the
    tokens that were routed last, until they are taken."""

    def __init__(self, hidden: int, experts: int, count: int) -> None:
        super().__init__(hidden, experts, count, drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False)
        self.logits: Tensor | None = None

    def forward(
        self, input: Tensor, used_token: Tensor | None = None, sparse_routes: bool = False, use_tutel: bool = False
    ) -> Any:
        """What DeepSpeed's own returns for hidden states (tokens, hidden)."""
        self.logits = F.linear(input.float(), self.wg.weight.float())
        logits = evenly(self.logits, self.k)
        room = self.capacity_factor, self.min_capacity
        if self.k == 1:
            drops = self.drop_tokens, self.use_rts, self.ep_group
            return top1gating(logits, *room, used_token, None, *drops, sparse_routes, use_tutel)
        if self.k == 2:
            return top2gating(logits, *room, self.drop_tokens, self.ep_group, False, sparse_routes)
        return topkgating(logits, self.k, *room, self.drop_tokens, self.ep_group, sparse_routes=sparse_routes)


class DispatchedExperts(nn.Module):
    """The mixture of experts of block `layer`, with DeepSpeed's routing and exchange of tokens; none is dropped.

    DeepSpeed's own load-balancing loss is of whole microbatches; here it is the one of `trainables.moe`, of sequences,
    `scale` times. `context_group`: ranks that hold the other tokens of the same sequences.
    """

    def __init__(
        self, parts: Parts, layer: int, size: int, rank: int, context_group: dist.ProcessGroup | None, scale: float
    ) -> None:
        super().__init__()
        shape = parts.shape
        self.count, self.scale, self.context_group = shape.experts_per_token, scale, context_group
        with parts.device:
            self.moe = MoE(shape.hidden, parts.expert(layer, 0), shape.num_experts, ep_size=size, k=self.count)
            self.moe.deepspeed_moe.gate = EvenGate(shape.hidden, shape.num_experts, self.count)
        self.router = self.moe.deepspeed_moe.gate.wg
        self.router.load_state_dict(parts.router(layer).state_dict())
        experts = self.moe.deepspeed_moe.experts.deepspeed_experts
        for index, expert in enumerate(experts, start=rank % size * len(experts)):
            expert.load_state_dict(parts.expert(layer, index).state_dict())

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same shape."""
        out: Tensor = self.moe(x)[0]
        gate = self.moe.deepspeed_moe.gate
        logits, gate.logits = gate.logits, None
        # DeepSpeed's own loss, which is not used: the graph of it, in a pass that is done again, keeps all that was
        # computed up to the router.
        self.moe.deepspeed_moe.l_aux = None
        if not self.scale:
            return out
        probabilities, _, experts = choose_experts(logits.unflatten(0, x.shape[:2]), self.count)
        out = attach_loss(out, balance_loss(probabilities, experts, self.context_group), self.scale)
        return out


def build(job: Job) -> TrainingEngine:
    """The engine, with the job's model laid out. Collective."""
    warnings.filterwarnings("ignore", module="deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return DeepSpeedEngine(job)


class DeepSpeedEngine:
    """Trains with DeepSpeed."""

    def __init__(self, job: Job) -> None:
        self.layout = layout = job.layout
        self.device, self.observe = job.device, job.observe
        deepspeed.init_distributed(dist_init_required=False)
        place = layout.coordinates(job.rank)
        self.data_parallel_rank, self.context_rank, self.tensor_rank = place["dp"], place["cp"], place["tp"]
        self.pipelined = layout.pipeline_parallel_size > 1
        self.settings = settings_of(layout)
        if job.is_specimen and layout.zero_stage == 3:
            self.settings["zero_optimization"] |= gathering_as_large(job.model)
        self.context_group = self._context_group()
        self.loss_function = compiled_loss() if layout.compile else language_model_loss
        # Each part with how it is made, to draw it again.
        self.made: list[tuple[nn.Module, Callable[[], nn.Module]]] = []
        whole = torch.arange(job.sequence_length, device=job.device)
        parts = Parts(job.model, whole.chunk(layout.context_parallel_size)[self.context_rank], job.seed)
        model = self._pipeline(parts, job.model) if self.pipelined else self._whole(parts, job.model)
        optimizer = torch.optim.AdamW(
            self._parameter_groups(model),
            lr=job.learning_rate,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=self.settings)
        self._start_from_fp32()
        _make_moments(optimizer, self._master_weights(optimizer))
        if self.pipelined:
            self._prepare_pipeline(job)
        self.norm: Tensor | None = None
        self.engine.clip_fp32_gradients = self._clip

    def step(self, microbatches: Iterator[Microbatch]) -> StepOutput:
        pieces = ((self._piece(inputs), self._piece(labels)) for inputs, labels in microbatches)
        if self.pipelined:
            # DeepSpeed averages over the data-parallel ranks and tells every stage.
            loss = self.engine.train_batch(pieces).detach()
        else:
            losses = []
            for inputs, labels in pieces:
                loss = self.loss_function(self.engine(inputs), labels)
                self.engine.backward(loss)
                self.engine.step()
                losses.append(loss.detach())
            loss = torch.stack(losses).mean()
        norm = self.engine.get_global_grad_norm() if self.norm is None else self.norm
        return StepOutput(loss / self.layout.num_gpus, torch.as_tensor(norm))

    def set_global_batch_size(self, size: int) -> None:
        before = self.layout.gradient_accumulation_steps
        self.layout = replace(self.layout, global_batch_size=size)
        steps = self.layout.gradient_accumulation_steps
        # DeepSpeed takes the ranks of a sequence for data-parallel ones, and so its batch for that many times as large.
        self.engine.set_train_batch_size(steps * self.layout.micro_batch_size * self.engine.dp_world_size)
        self.engine.micro_steps = 0  # by which it knows where steps end
        for experts in (m for m in self.engine.module.modules() if isinstance(m, DispatchedExperts)):
            experts.scale *= before / steps

    def _master_weights(self, optimizer: torch.optim.AdamW) -> list[Tensor]:
        """What the optimizer updates; ZeRO-3 tells it of one after the other, in each step anew."""
        apart: list[Tensor] | None = getattr(self.engine.optimizer, "fp32_partitioned_groups_flat", None)
        return apart or [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def _piece(self, tokens: Tensor) -> Tensor:
        """This rank's piece of sequences (batch, sequence)."""
        return tokens.chunk(self.layout.context_parallel_size, dim=1)[self.context_rank]

    def _context_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the pieces of the same sequences. Collective."""
        layout = self.layout
        if layout.context_parallel_size == 1:
            return None
        peers: dict[tuple[int, int, int], list[int]] = {}
        for rank in range(layout.num_gpus):
            place = layout.coordinates(rank)
            peers.setdefault((place["pp"], place["dp"], place["tp"]), []).append(rank)
        group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(list(peers.values()))[0]
        return group

    def _part(self, make: Callable[[], nn.Module]) -> nn.Module:
        """A part of the model as DeepSpeed trains it, so that never more than one lies whole in fp32 on the device."""
        part = make()
        self.made.append((part, make))
        if self.settings["bf16"]["enabled"]:
            part.bfloat16()
        if self.layout.zero_stage == 3 and self.layout.tensor_parallel_size == 1:
            deepspeed.zero.Init(module=part, config_dict_or_path=self.settings)  # shards it here and now
        return part

    def _block(self, parts: Parts, layer: int) -> nn.Module:
        block = self._part(lambda: self._mixture(parts, layer) if parts.shape.num_experts else parts.block(layer))
        assert isinstance(block, Block)
        if self.context_group is not None:
            block.attention.attend = Ulysses(self.context_group)
        module = recomputed(block, self.layout.recompute)
        if self.layout.compile:
            # The forward alone: for each module that ZeRO-3's hooks find, their graph would be another one. What is
            # computed again is part of the graph, but where that ends at experts: all of it would be left alone.
            whole = block if parts.shape.num_experts else module
            whole.forward = torch.compile(whole.forward)
        return module

    def _mixture(self, parts: Parts, layer: int) -> Block:
        layout, shape = self.layout, parts.shape
        block = Parts(replace(shape, num_experts=0), parts.positions, parts.seed).block(layer)
        scale = shape.router_aux_loss * layout.context_parallel_size / layout.gradient_accumulation_steps
        block.ffn = DispatchedExperts(
            parts, layer, layout.expert_parallel_size, dist.get_rank(), self.context_group, scale
        )
        return block

    def _whole(self, parts: Parts, model: ModelShape) -> nn.Module:
        embedding = self._part(parts.embedding)
        blocks = [self._block(parts, layer) for layer in range(model.layers)]
        head = self._part(parts.head)
        if model.tie_embeddings:
            head.output.weight = embedding.tokens.weight  # type: ignore[union-attr]
        if "torch_autocast" in self.settings:
            # Autocast leaves lookups in fp32, and then all sums of hidden states with what blocks add to them.
            embedding.register_forward_hook(lambda _module, _inputs, hidden: hidden.bfloat16())
        stage = Stage(embedding, blocks, head)
        if self.layout.zero_stage == 3:
            set_z3_leaf_modules(stage, [type(blocks[0])])  # parameters are gathered by the block
        return stage

    def _pipeline(self, parts: Parts, model: ModelShape) -> PipelineModule:
        layout = self.layout
        blocks = [
            PartSpec(Block, lambda layer=layer: self._block(parts, layer))  # type: ignore[misc]
            for layer in range(model.layers)
        ]

        def norm() -> nn.Module:
            return parts.head().norm

        def output() -> nn.Module:
            return parts.head().output

        first: LayerSpec = PartSpec(Embedding, lambda: self._part(parts.embedding))
        last: LayerSpec = PartSpec(nn.Linear, lambda: self._part(output))
        if model.tie_embeddings:
            first = TiedSpec("tokens", "tokens.weight", Embedding, first.make)
            last = TiedSpec("tokens", "weight", nn.Linear, last.make)
        return PipelineModule(
            layers=[first, *blocks, PartSpec(nn.Module, lambda: self._part(norm)), last],
            topology=PipeModelDataParallelTopology(
                num_pp=layout.pipeline_parallel_size, num_mp=1, num_dp=layout.shard_ranks
            ),
            loss_fn=self.loss_function,
            partition_method="type:Block",
        )

    def _prepare_pipeline(self, job: Job) -> None:
        """Tell the stages what they send each other, which each would tell the next, and who asks of their passes."""
        layout = self.layout
        tokens = job.sequence_length // layout.context_parallel_size
        shape = [layout.micro_batch_size, tokens, job.model.hidden]
        dtype = torch.bfloat16 if self.settings["bf16"]["enabled"] else torch.float32
        self.engine.first_output_send = False
        if not self.engine.is_first_stage():
            buffer = self.engine._allocate_or_extend_buffers(0, shape, dtype)
            # As in torch's stages, what is received for a forward pass can be told from gradients, for which DeepSpeed
            # takes the same memory.
            self.engine.pipe_recv_buf = buffer.detach().requires_grad_()
        if self.observe is not None:
            _observe_passes(self.engine, self.observe)

    @staticmethod
    def _parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
        together = {"params": list(model.parameters()), "name": "all"}
        apart: list[dict[str, Any]] = split_params_into_different_moe_groups_for_optimizer(
            together, max_group_size=None
        )
        return apart

    @torch.no_grad()
    def _start_from_fp32(self) -> None:
        """Give the master weights the start that fp32 training has; DeepSpeed makes them from weights in bf16."""
        if not self.settings["bf16"]["enabled"]:
            return
        for part, make in self.made:
            drawn = dict(make().named_parameters())
            for name, parameter in part.named_parameters():
                value = drawn[name].detach()
                for dim, size in enumerate(getattr(parameter, "ds_shape", parameter.shape)):
                    if size != value.shape[dim]:  # split by tensor parallelism
                        value = value.narrow(dim, self.tensor_rank * size, size)
                if hasattr(parameter, "ds_id"):
                    _set_partition(parameter, value)
                else:
                    safe_set_full_fp32_param(parameter, value)
        self.made.clear()

    def _clip(self) -> None:
        """Clip fp32 gradients of ZeRO-0 by the norm of the whole model's gradient, and keep that norm.

        In the place of DeepSpeed's own, which leaves out all stages of a pipeline but the first and tells no norm.
        """
        parameters = [p for p in self.engine.module.parameters() if p.grad is not None]
        counted = [p for p in parameters if not getattr(p, "ds_pipe_replicated", False)]  # what is tied, counts once
        experts = [p for p in counted if is_moe_param(p)]
        split = [p for p in counted if is_model_parallel_parameter(p)]
        apart = {id(p) for p in (*experts, *split)}
        square = self._square([p for p in counted if id(p) not in apart])
        if split:
            square += self._square(split, groups.get_tensor_model_parallel_group())
        if experts:
            square += self._square(experts, groups._get_expert_parallel_group(experts[0].group_name))
        if self.pipelined:
            dist.all_reduce(square, group=self.engine.grid.get_pipe_parallel_group())
            if self.observe is not None:
                self.observe(Moment.AGREED)
        self.norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, GRADIENT_CLIP, self.norm)

    def _square(self, parameters: list[Any], group: dist.ProcessGroup | None = None) -> Tensor:
        """Squared norm of the gradients of `parameters`, summed over `group` where each rank holds others."""
        square = torch.nn.utils.get_total_norm([p.grad for p in parameters]).to(self.device) ** 2
        if group is not None:
            dist.all_reduce(square, group=group)
        return square


def _make_moments(optimizer: torch.optim.AdamW, parameters: Iterable[Tensor]) -> None:
    """Make the moments now. The first step would, in memory that its logits had, so that those of the next step would
    find no room of their size there."""
    torch.cuda.empty_cache()  # what the model was made in is in pieces too small for them
    for parameter in parameters:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        steps = torch.zeros((), dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter] = {"step": steps, **moments}


def _observe_passes(engine: PipelineEngine, observe: Observer) -> None:
    """Have `observe` told of each pass of a pipeline as it begins and is done, and that all are before gradients are
    reduced."""
    counts: Counter[Pass] = Counter()

    def observed(step: Pass, execute: Callable[..., None]) -> Callable[..., None]:
        def told(engine: PipelineEngine, **arguments: Any) -> None:
            observe(Action(engine.stage_id, step, counts[step]))
            counts[step] += 1
            execute(engine, **arguments)
            observe(Moment.DONE)

        return told

    def reduce(engine: PipelineEngine, **arguments: Any) -> None:
        counts.clear()
        observe(Moment.PASSED)
        executed[ReduceTiedGrads](engine, **arguments)

    executed = engine._INSTRUCTION_MAP
    engine._INSTRUCTION_MAP = executed | {
        ForwardPass: observed(Pass.FORWARD, executed[ForwardPass]),
        BackwardPass: observed(Pass.BACKWARD, executed[BackwardPass]),
        ReduceTiedGrads: reduce,
    }


def _set_partition(parameter: Any, value: Tensor) -> None:
    """Set this rank's partition of a ZeRO-3 parameter's master weight; the last partition is padded."""
    size, group = parameter.ds_tensor.numel(), parameter.ds_process_group
    padded = F.pad(value.flatten(), (0, size * dist.get_world_size(group) - value.numel()))
    safe_set_local_fp32_param(parameter, padded.narrow(0, size * dist.get_rank(group), size))
