"""Context parallelism of the `deepspeed` engine: ranks exchange pieces of sequences for heads (Jacobs et al. 2023)."""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
from deepspeed.sequence.layer import single_all_to_all
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from trainables.model import causal_attention


@torch.library.custom_op("wattune::exchanged", mutates_args=())
def exchanged(x: Tensor, group: str, scatter: int, gather: int) -> Tensor:
    """DeepSpeed's exchange between the ranks of the process group of that name: of dimension `scatter` of `x`, 1 or 2
    of (batch, sequence, heads, head_dim), each has its part, and of `gather`, the other one, all. Collective.

    An operator of its own, for compilers to let be: traced, the exchange loses its gradient.
    """
    result: Tensor = single_all_to_all(x, scatter, gather, 0, _ranks(group))
    return result


@exchanged.register_fake
def _(x: Tensor, group: str, scatter: int, gather: int) -> Tensor:
    size, shape = _ranks(group).size(), list(x.shape)
    shape[scatter] //= size
    shape[gather] *= size
    return x.new_empty(shape)


def _ranks(group: str) -> ProcessGroup:
    return _resolve_process_group(GroupName(group))


def _keep(ctx: Any, inputs: tuple[Tensor, str, int, int], output: Tensor) -> None:
    _, *ctx.way = inputs


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    group, scatter, gather = ctx.way
    return exchanged(gradient, group, gather, scatter), None, None, None


exchanged.register_autograd(_back, setup_context=_keep)


class Ulysses:
    """Causal attention over sequences of which each rank of `group` holds a piece (Jacobs et al. 2023).

    As DeepSpeed's `DistributedAttention`. DeepSpeed takes the ranks of `group` for data-parallel ones. Told of them
    (through `mesh_param`, `sequence_parallel_size` or `mpu`), release 0.19 scales gradients or their norm wrongly.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group.group_name

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v: (batch, heads, sequence / ranks, head_dim), keys and values with as many or fewer heads; like q."""
        q, k, v = (exchanged(x.transpose(1, 2), self.group, 2, 1).transpose(1, 2) for x in (q, k, v))
        output: Tensor = exchanged(causal_attention(q, k, v).transpose(1, 2), self.group, 1, 2)
        return output.transpose(1, 2)
