"""Linear layers whose matrix products run in 8-bit floats, each tensor scaled anew for every product.

E4M3 forward and E5M2 for gradients, as in Micikevicius et al. 2022; sums and outputs keep the input's precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

FORWARD = torch.float8_e4m3fn
GRADIENT = torch.float8_e5m2

COMPILER_OPTIONS = {"triton.mix_order_reduction": False}
"""For compiled blocks with these layers and RMS norms. torch 2.11 to 2.13 would join the two sums of a norm's backward
pass, over the width and over the tokens, and with them all that leads to the scaled input of a product, to one kernel
that takes 7 times as long as several. On H200 blocks of Llama-3-8B are 4% faster without; those of GPT-3, whose layer
norms are not joined with as much, 2% slower."""

T = TypeVar("T")


def _fused(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, as few kernels also in blocks that are not compiled: its many small ones take as long there as the
    products. A compiled block makes it part of its own graph."""

    @cache
    def compiled() -> Callable[..., T]:
        return torch.compile(function, dynamic=True)  # imports the compiler, which takes as long as the engine itself

    @wraps(function)
    def run(x: Tensor, *arguments: Any) -> T:
        plain = torch.compiler.is_compiling() or not x.is_cuda
        return function(x, *arguments) if plain else compiled()(x, *arguments)

    return run


@_fused
def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` in 8 bits so that its largest magnitude is the type's, and the fp32 scalar that undoes the scaling."""
    largest = x.abs().amax().float().clamp(min=1e-12)
    scale = torch.finfo(dtype).max / largest
    return (x.float() * scale).to(dtype), scale.reciprocal()


class _Product(torch.autograd.Function):
    """x (tokens, in) times the transpose of weight (out, in)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = quantize(x, FORWARD)
        w8, w_scale = quantize(weight, FORWARD)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.dtype = x.dtype
        return _multiply(x8, w8.t(), x_scale, w_scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = quantize(gradients[0], GRADIENT)
        for_x = _multiply(g8, _by_columns(w8), g_scale, w_scale, ctx.dtype)
        for_weight = _multiply(_transposed(g8), _by_columns(x8), g_scale, x_scale, ctx.dtype)
        return for_x, for_weight


_product: Callable[[Tensor, Tensor], Tensor] = _Product.apply


@_fused
def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous()


def _by_columns(x: Tensor) -> Tensor:
    """`x` (rows, columns) laid out by columns, as the hardware wants the right-hand side of a product."""
    return _transposed(x).t()


def _multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype)


class Float8Linear(nn.Linear):
    """`nn.Linear` in 8-bit floats; widths and the number of tokens must be multiples of 16."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _product(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def use_fp8(module: nn.Module) -> None:
    """Let all linear layers in `module` run in 8-bit floats; their parameters stay as they are."""
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = Float8Linear
