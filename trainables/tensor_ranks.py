"""What tensor-parallel ranks send each other of hidden states: the tokens that each has a piece of, and summands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class TensorRanks:
    """The `size` ranks of the process group named `group`, which split the products of a block, and with
    `sequence_parallel` the tokens between them, a consecutive piece each. `rank` is this one's number. `asynchronous`:
    whether the compiler is to split the products beside a gather or a scatter, which it knows by their form.

    What is whole forward is summed backward, and the other way round (Shoeybi et al. 2019, Korthikanti et al. 2022).
    Tensors are (batch, tokens, width).
    """

    group: str
    size: int
    rank: int
    sequence_parallel: bool
    asynchronous: bool = False

    @classmethod
    def of(cls, group: ProcessGroup, sequence_parallel: bool, asynchronous: bool = False) -> TensorRanks:
        return cls(group.group_name, group.size(), group.rank(), sequence_parallel, asynchronous)

    def whole(self, x: Tensor) -> Tensor:
        """`gathered`, for products of which each rank computes a part: their gradients are summands of that of `x`."""
        return _whole(x, self)

    def shared(self, x: Tensor) -> Tensor:
        """x of any shape, which all ranks have, for what each rank computes a summand of."""
        return _whole(x, replace(self, sequence_parallel=False))

    def summed(self, x: Tensor) -> Tensor:
        """`reduced`, whose gradient every rank needs whole."""
        return _summed(x, self)

    def whole_shape(self, x: Tensor) -> torch.Size:
        """That of all ranks' tokens of `x`."""
        batch, tokens, width = x.shape
        return torch.Size((batch, tokens * self.size if self.sequence_parallel else tokens, width))

    def gathered(self, x: Tensor) -> Tensor:
        """All ranks' tokens of `x`, which autograd does not follow."""
        if not self.sequence_parallel:
            return x.view_as(x)
        if x.shape[0] == 1 and not self.asynchronous:
            rows = x.flatten(0, 1).contiguous()
            return _wait(_ops.all_gather_into_tensor(rows, self.size, self.group)).unsqueeze(0)
        pieces = _wait(_ops.all_gather_into_tensor(x.contiguous(), self.size, self.group))
        return torch.cat(pieces.chunk(self.size), dim=1)

    def reduced(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks, or where tokens are split this rank's piece of it, which autograd does not
        follow."""
        if not self.sequence_parallel:
            return _wait(_ops.all_reduce(x.contiguous(), "sum", self.group))
        if x.shape[0] == 1:
            rows = x.flatten(0, 1).contiguous()
            return _wait(_ops.reduce_scatter_tensor(rows, "sum", self.size, self.group)).unsqueeze(0)
        pieces = torch.cat(x.chunk(self.size, dim=1))
        return _wait(_ops.reduce_scatter_tensor(pieces, "sum", self.size, self.group))

    def largest(self, x: Tensor) -> Tensor:
        """Of each value of `x` the largest among the ranks, which autograd does not follow."""
        return _wait(_ops.all_reduce(x, "max", self.group))


def _wait(x: Tensor) -> Tensor:
    arrived: Tensor = _ops.wait_tensor(x)
    return arrived


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gathered(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.reduced(gradients[0]), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.reduced(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.gathered(gradients[0]), None


_whole: Callable[[Tensor, TensorRanks], Tensor] = _Whole.apply
_summed: Callable[[Tensor, TensorRanks], Tensor] = _Summed.apply
