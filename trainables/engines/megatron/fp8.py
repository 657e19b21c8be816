"""Linear layers whose matrix products run in 8-bit floats, each tensor scaled anew for every product; sums and outputs
keep the input's precision.

Tensor-parallel ranks scale each their own part of a weight, and what they sum is in the input's precision already, so
that only tokens which they gather need a scale in common.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainables.engines.megatron.fp8_casts import FORWARD, GRADIENT, cast, magnitude, quantize, transposed
from trainables.engines.megatron.tensor import SplitLinear, WholeInput, local
from trainables.model import Block
from trainables.tensor_ranks import TensorRanks

NOT_JOINED = {"triton.mix_order_reduction": False}
"""For compiled blocks with these layers and RMS norms. torch 2.11 to 2.13 would join the two sums of a norm's backward
pass, over the width and over the tokens, and with them all that leads to the scaled input of a product, to one kernel
that takes 7 times as long as several. On H200 blocks of Llama-3-8B are 4% faster without; those of GPT-3, whose layer
norms are not joined with as much, 2% slower."""

IN_TILES = {"triton.coalesce_tiling_analysis": False}
"""For those that gather. By its analysis, torch 2.11 to 2.13 would transpose what a collective brought row by row, in
0.23 ms for 32 MiB on an H100, and in 0.06 ms in tiles without."""


class Scaled(NamedTuple):
    """What products are given, in 8 bits: `values` (batch, tokens, width) times the fp32 scalar `scale`.

    Autograd follows `source`, of the same shape and of the products' precision, whose own values nobody reads.
    """

    values: Tensor
    scale: Tensor
    source: Tensor


class _Product(torch.autograd.Function):
    """The fields of a `Scaled` (batch, tokens, in) times the transpose of weight (out, in); summed over `ranks`."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, scale: Tensor, source: Tensor, weight: Tensor, ranks: TensorRanks | None
    ) -> Tensor:
        x8 = values.flatten(0, -2)
        w8, w_scale = quantize(weight, FORWARD)
        ctx.save_for_backward(x8, scale, w8, w_scale)
        ctx.ranks, ctx.dtype = ranks, source.dtype
        y = _multiply(x8, w8.t(), scale, w_scale, source.dtype).unflatten(0, values.shape[:-1])
        return y if ranks is None else ranks.reduced(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        (gradient,) = gradients
        whole, g_scale = _quantized(gradient, GRADIENT, ctx.ranks)
        g8 = whole.flatten(0, -2)
        for_x = _multiply(g8, _by_columns(w8), g_scale, w_scale, ctx.dtype).unflatten(0, whole.shape[:-1])
        for_weight = _multiply(transposed(g8), _by_columns(x8), g_scale, x_scale, ctx.dtype)
        return None, None, for_x, for_weight, None


class _Source(torch.autograd.Function):
    """Stands for what `ranks` have of x together, without memory of its own; gradients of it are summed over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.new_empty(()).expand(ranks.whole_shape(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.reduced(gradients[0]), None


_product: Callable[[Tensor, Tensor, Tensor, Tensor, TensorRanks | None], Tensor] = _Product.apply
_source: Callable[[Tensor, TensorRanks], Tensor] = _Source.apply


def _by_columns(x: Tensor) -> Tensor:
    """`x` (rows, columns) laid out by columns, as the hardware wants the right-hand side of a product."""
    return transposed(x).t()


def _multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype)


def _quantized(x: Tensor, dtype: torch.dtype, ranks: TensorRanks | None) -> tuple[Tensor, Tensor]:
    """x (batch, tokens, width), or what `ranks` have of it together, in 8 bits, and the fp32 scalar that undoes the
    scaling.

    Tokens that are split have one scale, by the largest magnitude among the ranks, and are gathered in 8 bits. Those
    that all ranks have they cast alike.
    """
    if ranks is None or not ranks.sequence_parallel:
        return quantize(x, dtype)
    part, scale = cast(x, ranks.largest(magnitude(x)), dtype)
    # As bytes, since not every process group knows floats of 8 bits.
    return ranks.gathered(part.view(torch.uint8)).view(dtype), scale


class Float8Linear(SplitLinear):
    """`nn.Linear` in 8-bit floats, whole or split; widths and the number of tokens must be multiples of 16."""

    def forward(self, x: Tensor | Scaled) -> Tensor:
        given = x if isinstance(x, Scaled) else _scaled(x, None)
        return self.with_bias(_product(*given, local(self.weight), self.ranks))


def _scaled(x: Tensor, ranks: TensorRanks | None) -> Scaled:
    """Of x (batch, tokens, width), or of what `ranks` have of it together."""
    with torch.no_grad():
        values, scale = _quantized(x, FORWARD, ranks)
    return Scaled(values, scale, x if ranks is None else _source(x, ranks))


def use_fp8(module: nn.Module) -> None:
    """Let all linear layers in `module` run in 8-bit floats; their parameters stay as they are."""
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = Float8Linear


def compiler_options(block: Block, gathers: bool) -> dict[str, str | int | bool | Callable[..., Any]]:
    """For a block of these layers, by its norms and by whether it gathers what it multiplies."""
    not_joined = NOT_JOINED if isinstance(block.attention_norm, nn.RMSNorm) else {}
    return {**not_joined, **(IN_TILES if gathers else {})}


class WholeScaledInput(WholeInput):
    """Gives a module `Scaled` what `ranks` have of its input together, cast once for all of its products."""

    def given(self, x: Tensor) -> Scaled:
        return _scaled(x, self.ranks)
