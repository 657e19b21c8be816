"""A process group of N ranks, of which one is there."""

# mypy: disable-error-code="assignment, override"

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from search_spaces.network import Collective
from trainables.standin.lane import Lane, lane_of
from trainables.standin.ledger import Call, Ledger
from trainables.standin.moves import Move, factor_of_sum, received_counts

Seconds = Callable[[Collective, int, tuple[int, ...], bool], float]
"""How long a collective takes: of its kind, bytes as in `Call`, and global ranks, beside what the device computes or
not."""


@dataclass
class Peers:
    """What all groups of a world have in common: the kind of device that its ranks compute on, how long the network
    takes, the ledger of all calls, whether what is gathered in place is there from before, and the lane by which the
    latest message came, at first one of its own."""

    device: torch.device
    seconds: Seconds
    ledger: Ledger
    in_place: bool = False
    messages: Lane = field(init=False)

    def __post_init__(self) -> None:
        self.messages = lane_of(self.device)


class StandIn(dist.ProcessGroup):
    """Whatever torch and DeepSpeed call a group for, in all its forms.

    What arrives is told in `trainables.standin.moves`. A collective takes the time that `Peers.seconds` says, one after
    the other within the group. A message between two ranks takes none: when its other rank would come to it, only the
    schedule of a pipeline tells. Coalesced collectives are one, as in NCCL. Of those that `Collective` does not have,
    a reduction to one rank counts as a broadcast, a gathering as an all-gather, a scattering as a reduce-scatter: all
    of them move as much.

    The forms have one name in torch before 2.13, and another since.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str, peers: Peers, lane: Lane) -> None:
        """`ranks`: the global ones of the group; `rank`: this one's place among them."""
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self._ranks, self._rank, self._name, self._peers, self._lane = tuple(ranks), rank, name, peers, lane
        self._latest: dist.Work | None = None
        # Steps repeat their collectives, which are not to wait for arithmetic.
        self._seconds = functools.cache(lambda kind, size, beside: peers.seconds(kind, size, self._ranks, beside))

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        """Where torch puts the objects that it gathers."""
        return [self._peers.device]

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._call(Collective.BROADCAST, _size(tensors), [Move(t, t) for t in tensors], opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        moves = [Move(t, t, self._factor(t, opts)) for t in tensors]
        return self._call(Collective.ALL_REDUCE, _size(tensors), moves, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        moves = [Move(t, t, self._factor(t, opts)) for t in tensors]
        return self._call(Collective.BROADCAST, _size(tensors), moves, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._gather(map(Move, outputs, inputs), opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        is_there = self._peers.in_place and output.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
        return self._gather([Move(output, output if is_there else mine)], opts)

    all_gather_single = _allgather_base

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """`outputs`: of each input the pieces, by rank."""
        return self._gather((Move(o, i) for pieces, i in zip(outputs, inputs, strict=True) for o in pieces), opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """`outputs`: of each rank the pieces, by input."""
        return self._gather((Move(o, i) for pieces in outputs for o, i in zip(pieces, inputs, strict=True)), opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """`outputs` are empty but at the root."""
        moves = [Move(piece, inputs[0]) for piece in (outputs[0] if outputs else ())]
        return self._call(Collective.ALL_GATHER, self.size() * _size(inputs), moves, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """`inputs` are empty but at the root."""
        move = Move(outputs[0], inputs[0][self._rank] if inputs else outputs[0])
        return self._call(Collective.REDUCE_SCATTER, self.size() * _size(outputs), [move], opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """`inputs`: of each output the pieces, by rank."""
        return self._reduce_scatter(outputs, (pieces[self._rank] for pieces in inputs), opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._reduce_scatter(outputs, map(self._own, inputs), opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        return self._reduce_scatter([output], [self._own(whole)], opts)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self, output: Tensor, mine: Tensor, receives: list[int], sends: list[int], opts: Any = None
    ) -> dist.Work:
        """`receives` and `sends`: rows from and to each rank, none of them if all are as many."""
        source = mine if mine.is_floating_point() else received_counts(mine)
        return self._call(Collective.ALL_TO_ALL, _size([mine]), [Move(output, source)], opts)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Pieces by rank."""
        moves = [Move(output, mine) for output, mine in zip(outputs, inputs, strict=True)]
        return self._call(Collective.ALL_TO_ALL, _size(inputs), moves, opts)

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> dist.Work:
        return self._message(tensors, (self._rank, receiver), [Move(t, t) for t in tensors])

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> dist.Work:
        self._peers.messages = self._lane
        return self._message(tensors, (sender, self._rank), [Move(t, None) for t in tensors])

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._call(Collective.BARRIER, 0, [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Of gloo's, where it ends when all have come."""
        self.barrier().wait()

    def _start_coalescing(self, device: torch.device) -> None:
        """What is called until the end is over when the last of it is."""

    def _end_coalescing(self, device: torch.device) -> dist.Work | None:
        return self._latest

    def _call(self, kind: Collective, size: int, moves: Sequence[Move], opts: Any) -> dist.Work:
        self._peers.ledger.append(Call(kind, size, self._ranks))
        asynchronous = opts is None or opts.asyncOp
        self._latest = self._lane.carry(kind, moves, self._seconds(kind, size, self._lane.beside), asynchronous)
        return self._latest

    def _message(self, tensors: list[Tensor], ends: tuple[int, int], moves: Sequence[Move]) -> dist.Work:
        sender, receiver = (self._ranks[rank] for rank in ends)
        self._peers.ledger.append(Call(Collective.SEND, _size(tensors), (sender, receiver)))
        self._latest = self._lane.carry(Collective.SEND, moves, 0.0, asynchronous=True)
        return self._latest

    def _gather(self, moves: Iterable[Move], opts: Any) -> dist.Work:
        moves = list(moves)
        return self._call(Collective.ALL_GATHER, sum(move.size for move in moves), moves, opts)

    def _reduce_scatter(self, outputs: list[Tensor], mine: Iterable[Tensor], opts: Any) -> dist.Work:
        moves = [Move(o, piece, self._factor(piece, opts)) for o, piece in zip(outputs, mine, strict=True)]
        return self._call(Collective.REDUCE_SCATTER, self.size() * _size(outputs), moves, opts)

    def _own(self, whole: Tensor) -> Tensor:
        """This rank's of equal pieces of a tensor."""
        return whole.view(len(self._ranks), -1)[self._rank]

    def _factor(self, tensor: Tensor, opts: Any) -> float:
        return factor_of_sum(ReduceOp.SUM if opts is None else opts.reduceOp, tensor, len(self._ranks))


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
