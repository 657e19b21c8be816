"""How fast kernels of causal attention are: by passes, by the tokens of a sequence and by the width of heads."""

from __future__ import annotations

from typing import NamedTuple

WIDE, NARROW = 128, 64
"""Widths of heads that kernels were measured with. Between them, a FLOP takes as much longer as there are exponentials
to fewer products."""


class Pass(NamedTuple):
    """Time of a FLOP forward or backward over many tokens, in that of `Coefficients.attention_flops`; over S tokens it
    takes 1 + `near` / S of that, as blocks along the diagonal are computed whole, and short kernels hardly fill a
    GPU."""

    time: float
    near: float

    def over(self, tokens: int) -> float:
        return self.time * (1 + self.near / tokens)


class Kernel(NamedTuple):
    """Forward and backward, of heads 128 wide and of narrow ones. `joules`: of a FLOP, in those of a product's.
    `in_parts`: whether it is of keys before queries and of those at their positions, for other kernels to merge; such
    take fewer heads of keys than of queries."""

    wide: tuple[Pass, Pass]
    narrow: tuple[Pass, Pass]
    joules: float = 1.0
    in_parts: bool = False

    def times(self, tokens: int, head_dim: int) -> tuple[float, float]:
        """Of a FLOP, forward and backward."""
        share = min(1.0, max(0.0, (1 / head_dim - 1 / WIDE) / (1 / NARROW - 1 / WIDE)))
        forward, backward = (
            (1 - share) * wide.over(tokens) + share * narrow.over(tokens)
            for wide, narrow in zip(self.wide, self.narrow, strict=True)
        )
        return forward, backward

    def slower(self, forward: float, backward: float) -> Kernel:
        """One that takes so many times as long."""
        by = forward, backward
        return self._replace(wide=_scaled(self.wide, by), narrow=_scaled(self.narrow, by))


def _scaled(passes: tuple[Pass, Pass], by: tuple[float, float]) -> tuple[Pass, Pass]:
    forward, backward = (each._replace(time=factor * each.time) for each, factor in zip(passes, by, strict=True))
    return forward, backward


def _measured(*tops_and_nears: tuple[float, float]) -> Kernel:
    """By the TFLOP/s over many tokens and `Pass.near`, forward and backward, wide and narrow; in the time of its own
    two passes together, of heads 128 wide, where one backward has two and a half times the FLOPs (Dao 2023)."""
    (ahead, _), (back, _), *_ = tops_and_nears
    both = 3.5 / (1 / ahead + 2.5 / back)
    first, second, third, fourth = (Pass(both / top, near) for top, near in tops_and_nears)
    return Kernel((first, second), (third, fourth))


CUDNN = _measured((690, 460), (620, 1180), (485, 440), (465, 1000))
FLASH_2 = _measured((340, 390), (322, 700), (308, 420), (285, 615))
"""cuDNN's and FlashAttention-2's, as measured on H100 from 512 to 16,384 tokens, within 3%
(benchmarks/results/attention_1xh100.txt)."""

CUDNN_IN_PARTS = _measured((690, 1180), (620, 2600), (485, 1150), (465, 2200))._replace(in_parts=True)
"""cuDNN's for a rank of several that share a sequence: a causal square of its own queries and keys, and rectangles of
the keys before both of its pieces and of those between them. Of sequences of 8192 tokens on 2 ranks the kernels took
1.08 times as long as half of a square forward and 1.15 backward, on the rank that takes longest, with 16 heads and with
32 (benchmarks/results/context_1xh200.txt)."""

MERGED, PARTED = 6, 4
"""Bytes of memory traffic for which one of the parts' results is merged into the others, or a gradient of queries added
up, and for which a key or a value is copied, or its gradient."""

FLASH_2_ON_HOPPER = 1.95
"""Time of FlashAttention-2 in that of cuDNN there, over many tokens."""

FLASH_2_JOULES_ON_HOPPER = 1.3
"""Joules of a FLOP of FlashAttention-2's there, in those of a large product's, which cuDNN's needs, too: by power and
clock at 700 W (benchmarks/results/attention_power_1xh100.txt). It does without Hopper's own instructions, and so its
operands go through registers."""
