"""How one part of the model is laid over the mesh: split, recomputed, compiled and sharded, in this order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from search_spaces.layout import Layout
from trainables.engines.megatron import context
from trainables.engines.megatron.fp8 import WholeScaledInput, compiler_options, use_fp8
from trainables.engines.megatron.mesh import Mesh
from trainables.engines.megatron.tensor import Columns, OwnTokens, Rows, WholeInput
from trainables.model import Block, Embedding, Head
from trainables.moe import Experts, MoE
from trainables.recompute import recomputed
from trainables.tensor_ranks import TensorRanks

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Parallelizer:
    """Lays parts of a model over one mesh; tensor and sequence parallelism as in Shoeybi et al. 2019 and Korthikanti
    et al. 2022."""

    def __init__(self, layout: Layout, mesh: Mesh) -> None:
        self.layout, self.mesh = layout, mesh
        self.hidden = Shard(1) if layout.sequence_parallel else Replicate()
        self.sharding: dict[str, Any] = {
            "mesh": mesh.sharding,
            "reshard_after_forward": layout.zero_stage == 3,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if layout.precision == "fp32" else torch.bfloat16,
                reduce_dtype=_DTYPES[layout.reduce_precision],
            ),
        }
        self.attend = None
        if mesh.context_group is not None:
            self.attend = context.GatheredAttention(mesh.context_group)
        if layout.async_tensor_parallel:
            # The compiler then splits the products beside a gather or a scatter, and sends one part's while it
            # computes another's, through memory that neighbours map.
            torch._inductor.config._micro_pipeline_tp = True
            enable_symm_mem_for_group(mesh.tensor.get_group().group_name)

    def block(self, block: Block) -> nn.Module:
        if self.attend is not None:
            block.attention.attend = self.attend
        if self.layout.precision == "fp8":
            use_fp8(block)
        if self.mesh.tensor_ranks is not None:
            self._tensor_parallel(block, self._block_plan(block, self.mesh.tensor_ranks))
        if isinstance(block.ffn, MoE):
            self._shard_experts(block.ffn.experts)
        module = recomputed(block, self.layout.recompute, self.layout.splits_backward)
        if self.layout.compile:
            # Selective recomputation is for the compiler to see. Full recomputation goes around what it made: a graph
            # that recomputes fails to keep the device mesh of sequence parallelism (seen with torch 2.13).
            options = {} if self.attend is None else context.COMPILED
            if self.layout.precision == "fp8":
                options = options | compiler_options(block, self.layout.sequence_parallel)
            (block if self.layout.recompute == "full" else module).compile(options=options or None)
        fully_shard(module, **self.sharding)
        return module

    def embedding(self, embedding: Embedding) -> Embedding:
        plan: dict[str, Any] = {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=self.hidden)}
        if embedding.positions is not None:
            plan["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=self.hidden)
        self._tensor_parallel(embedding, plan)
        if self.layout.tensor_parallel_size > 1:
            embedding.register_forward_hook(_arrived)
        return embedding

    def head(self, head: Head) -> Head:
        plan: dict[str, Any] = {
            "output": ColwiseParallel(input_layouts=self.hidden, output_layouts=Shard(-1), use_local_output=False)
        }
        if self.layout.sequence_parallel:
            plan["norm"] = SequenceParallel()
        self._tensor_parallel(head, plan)
        return head

    def shard(self, module: nn.Module) -> None:
        """Make one group of `module`'s parameters that no part of it has sharded yet."""
        fully_shard(module, **self.sharding)

    def root(self, module: nn.Module) -> None:
        """Shard what is left of `module`, which holds all parts of a stage, and have it time their communication."""
        fully_shard(module, **self.sharding)
        layout = self.layout
        if self.mesh.device.type == "cuda" and not (layout.overlap_grad_reduce and layout.overlap_param_gather):
            _serialize(module, gradients=not layout.overlap_grad_reduce, parameters=not layout.overlap_param_gather)

    def _block_plan(self, block: Block, ranks: TensorRanks) -> dict[str, Any]:
        whole = (WholeScaledInput if self.layout.precision == "fp8" else WholeInput)(ranks)
        columns, rows = Columns(), Rows(ranks)
        plan: dict[str, Any] = {
            "attention": whole,
            "attention.wq": columns,
            "attention.wk": columns,
            "attention.wv": columns,
            "attention.wo": rows,
        }
        if not isinstance(block.ffn, MoE):  # a mixture of experts is made for its place in the mesh
            plan |= {"ffn": whole, "ffn.up": columns, "ffn.down": rows}
            if hasattr(block.ffn, "gate"):
                plan["ffn.gate"] = columns
        if ranks.sequence_parallel:
            plan["attention_norm"] = plan["ffn_norm"] = OwnTokens()
        return plan

    def _shard_experts(self, experts: Experts) -> None:
        """Over the ranks that hold the same experts: whole ones each where there are enough, else a part of each."""
        mesh = self.mesh.expert_sharding
        ranks = mesh.size(mesh.ndim - 1)
        dimension = 0 if len(experts.local) % ranks == 0 else 1
        sharding = self.sharding | {"mesh": mesh, "shard_placement_fn": lambda _: Shard(dimension)}
        fully_shard(experts, **sharding)

    def _tensor_parallel(self, module: nn.Module, plan: dict[str, Any]) -> None:
        if self.layout.tensor_parallel_size > 1:
            # Each rank drew the whole tensor from the same seed, so that nothing needs to be sent.
            parallelize_module(module, self.mesh.tensor, plan, src_data_rank=None)


def _arrived(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    """The hidden states as a plain tensor. What a collective returns is of a kind of its own until it has arrived, and
    a compiled block that is given one passes no gradient back through it."""
    return output.clone()


def _serialize(root: nn.Module, gradients: bool, parameters: bool) -> None:
    """Let FSDP2 reduce gradients, or gather parameters, on the stream that computes, and so at no time beside it.

    FSDP2 has no switch for this: its streams are replaced once its root has made them, in its first forward.
    """
    assert isinstance(root, FSDPModule)

    def replace_streams(*_: object) -> None:
        streams = root._get_fsdp_state()._comm_ctx
        compute = torch.cuda.current_stream()
        if parameters:
            streams.all_gather_copy_in_stream = streams.all_gather_stream = compute
        if gradients:
            streams.reduce_scatter_stream = streams.all_reduce_stream = compute
        handle.remove()

    handle = root.register_forward_pre_hook(replace_streams)
