"""What a process group was called for."""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.network import Collective


@dataclass(frozen=True)
class Call:
    """One collective, or one message.

    `size`: bytes as nccl-tests counts them: of the whole buffer (of an all-gather the output, of a reduce-scatter the
    input), of an all-to-all all that one rank sends. `ranks`: those of the group in the whole world, by their place in
    the group; of a message its sender and its receiver.
    """

    kind: Collective
    size: int
    ranks: tuple[int, ...]


Ledger = list[Call]
"""Calls in the order in which they were made."""
