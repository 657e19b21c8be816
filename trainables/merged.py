"""Attention of queries in two pieces of a sequence, in parts that fast kernels have, which are merged.

cuDNN's kernels, twice as fast as others on Hopper, have causal masks of squares alone, as torch has them. Queries of
both pieces and the keys at their own positions make a causal square, as if nothing lay between. To the keys before both
pieces, and to those between them, attention is without a mask: two rectangles, of all queries and of the later piece's.
What comes of the parts is merged by the logarithms of their sums of exponentials; given the merged results, each part's
backward pass makes its part of the gradients (Liu et al. 2023, "Ring Attention with Blockwise Transformers", whose
parts are other ranks').
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

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


@torch.library.custom_op("wattune::merged_parts", mutates_args=())
def merged_parts(q: Tensor, keys_values: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Causal attention of the queries of rank `rank`, in pieces `rank` and 2 `ranks` - 1 - `rank` of a sequence of 2
    `ranks`, one after the other.

    q: (batch, heads, queries, head_dim). keys_values: (ranks, 2, batch, heads of them, queries, head_dim), what each of
    the ranks has of the keys and of the values, with as many heads or fewer. The result is like `q`, and beside it, for
    the backward pass, the logarithms of the sums of exponentials, (batch, heads, queries, 1). An operator of its own,
    for recomputation to keep both and no parts.
    """
    output, logarithms = _attend(q, keys_values[rank], is_causal=True)
    output, logarithms = _laid_out(output, q), logarithms.contiguous()
    for first, others in _others(keys_values, rank):
        there = output[:, :, first:], logarithms[:, :, first:]
        _merge(*there, *_attend(q[:, :, first:], _joined(others), is_causal=False))
    return output, logarithms


@merged_parts.register_fake
def _(q: Tensor, keys_values: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((*q.shape[:3], 1), dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("wattune::merged_parts_backward", mutates_args=())
def _back(
    gradient: Tensor, q: Tensor, keys_values: Tensor, output: Tensor, logarithms: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """The gradients of queries, and of keys and values, of that of the merged results."""
    gradient = _laid_out(gradient, output)  # torch keeps cuDNN's plans by the strides of the inputs alone
    of_queries, *of_own = _attend_back(gradient, q, keys_values[rank], output, logarithms, is_causal=True)
    of_queries, of_keys_values = _laid_out(of_queries, q), torch.empty_like(keys_values)
    _put([of_keys_values[rank]], of_own)
    of_keys_values[:rank, ..., q.shape[2] // 2 :, :] = 0.0
    both = zip(_others(keys_values, rank), _others(of_keys_values, rank), strict=True)
    for (first, others), (_, of_others) in both:
        above, query, merged, logarithm = (each[:, :, first:] for each in (gradient, q, output, logarithms))
        found = _attend_back(above, query, _joined(others), merged, logarithm.contiguous(), is_causal=False)
        of_queries[:, :, first:] += found[0]
        _put(of_others, found[1:])
    return of_queries, of_keys_values


@_back.register_fake
def _(
    gradient: Tensor, q: Tensor, keys_values: Tensor, output: Tensor, logarithms: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(keys_values)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor, int], output: object) -> None:
    q, keys_values, ctx.rank = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(q, keys_values, *output)  # type: ignore[misc]


def _backward(
    ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, _: Tensor | None
) -> tuple[Tensor, Tensor, None]:
    of_queries, of_keys_values = _back(gradient, *ctx.saved_tensors, ctx.rank)  # type: ignore[attr-defined]
    return of_queries, of_keys_values, None


merged_parts.register_autograd(_backward, setup_context=_keep)


def _others(keys_values: Tensor, rank: int) -> Iterator[tuple[int, list[Tensor]]]:
    """From which query on they attend, without a mask, to what of others' keys and values."""
    ranks, length = keys_values.shape[0], keys_values.shape[4] // 2
    if rank:
        yield 0, [keys_values[other][..., :length, :] for other in range(rank)]
    if rank + 1 < ranks:
        yield length, [keys_values[other] for other in range(rank + 1, ranks)]


def _joined(others: list[Tensor]) -> Tensor:
    return others[0] if len(others) == 1 else torch.cat(others, dim=3)


def _put(there: list[Tensor], found: Sequence[Tensor]) -> None:
    """Gradients of keys and of values, of all of these one after the other."""
    for part, values in enumerate(found):
        for one, own in zip(there, values.chunk(len(there), dim=2), strict=True):
            one[part] = own


def _laid_out(found: Tensor, like: Tensor) -> Tensor:
    """In the order that a tensor like that one has."""
    strides = torch.empty_like(like, device="meta").stride()
    return found if found.stride() == strides else torch.empty_like(like).copy_(found)


def _merge(output: Tensor, logarithms: Tensor, part: Tensor, log_part: Tensor) -> None:
    """Into the results of other parts, in place. Weights are in fp32."""
    if output.is_cuda:
        from trainables.merging import merge  # there is no Triton without a GPU

        merge(output, logarithms, part, log_part)
        return
    share = torch.sigmoid(log_part - logarithms)
    output.copy_(output * (1 - share) + part * share)
    logarithms.copy_(torch.logaddexp(logarithms, log_part))


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
