"""Recomputation changes what is computed twice, never what comes out."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from search_spaces.engines import ENGINES
from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from trainables.engines.megatron.fp8 import use_fp8
from trainables.model import Parts
from trainables.recompute import Recomputed, RecomputedOnce, _Again, recomputed

PRODUCTS = 7
"""Of a block of a Llama, forward."""


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def trained(mode: str, precision: str = "fp32") -> tuple[Tensor, list[Tensor], Counter[str]]:
    """Gradients of the input and of the parameters of one block, and the operators that found them."""
    plain = Parts(PRESETS["tiny-llama"], torch.arange(32), seed=0).block(0)
    if precision == "fp8":
        use_fp8(plain)
    block = recomputed(plain, mode)
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


@pytest.mark.parametrize(("engine", "precision"), [("megatron", "fp32"), ("deepspeed", "fp32"), ("megatron", "fp8")])
def test_full_recomputation_leaves_out_what_the_cost_model_says(engine: str, precision: str) -> None:
    layout = Layout(engine, 1, 1, recompute="full", precision=precision)
    (_, _, plain), (_, _, full) = (trained(mode, precision) for mode in ("none", "full"))
    product = "_scaled_mm" if precision == "fp8" else "mm"
    assert full[product] - plain[product] == PRODUCTS - ENGINES[engine].leaves_out_last(layout)


def compiled_inside(block: nn.Module, mode: str) -> nn.Module:
    """As the `megatron` engine does."""
    block.compile()
    return recomputed(block, mode)


def compiled_with(block: nn.Module, mode: str) -> nn.Module:
    """As the `deepspeed` engine does."""
    whole = recomputed(block, mode)
    whole.forward = torch.compile(whole.forward)
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "wrap"), [("megatron", compiled_inside), ("deepspeed", compiled_with)])
def test_compiled_blocks_are_computed_again_as_the_cost_model_says(
    engine: str, wrap: Callable[[nn.Module, str], nn.Module]
) -> None:
    def products(mode: str) -> int:
        torch.compiler.reset()
        block = wrap(Parts(PRESETS["tiny-llama"], torch.arange(32), seed=0).block(0), mode)
        x = torch.randn(2, 32, 64, requires_grad=True)
        block(x).square().mean().backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            block(x).square().mean().backward()
        return sum(event.name == "aten::mm" for event in profiler.events())

    layout = Layout(engine, 1, 1, recompute="full", compile=True, precision="fp32")
    assert products("full") - products("none") == PRODUCTS - ENGINES[engine].leaves_out_last(layout)


class Known(_Again):
    """Those that are still there can be counted."""

    alive: ClassVar[WeakSet[Known]] = WeakSet()

    def __init__(self, block: nn.Module, x: Tensor) -> None:
        super().__init__(block, x)
        self.alive.add(self)


def split(wrap: Callable[[nn.Module], nn.Module]) -> tuple[list[Tensor], Counter[str], list[int]]:
    """Gradients of two blocks by a backward pass in zero bubble's parts, the operators that found them, and how many
    blocks hold what they computed again: before the first part, after it, and in the end."""
    parts = Parts(PRESETS["tiny-llama"], torch.arange(32), seed=0)
    blocks = nn.Sequential(*(wrap(parts.block(layer)) for layer in range(2)))
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    held = []
    with Operators() as operators:
        output = blocks(x)
        held.append(holding())
        (of_input,), groups = stage_backward_input([output], [output.detach()], [x], blocks.parameters())
        held.append(holding())
        stage_backward_weight(blocks.parameters(), groups)
    del output, groups
    held.append(holding())
    assert of_input is not None
    return [of_input, *(p.grad for p in blocks.parameters() if p.grad is not None)], operators.calls, held


def holding() -> int:
    gc.collect()
    return sum(bool(found.tensors) for found in Known.alive)


def test_zero_bubble_computes_a_block_again_once_and_lets_go_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainables.recompute._Again", Known)
    expected, plain, _ = split(lambda block: block)
    found, once, held = split(RecomputedOnce)
    assert held == [0, 2, 0]
    assert len(found) == len(expected) == 19
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert once["silu"] == 2 * plain["silu"] == 4
    assert once["mm"] - plain["mm"] == 2 * (PRODUCTS - 1), "the last one's output is not needed"
    _, each, _ = split(lambda block: Recomputed(block, set()))
    assert each["silu"] > 3 * once["silu"]  # once for each group of weights: what it is not used for


def test_which_recomputation_zero_bubble_gets() -> None:
    block = nn.Linear(1, 1)
    assert recomputed(block, "none", split_backward=True) is block
    assert isinstance(recomputed(block, "full", split_backward=True), RecomputedOnce)
    assert isinstance(recomputed(block, "full"), Recomputed)


@pytest.mark.slow
def test_a_block_that_computes_something_else_again_is_an_error() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.exp().exp() if self.calls == 1 else x.exp()

    output = RecomputedOnce(Fickle())(torch.ones(1, requires_grad=True))
    with pytest.raises(RuntimeError, match="kept 2 tensors, and 1 when it was computed again"):
        output.backward()
