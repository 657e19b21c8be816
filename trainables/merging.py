"""Results of two parts of attention, merged by one kernel. Triton, which it takes, comes with torch for GPUs alone."""

# mypy: allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 32
"""Of a head, that one program merges."""


def merge(output: Tensor, logarithms: Tensor, part: Tensor, log_part: Tensor) -> None:
    """`trainables.merged` says of what."""
    batch, heads, tokens, width = output.shape
    strides = [stride for each in (output, part, logarithms, log_part) for stride in each.stride()[:3]]
    programs = triton.cdiv(tokens, TOKENS), batch * heads
    _merge[programs](
        output, part, logarithms, log_part, *strides, heads, tokens, width, TOKENS, triton.next_power_of_2(width)
    )


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    output,
    part,
    logarithms,
    log_part,
    output_batch,
    output_head,
    output_token,
    part_batch,
    part_head,
    part_token,
    log_batch,
    log_head,
    log_token,
    log_part_batch,
    log_part_head,
    log_part_token,
    heads,
    tokens,
    width,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    is_token = token < tokens
    is_value = is_token[:, None] & (column < width)[None, :]
    log_there = logarithms + batch * log_batch + head * log_head + token * log_token
    log_here = log_part + batch * log_part_batch + head * log_part_head + token * log_part_token
    there = output + batch * output_batch + head * output_head + token[:, None] * output_token + column[None, :]
    here = part + batch * part_batch + head * part_head + token[:, None] * part_token + column[None, :]
    log_one = tl.load(log_there, is_token, 0.0)
    log_other = tl.load(log_here, is_token, 0.0)
    share = tl.sigmoid(log_other - log_one)
    one = tl.load(there, is_value, 0.0).to(tl.float32)
    other = tl.load(here, is_value, 0.0).to(tl.float32)
    tl.store(there, one * (1 - share[:, None]) + other * share[:, None], is_value)
    # The larger logarithm of the two, and what the smaller adds to it.
    most = tl.maximum(log_one, log_other)
    tl.store(log_there, most + tl.log(1 + tl.exp(-tl.abs(log_other - log_one))), is_token)
