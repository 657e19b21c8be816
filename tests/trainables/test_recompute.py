"""Recomputation changes what is computed twice, never what comes out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from search_spaces.models import PRESETS
from trainables.model import Parts
from trainables.recompute import recomputed


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def trained(mode: str) -> tuple[Tensor, list[Tensor], Counter[str]]:
    """Gradients of the input and of the parameters of one block, and the operators that found them."""
    parts = Parts(PRESETS["tiny-llama"], torch.arange(32), seed=0)
    block = recomputed(parts.block(0), mode)
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with Operators() as operators:
        block(x).square().mean().backward()
    assert x.grad is not None
    return x.grad, [parameter.grad for parameter in block.parameters() if parameter.grad is not None], operators.calls


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_are_the_same_to_the_bit(mode: str) -> None:
    expected, found = trained("none"), trained(mode)
    assert torch.equal(found[0], expected[0])
    assert len(found[1]) == len(expected[1]) == 9
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))


def test_selective_computes_no_matrix_product_and_no_attention_again() -> None:
    _, _, plain = trained("none")
    _, _, selective = trained("selective")
    _, _, full = trained("full")
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert selective["mm"] == plain["mm"]
    assert selective[attention] == plain[attention] == 1
    assert full["mm"] > plain["mm"]
    assert full[attention] == 2
    assert selective["silu"] == full["silu"] == plain["silu"] + 1
