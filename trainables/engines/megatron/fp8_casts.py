"""Casts to 8-bit floats: E4M3 forward and E5M2 for gradients, as in Micikevicius et al. 2022."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

FORWARD = torch.float8_e4m3fn
GRADIENT = torch.float8_e5m2

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
def magnitude(x: Tensor) -> Tensor:
    """The largest magnitude in `x`, an fp32 scalar above zero."""
    return x.abs().amax().float().clamp(min=1e-12)


@_fused
def cast(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` in 8 bits so that `largest` is the type's largest magnitude, and the fp32 scalar that undoes the scaling."""
    scale = torch.finfo(dtype).max / largest
    return (x.float() * scale).to(dtype), scale.reciprocal()


@_fused
def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`cast` by the largest magnitude in `x` itself."""
    return cast(x, magnitude(x), dtype)


@_fused
def transposed(x: Tensor) -> Tensor:
    """(columns, rows) of (rows, columns), contiguous."""
    return x.t().contiguous()
