"""Attention to keys before queries and to those of their own positions apart, each by a fast kernel, and merged.

cuDNN's kernels, twice as fast as others on Hopper, have causal masks of squares alone, as torch has them. Where queries
are only a part of a sequence, those keys that lie before all of them make a rectangle without a mask, and those at
their own positions a causal square. What comes of both is merged by the logarithms of their sums of exponentials;
given the merged results, either's backward pass makes its part of the gradients (Liu et al. 2023, "Ring Attention with
Blockwise Transformers", whose parts are other ranks').
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

_aten = torch.ops.aten

_SOME = 128
"""Tokens by which it is asked whether there is a kernel: there is none for a single one."""


def is_fast(q: Tensor, k: Tensor) -> bool:
    """Whether there are kernels for the parts, and none as fast for the whole: cuDNN's from Hopper on, where the width
    of heads allows it. On a CPU torch's own, so that trainings there are of the same code."""
    return q.device.type == "cpu" or _has_kernels(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[3])


@torch.compiler.assume_constant_result
def _has_kernels(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int) -> bool:
    """A constant of a compiled block."""
    return _asked(device, dtype, heads, key_heads, width)


@cache
def _asked(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int) -> bool:
    """Once a process, as it takes tensors to ask."""
    if device.type != "cuda" or torch.version.hip is not None or dtype != torch.bfloat16:
        return False
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    q, k = (torch.empty(1, count, _SOME, width, device=device, dtype=dtype) for count in (heads, key_heads))
    return can_use_cudnn_attention(SDPAParams(q, k, k, None, 0.0, False, True))


@torch.library.custom_op("wattune::merged_attention", mutates_args=())
def merged_attention(q: Tensor, keys_values: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
    """Causal attention of `q`, in as many pieces of a sequence, one after the other, as `starts` has positions where
    they begin, ascending.

    q: (batch, heads, queries, head_dim). keys_values: (2, batch, heads of them, sequence, head_dim), as many heads or
    fewer. The result is like `q`, and beside it, for the backward pass, the logarithms of the sums of exponentials,
    (pieces, batch, heads, queries / pieces, 1). An operator of its own, for recomputation to keep both and no parts.
    """
    output, logarithms = _results(q, starts)
    for (start, query, merged), logarithm in zip(_pieces(starts, q, output), logarithms, strict=True):
        end = start + query.shape[2]
        within, log_within = _attend(query, keys_values[..., start:end, :], is_causal=True)
        if start:
            before, log_before = _attend(query, keys_values[..., :start, :], is_causal=False)
            # Weights are in fp32, and so is the sum, of which two kernels make the result.
            share = torch.sigmoid(log_before - log_within)
            torch.addcmul(within * (1 - share), before, share, out=merged)
            log_within = torch.logaddexp(log_within, log_before)
        else:
            merged.copy_(within)
        logarithm.copy_(log_within)
    return output, logarithms


def _results(q: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
    """Room for both."""
    batch, heads, queries, _ = q.shape
    shape = len(starts), batch, heads, queries // len(starts), 1
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))


@merged_attention.register_fake
def _(q: Tensor, keys_values: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
    return _results(q, starts)


@torch.library.custom_op("wattune::merged_attention_backward", mutates_args=())
def _back(
    gradient: Tensor, q: Tensor, keys_values: Tensor, output: Tensor, logarithms: Tensor, starts: list[int]
) -> tuple[Tensor, Tensor]:
    """The gradients of queries, and of keys and values, of that of the merged results."""
    if gradient.stride() != output.stride():  # torch keeps cuDNN's plans by the strides of the inputs alone
        gradient = torch.empty_like(output).copy_(gradient)
    of_queries, of_keys_values = torch.empty_like(q), torch.empty_like(keys_values)
    pieces = list(_pieces(starts, q, output, gradient, of_queries))
    finds_some = False  # where it is to put its gradients of keys: the last piece, which has the most keys, is first
    for (start, query, merged, above, below), logarithm in reversed(list(zip(pieces, logarithms, strict=True))):
        end = start + query.shape[2]
        if not finds_some:
            of_keys_values[..., end:, :] = 0.0
        for first, last in [(start, end), (0, start)] if start else [(start, end)]:
            these, is_within = keys_values[..., first:last, :], last == end
            found = _attend_back(above, query, these, merged, logarithm, is_within)
            _put(below, found[0], not is_within)
            for whole, part in zip(of_keys_values, found[1:], strict=True):
                _put(whole[:, :, first:last], part, finds_some)
        finds_some = True
    return of_queries, of_keys_values


@_back.register_fake
def _(
    gradient: Tensor, q: Tensor, keys_values: Tensor, output: Tensor, logarithms: Tensor, starts: list[int]
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(keys_values)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor, list[int]], output: object) -> None:
    q, keys_values, ctx.starts = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(q, keys_values, *output)  # type: ignore[misc]


def _backward(
    ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, _: Tensor | None
) -> tuple[Tensor, Tensor, None]:
    of_queries, of_keys_values = _back(gradient, *ctx.saved_tensors, ctx.starts)  # type: ignore[attr-defined]
    return of_queries, of_keys_values, None


merged_attention.register_autograd(_backward, setup_context=_keep)


def _put(there: Tensor, values: Tensor, adds: bool) -> None:
    """In the place of what is there, or added to it."""
    if adds:
        there.add_(values)
    else:
        there.copy_(values)


def _pieces(starts: list[int], *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Where each piece starts, and its part of each of the tensors."""
    return zip(starts, *(tensor.chunk(len(starts), dim=2) for tensor in tensors), strict=True)


def _attend(q: Tensor, keys_values: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """A part's results, and the logarithms of the sums of exponentials in fp32, (batch, heads, queries, 1)."""
    k, v = keys_values
    if q.is_cuda:
        output, logarithms, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)
    else:
        output, logarithms = _aten._scaled_dot_product_flash_attention_for_cpu(q, *_for_each(q, k, v), 0.0, is_causal)
    return output, logarithms.view(*q.shape[:3], 1)


def _attend_back(
    gradient: Tensor, q: Tensor, keys_values: Tensor, output: Tensor, logarithms: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A part's gradients of queries, keys and values, given the gradient and the merged results of all parts."""
    k, v = keys_values
    if q.is_cuda:
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # the state of what drops out, which nothing does
        sizes = None, None, None, q.shape[2], k.shape[2]  # neither a bias nor sequences of several lengths
        of_queries, of_keys, of_values = _aten._scaled_dot_product_cudnn_attention_backward(
            gradient, q, k, v, output, logarithms, unused, unused, *sizes, 0.0, is_causal
        )
        return of_queries, of_keys, of_values
    of_queries, *of_each = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, *_for_each(q, k, v), output, logarithms.squeeze(-1), 0.0, is_causal
    )
    of_keys, of_values = (each.unflatten(1, (k.shape[1], -1)).sum(2) for each in of_each)
    return of_queries, of_keys, of_values


def _for_each(q: Tensor, *keys: Tensor) -> list[Tensor]:
    """Keys or values once for each head of queries, as kernels for CPUs take them."""
    return [each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in keys]
