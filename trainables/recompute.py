"""Recomputation of activations in the backward pass, one block at a time."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import trainables.merged  # noqa: F401  registers its operator

_aten = torch.ops.aten

KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.wattune.merged_parts.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
"""Matrix products, attention, and what ranks summed: most of the time of a block, in a fraction of its memory."""


# FSDP2 names its steps to the profiler in a first forward pass, and not in the one for the backward pass.
checkpointing.SAC_IGNORED_OPS |= {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}


class Recomputed(nn.Module):
    """A block whose activations, but for the outputs of the operators in `kept`, are computed again when needed."""

    def __init__(self, block: nn.Module, kept: set[Any]) -> None:
        super().__init__()
        self.block = block
        self.options: dict[str, Any] = {}
        if kept:
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, kept))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False, **self.options)
        return output


class RecomputedOnce(nn.Module):
    """A block that is computed again once for all backward passes through it, of which zero bubble has one for the
    gradient of its input and one for those of each weight (Qi et al. 2023).

    torch's checkpoint computes it again for each, for twice the step's time on H200. What is computed again is held
    until the last of them.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        again = _Again(self.block, x)
        with saved_tensors_hooks(again.pack, again.unpack):
            output: Tensor = self.block(x)
        return output


class _Again:
    """What autograd has of one pass through a block: numbers in place of tensors, until it asks for the first."""

    def __init__(self, block: nn.Module, x: Tensor) -> None:
        self.block, self.x = block, x.detach().requires_grad_(x.requires_grad)
        self.count = 0
        self.tensors: list[Tensor] = []

    def pack(self, tensor: Tensor) -> int:
        self.count += 1
        return self.count - 1

    def unpack(self, number: int) -> Tensor:
        if not self.tensors:
            kept: list[Tensor] = []

            def keep(tensor: Tensor) -> None:
                kept.append(tensor.detach())
                if len(kept) == self.count:
                    raise _Enough

            with suppress(_Enough), torch.enable_grad(), saved_tensors_hooks(keep, _refuse):
                self.block(self.x)
            if len(kept) != self.count:
                raise RuntimeError(f"a block kept {self.count} tensors, and {len(kept)} when it was computed again")
            self.tensors = kept
        return self.tensors[number]


class _Enough(Exception):
    """The last tensor that is needed is there: the product that it goes into is not."""


def _refuse(_: None) -> Tensor:
    raise RuntimeError("what a block computes again has no backward pass of its own")


def recomputed(block: nn.Module, mode: str, split_backward: bool = False) -> nn.Module:
    """`block`, recomputed as `Layout.recompute` says. Nothing in a block may be random.

    `split_backward`: whether a backward pass goes through the block in parts, as in zero bubble.
    """
    if mode == "none":
        return block
    if split_backward:
        return RecomputedOnce(block)
    return Recomputed(block, KEPT if mode == "selective" else set())


def _policy(kept: set[Any], _context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE
