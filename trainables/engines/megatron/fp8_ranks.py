"""What tensor-parallel ranks send each other for products in 8-bit floats: 8 bits where they gather, the full width
where they sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainables.engines.megatron.fp8_casts import cast, magnitude, quantize

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class TensorRanks:
    """The `size` ranks of the process group named `group`, which split the products of a block, and with
    `sequence_parallel` the tokens between them.

    What is whole forward is summed backward, and the other way round (Shoeybi et al. 2019, Korthikanti et al. 2022).
    """

    group: str
    size: int
    sequence_parallel: bool

    def whole_shape(self, x: Tensor) -> torch.Size:
        """That of all ranks' tokens of x (batch, tokens, width)."""
        batch, tokens, width = x.shape
        return torch.Size((batch, tokens * self.size if self.sequence_parallel else tokens, width))

    def whole(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """x (batch, tokens, width) of all ranks in 8 bits, and the fp32 scalar that undoes the scaling.

        Tokens that are split have one scale, by the largest magnitude among the ranks, and are gathered in 8 bits.
        Those that all ranks have they cast alike.
        """
        if not self.sequence_parallel:
            return quantize(x, dtype)
        largest = _wait(_ops.all_reduce(magnitude(x), "max", self.group))
        part, scale = cast(x, largest, dtype)
        # As bytes, since not every process group knows floats of 8 bits.
        pieces = _wait(_ops.all_gather_into_tensor(part.contiguous().view(torch.uint8), self.size, self.group))
        in_order = pieces.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)
        return in_order.view(dtype), scale

    def summed(self, x: Tensor) -> Tensor:
        """The sum of x (batch, tokens, width) over the ranks, or where tokens are split this rank's piece of it."""
        if not self.sequence_parallel:
            return _wait(_ops.all_reduce(x.contiguous(), "sum", self.group))
        pieces = x.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1)
        return _wait(_ops.reduce_scatter_tensor(pieces.contiguous(), "sum", self.size, self.group))


def _wait(x: Tensor) -> Tensor:
    arrived: Tensor = _ops.wait_tensor(x)
    return arrived
