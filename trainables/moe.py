"""Mixtures of experts: routing, balancing, and experts spread over ranks. No token is dropped, and all experts get
equally many: where tokens go changes as a router learns, and a trial of few steps is to measure layouts, not routers.

A rank holds whole experts of its own (expert parallelism, Lepikhin et al. 2020), each cut along its width where tensor
parallelism does so, and multiplies them with the tokens that the other ranks send it as one grouped matrix product.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from search_spaces.models import ModelShape
from trainables.tensor_ranks import TensorRanks


@dataclass(frozen=True)
class ExpertLayout:
    """With whom a rank shares the experts of a block; the default is a single process.

    - `expert_group`: ranks with the same parameters but for experts, of which each holds an equal run.
    - `tensor_ranks`: those among which the width of each expert is split; they are given the same sequences, or the
      pieces of them that they have.
    - `context_group`: ranks that hold the other tokens of the same sequences.
    - `loss_scale`: what the cross-entropy of a microbatch is multiplied by before its backward pass.
    """

    expert_group: ProcessGroup | None = None
    tensor_ranks: TensorRanks | None = None
    context_group: ProcessGroup | None = None
    loss_scale: float = 1.0

    @property
    def expert_size(self) -> int:
        return 1 if self.expert_group is None else self.expert_group.size()

    @property
    def tensor_size(self) -> int:
        return 1 if self.tensor_ranks is None else self.tensor_ranks.size

    @property
    def context_size(self) -> int:
        return 1 if self.context_group is None else self.context_group.size()

    def local_experts(self, experts: int) -> range:
        """Which of a block's `experts` this rank holds."""
        count, rank = experts // self.expert_size, 0 if self.expert_group is None else self.expert_group.rank()
        return range(rank * count, (rank + 1) * count)

    def local_width(self, width: int) -> slice:
        """Which part of an expert's width this rank holds."""
        share, rank = width // self.tensor_size, 0 if self.tensor_ranks is None else self.tensor_ranks.rank
        return slice(rank * share, (rank + 1) * share)


ONE_PROCESS = ExpertLayout()

CHOSEN = 32.0
"""What the scores of experts that a token goes to are raised by: far more than scores differ."""


def evenly(logits: Tensor, count: int) -> Tensor:
    """Scores by which each token's best `count` experts are the next ones in turn, so that all get equally many.

    `logits` (..., num_experts) of tokens in order; the result, of that shape, is in fp32. What a token's experts are
    scored among each other stays as it was, and its gradient. Routers that have learned to balance come close to this
    state, in which mixtures are timed elsewhere, too (`--moe-router-force-load-balancing` of Megatron-LM,
    `debug.moe_force_load_balance` of torchtitan); how full young ones have their experts depends on the very rate at
    which they learn.
    """
    experts = torch.arange(logits.shape[-1], device=logits.device)
    tokens = torch.arange(logits[..., 0].numel(), device=logits.device).view(*logits.shape[:-1], 1)
    return logits + CHOSEN * ((experts - count * tokens) % logits.shape[-1] < count)


