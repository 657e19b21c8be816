"""What arrives in a collective if all ranks have data like this one's.

Nothing is left as it was allocated: the time and the power of what is computed from it depend on the values.

- Gathered: this rank's piece in every place, or, where ranks keep what they gather in place, what was there.
- Summed: N times this rank's where the ranks agree, as they do on counts and on norms (integers, and tensors of one
  element); else sqrt(N) times, which is the scale that sums of N independent data have, such as the parts of a matrix
  product or the gradients of other tokens. Averages, largest and smallest: this rank's.
- Exchanged: each rank sends what this one sends it, over and over where more is to come. Were it the piece that this
  one keeps, what is computed would be alike again and again.
- Broadcast by another rank: what this rank has in its place.
- Received from another rank: normal values, of unit scale where autograd will come back to them (`requires_grad`), as
  hidden states between two layers have it, else of the scale `GRADIENT`. Integers are ones, by which the stages of a
  pipeline agree to go on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

GRADIENT = 1e-6
"""Scale of the gradients that a stage of a pipeline receives: of a mean over thousands of tokens, each of hundreds of
values. With unit scale, the norm of the gradients of a first stage overflows (seen with Llama-3 405B)."""


class Move(NamedTuple):
    """`target` is to get the elements of `source`, over and over where it is longer, times `factor`.

    Without a source it gets what another rank sends.
    """

    target: Tensor
    source: Tensor | None
    factor: float = 1

    @property
    def size(self) -> int:
        """Bytes that arrive."""
        return self.target.nbytes


def factor_of_sum(operation: ReduceOp | ReduceOp.RedOpType, tensor: Tensor, ranks: int) -> float:
    """What `tensor`, reduced over `ranks` of its like, is multiplied by."""
    if operation != ReduceOp.SUM:
        return 1
    agreed = tensor.numel() == 1 or not tensor.is_floating_point()
    return ranks if agreed else math.sqrt(ranks)


def received_counts(sent: Tensor) -> Tensor:
    """How many tokens come from each rank to each expert of this one, like `sent`, to each rank for its experts: as
    many as this rank sends, an even share to each."""
    total, places = sent.sum(), sent.numel()
    return total // places + (torch.arange(places, device=sent.device) < total % places)


def fill(move: Move) -> None:
    """Do it, by operations of torch on the current stream."""
    target = move.target.data  # behind autograd's back, as collectives are: no version is counted
    if move.source is None:
        _receive(target, 1 if move.target.requires_grad else GRADIENT)
        return
    source = move.source.data.reshape(-1)
    _repeat(target, source)
    if move.factor != 1:
        target.mul_(move.factor)


def _receive(target: Tensor, scale: float) -> None:
    if target.is_floating_point():
        target.normal_(0.0, scale, generator=_generator(target.device))
    else:
        target.fill_(1)


def _repeat(target: Tensor, source: Tensor) -> None:
    """Piece by piece: the source may lie in the target, as what is gathered in place does."""
    if source.data_ptr() == target.data_ptr() and source.numel() == target.numel():
        return
    if source.numel() == 0:
        target.zero_()
        return
    pieces = target.view(-1).split(source.numel())
    last = source[: pieces[-1].numel()]
    torch._foreach_copy_(pieces, [*[source] * (len(pieces) - 1), last])


_generators: dict[torch.device, torch.Generator] = {}


def _generator(device: torch.device) -> torch.Generator:
    """One of its own, so that what others draw stays the same."""
    if device not in _generators:
        _generators[device] = torch.Generator(device)
    return _generators[device]
