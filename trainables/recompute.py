"""Recomputation of activations in the backward pass, one block at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
}
"""Matrix products and attention: most of the time of a block, in a fraction of its memory."""


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
        return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False, **self.options)


def recomputed(block: nn.Module, mode: str) -> nn.Module:
    """`block`, recomputed as `TrialConfig.recompute` says. Nothing in a block may be random."""
    if mode == "none":
        return block
    return Recomputed(block, KEPT if mode == "selective" else set())


def _policy(kept: set[Any], _context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE
