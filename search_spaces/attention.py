"""How fast kernels of causal attention are: by passes, by the tokens of a sequence and by the width of heads."""

from __future__ import annotations

from typing import NamedTuple

NARROW = 64
"""Width of heads up to which kernels are slower: there are as many exponentials to fewer products."""


class Pass(NamedTuple):
    """Time of a FLOP forward or backward over many tokens, in that of `Coefficients.attention_flops`; over S tokens it
    takes 1 + `near` / S of that, as blocks along the diagonal are computed whole, and short kernels hardly fill a
    GPU."""

    time: float
    near: float

    def over(self, tokens: int) -> float:
        return self.time * (1 + self.near / tokens)


class Kernel(NamedTuple):
    """Forward and backward, of heads 128 wide and of narrow ones. `joules`: of a FLOP, in those of a product's."""

    wide: tuple[Pass, Pass]
    narrow: tuple[Pass, Pass]
    joules: float = 1.0

    def times(self, tokens: int, head_dim: int) -> tuple[float, float]:
        """Of a FLOP, forward and backward."""
        forward, backward = self.narrow if head_dim <= NARROW else self.wide
        return forward.over(tokens), backward.over(tokens)

    def slower(self, forward: float, backward: float) -> Kernel:
        """One that takes so many times as long."""
        by = forward, backward
        return Kernel(_scaled(self.wide, by), _scaled(self.narrow, by), self.joules)


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

FLASH_2_ON_HOPPER = 1.95
"""Time of FlashAttention-2 in that of cuDNN there, over many tokens."""

FLASH_2_JOULES_ON_HOPPER = 1.3
"""Joules of a FLOP of FlashAttention-2's there, in those of a large product's, which cuDNN's needs, too: by power and
clock at 700 W (benchmarks/results/attention_power_1xh100.txt). It does without Hopper's own instructions, and so its
operands go through registers."""
