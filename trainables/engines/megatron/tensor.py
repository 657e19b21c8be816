"""Products and norms of a block split over tensor-parallel ranks (Shoeybi et al. 2019, Korthikanti et al. 2022).

Parameters are DTensors, by which FSDP2 and checkpoints know what a rank has of them. What a block computes are plain
tensors: DTensors take their own time for each operator, and compiled blocks of them fail to recompute with torch 2.13.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from trainables.tensor_ranks import TensorRanks


def local(x: Tensor, summand: bool = False) -> Tensor:
    """This rank's part of what is a DTensor where ranks split it or share it. Its gradient is laid out likewise, or is
    a `summand` of it."""
    return x.to_local(grad_placements=[Partial()] if summand else None) if isinstance(x, DTensor) else x


class SplitLinear(nn.Linear):
    """An `nn.Linear` of which each rank has some of the outputs, or a summand of all of them.

    `ranks`: those that sum what they compute; None where each has outputs of its own.
    """

    ranks: TensorRanks | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks is None:
            return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))
        return self.with_bias(self.ranks.summed(F.linear(x, local(self.weight))))

    def with_bias(self, y: Tensor) -> Tensor:
        if self.bias is None:
            return y
        # Where a rank adds it to its own tokens alone, so is its gradient of them alone.
        return y + local(self.bias, summand=self.ranks is not None and self.ranks.sequence_parallel)


class SplitRMSNorm(nn.RMSNorm):
    """An `nn.RMSNorm` of this rank's own tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, list(self.normalized_shape), local(self.weight, summand=True), self.eps)


class SplitLayerNorm(nn.LayerNorm):
    """An `nn.LayerNorm` of this rank's own tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = local(self.weight, summand=True), local(self.bias, summand=True)
        return F.layer_norm(x, list(self.normalized_shape), weight, bias, self.eps)


_SPLIT: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: SplitLinear,
    nn.RMSNorm: SplitRMSNorm,
    nn.LayerNorm: SplitLayerNorm,
}


def _split(module: nn.Module) -> nn.Module:
    """`module` itself, of the class that takes this rank's part of its parameters."""
    module.__class__ = _SPLIT.get(type(module), type(module))
    return module


class WholeInput(ParallelStyle):
    """Gives a module what `ranks` have of its input together, once for all of its products."""

    def __init__(self, ranks: TensorRanks) -> None:
        super().__init__()
        self.ranks = ranks

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, inputs: (self.given(inputs[0]),))
        return module

    def given(self, x: Tensor) -> object:
        return self.ranks.whole(x)


class Columns(ColwiseParallel):
    """A linear layer whose outputs are split over ranks, given what all of them have."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(_split(module), device_mesh, self._partition_linear_fn)


class Rows(RowwiseParallel):
    """A linear layer whose inputs are split over `ranks`, which sum what comes out."""

    def __init__(self, ranks: TensorRanks) -> None:
        super().__init__()
        self.ranks = ranks

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split = _split(module)
        split.ranks = self.ranks  # type: ignore[assignment]
        return distribute_module(split, device_mesh, self._partition_linear_fn)


class OwnTokens(ParallelStyle):
    """A norm of each rank's own tokens, whose parameters all ranks have."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(_split(module), device_mesh)