def choose_experts(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax and choice of the `count` best experts for each token (Jiang et al. 2024), as many tokens for each.

    From scores (..., num_experts): probabilities (..., num_experts) in fp32, and of the experts chosen, the gates,
    which sum to one, and the numbers, both (..., count).
    """
    probabilities = evenly(logits, count).softmax(dim=-1)
    gates, experts = probabilities.topk(count, dim=-1)
    return probabilities, gates / gates.sum(dim=-1, keepdim=True), experts


def balance_loss(probabilities: Tensor, experts: Tensor, context_group: ProcessGroup | None = None) -> Tensor:
    """Load-balancing loss (Fedus et al. 2021, equation 4) of each sequence, averaged over the sequences; 1 at balance.

    num_experts * sum_i f_i P_i, with P_i the mean probability of expert i and f_i its share of the choices made, as
    Megatron-LM counts it. `probabilities` (batch, sequence, num_experts) and the `experts` chosen (batch, sequence,
    count) are of the tokens of this rank; the results of a context group's ranks add up to the loss.
    """
    ranks = 1 if context_group is None else context_group.size()
    choices = torch.zeros_like(probabilities).scatter_(-1, experts, 1.0).sum(dim=1)
    if context_group is not None:
        choices = _wait(_ops.all_reduce(choices, "sum", context_group.group_name))
    tokens = ranks * experts.shape[1]
    shares, means = choices / (tokens * experts.shape[2]), probabilities.sum(dim=1) / tokens
    return probabilities.shape[-1] * (shares * means).sum(dim=-1).mean()


@torch.compiler.disable  # for the reason that `_whole` is
def attach_loss(x: Tensor, loss: Tensor, scale: float) -> Tensor:
    """`x` itself, whose backward pass also goes through `scale * loss`: so a part of the loss needs no way to the end
    of the model."""
    return _attach(x, loss, scale)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of Shazeer 2020."""
    return F.silu(gate) * up


class Experts(nn.Module):
    """A rank's share of a block's SwiGLU experts."""

    def __init__(self, shape: ModelShape, layout: ExpertLayout) -> None:
        super().__init__()
        self.local, self.width = layout.local_experts(shape.num_experts), layout.local_width(shape.ffn_hidden)
        count, hidden, width = len(self.local), shape.hidden, self.width.stop - self.width.start
        self.gate = nn.Parameter(torch.empty(count, hidden, width))
        self.up = nn.Parameter(torch.empty(count, hidden, width))
        self.down = nn.Parameter(torch.empty(count, width, hidden))

    def forward(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """Tokens (rows, hidden) in the order of the local experts, those of expert i before row `ends[i]`.

        With tensor parallelism the result is this rank's summand of it.
        """
        inner = swiglu(grouped_matmul(tokens, self.gate, ends), grouped_matmul(tokens, self.up, ends))
        return grouped_matmul(inner, self.down, ends)

    @torch.no_grad()
    def load(self, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        """Take this rank's part of one of its experts, whose whole weights are given as `nn.Linear` has them."""
        index = self.local.index(expert)
        self.gate[index].copy_(gate[self.width].T)
        self.up[index].copy_(up[self.width].T)
        self.down[index].copy_(down[:, self.width].T)


class MoE(nn.Module):
    """A mixture of experts in place of a feed-forward network: (batch, sequence, hidden) to the same shape.

    With tensor parallelism each rank computes one summand of everything between the input and the output, so that
    gradients are summands too; `TensorRanks.whole` and `summed` mark where.
    """

    def __init__(self, shape: ModelShape, layout: ExpertLayout) -> None:
        super().__init__()
        self.layout, self.num_experts, self.experts_per_token = layout, shape.num_experts, shape.experts_per_token
        # The mean over the context-parallel ranks, and the sum over the tensor-parallel ones, is the loss once.
        self.balance_scale = shape.router_aux_loss * layout.loss_scale * layout.context_size / layout.tensor_size
        self.router = nn.Linear(shape.hidden, shape.num_experts, bias=False)
        self.experts = Experts(shape, layout)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.router.weight
        ranks = self.layout.tensor_ranks
        if ranks is not None:
            x, scores = _whole(x, ranks), ranks.shared(scores)
        logits = F.linear(x, scores)
        probabilities, gates, experts = choose_experts(logits, self.experts_per_token)
        loss = balance_loss(probabilities, experts, self.layout.context_group) if self.balance_scale else None
        outs = self._chosen(x.flatten(0, 1), experts.flatten(0, 1), loss).unflatten(0, x.shape[:2])
        out = (outs * gates.type_as(outs).unsqueeze(-1)).sum(dim=2)
        return out if ranks is None else ranks.summed(out)

    @torch.compiler.disable
    def _chosen(self, tokens: Tensor, experts: Tensor, loss: Tensor | None) -> Tensor:
        """Outputs (rows, chosen, hidden) of the experts (rows, chosen) for tokens (rows, hidden)."""
        if loss is not None:
            tokens = attach_loss(tokens, loss, self.balance_scale)
        sort = experts.flatten().sort(stable=True)
        every = torch.arange(self.num_experts, device=tokens.device)
        ends = torch.searchsorted(sort.values, every, right=True, out_int32=True)
        order, inverse = sort.indices, _inverse(sort.indices)
        rows = self._exchanged(_take(tokens, order, inverse, self.experts_per_token), ends)
        outputs: Tensor = _take(rows, inverse, order, 1).unflatten(0, experts.shape)
        return outputs

    def _exchanged(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows in the order of all experts, those of expert i before row `ends[i]`, through their experts."""
        group = self.layout.expert_group
        if group is None:
            outputs: Tensor = self.experts(rows, ends)
            return outputs
        ranks, count = group.size(), len(self.experts.local)
        sent = ends.diff(prepend=ends.new_zeros(1)).view(ranks, count)
        received = _all_to_all(sent, [1] * ranks, [1] * ranks, group)
        sends, receives = torch.stack((sent.sum(dim=1), received.sum(dim=1))).tolist()
        rows = _exchange(rows, receives, sends, group)
        # They come in the order of their senders, and within it of experts.
        expert = torch.arange(count, device=rows.device).repeat(ranks)
        order = expert.repeat_interleave(received.flatten(), output_size=sum(receives)).argsort(stable=True)
        inverse = _inverse(order)
        rows = self.experts(_take(rows, order, inverse, 1), received.sum(dim=0).cumsum(dim=0, dtype=torch.int32))
        return _exchange(_take(rows, inverse, order, 1), sends, receives, group)


# Where nothing is gathered the result is a view of `x`, and a compiled graph that returns a view of what it was given
# forgets the sum in its backward pass (seen with torch 2.13).
@torch.compiler.disable
def _whole(x: Tensor, ranks: TensorRanks) -> Tensor:
    return ranks.whole(x)


def grouped_matmul(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows of x (rows, width_in) times the matrix of their group: weights (groups, width_in, width_out).

    The rows of group i end before row `ends[i]`, int32 (groups,). The grouped kernel wants rows of multiples of 16
    bytes; where there is none, one product follows the other.
    """
    grouped = x.is_cuda and x.dtype == torch.bfloat16 and weights.shape[1] % 8 == weights.shape[2] % 8 == 0
    if grouped and x.shape[0] > 0:
        return F.grouped_mm(x, weights, offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([rows @ weight for rows, weight in zip(x.split(sizes), weights, strict=True)])


_ops = torch.ops._c10d_functional


def _wait(x: Tensor) -> Tensor:
    arrived: Tensor = _ops.wait_tensor(x)
    return arrived


def _all_to_all(x: Tensor, receives: list[int], sends: list[int], group: ProcessGroup) -> Tensor:
    """Rows of x, `sends[i]` of them to rank i of the group, for `receives[i]` rows of each rank."""
    return _wait(_ops.all_to_all_single(x.contiguous(), receives, sends, group.group_name))


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Take(torch.autograd.Function):
    """Each row `copies` times, the copies then put into `order`, a permutation with the inverse `inverse`.

    Indexing does the same, but its backward pass scatters: this one gathers, which is faster and always sums alike.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        rows = gradient.index_select(0, inverse)
        return rows.unflatten(0, (-1, ctx.copies)).sum(dim=1), None, None, None


class _Exchange(torch.autograd.Function):
    """`_all_to_all`; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, receives: list[int], sends: list[int], group: ProcessGroup) -> Tensor:
        ctx.back = sends, receives, group
        return _all_to_all(x, receives, sends, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient, *ctx.back), None, None, None


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dtype, device = ctx.like
        return gradient, torch.full((), ctx.scale, dtype=dtype, device=device), None


_take: Callable[[Tensor, Tensor, Tensor, int], Tensor] = _Take.apply
_exchange: Callable[[Tensor, list[int], list[int], ProcessGroup], Tensor] = _Exchange.apply
_attach: Callable[[Tensor, Tensor, float], Tensor] = _Attach.apply
