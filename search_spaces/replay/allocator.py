"""torch's caching allocator of a GPU, by sizes alone.

As `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.11 has it by default: a request is rounded to 512 bytes and takes
the smallest free piece of its stream that is large enough; what is left of the piece stays free; neighbours that are
free become one again. Where there is none, a segment is reserved: 2 MiB for requests of up to 1 MiB, which have
segments of their own, 20 MiB for those below 10 MiB, and else what was asked for, in steps of 2 MiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

ROUNDING = 512
SMALL, SMALL_SEGMENT = 2**20, 2 * 2**20
MIDDLE, MIDDLE_SEGMENT = 10 * 2**20, 20 * 2**20
STEP = 2 * 2**20


@dataclass(eq=False, slots=True)
class Piece:
    """Some bytes of a segment, between its neighbours there; `segment` and `offset` say where."""

    size: int
    segment: int
    offset: int
    pool: tuple[int, bool]
    is_free: bool = False
    before: Piece | None = None
    after: Piece | None = None


Order = tuple[int, int, int, Piece]
"""Smallest first, and of pieces alike the one that was reserved first."""


class Allocator:
    """`reserved`: bytes of all segments, none of which is given back. `most`: bytes in use, at most."""

    def __init__(self) -> None:
        self.reserved = self.used = self.most = 0
        self._segments = 0
        self._free: defaultdict[tuple[int, bool], list[Order]] = defaultdict(list)

    @property
    def free(self) -> list[tuple[tuple[int, bool], int, int, int]]:
        """The pieces that are free: each one's pool, size, and place."""
        return [(pool, *order[:3]) for pool, orders in self._free.items() for order in orders]

    def take(self, size: float, stream: int = 0) -> Piece:
        """At least `size` bytes for a stream."""
        wanted = max(1, -(-int(size) // ROUNDING)) * ROUNDING
        is_small = wanted <= SMALL
        pool = (stream, is_small)
        free = self._free[pool]
        index = bisect_left(free, (wanted,))
        piece = free.pop(index)[3] if index < len(free) else self._segment(wanted, pool)
        left = piece.size - wanted
        if left >= ROUNDING if is_small else left > SMALL:
            rest = Piece(left, piece.segment, piece.offset + wanted, pool, True, piece, piece.after)
            if piece.after is not None:
                piece.after.before = rest
            piece.after, piece.size = rest, wanted
            insort(free, (left, rest.segment, rest.offset, rest))
        piece.is_free = False
        self.used += piece.size
        if self.used > self.most:
            self.most = self.used
        return piece

    def give_back(self, piece: Piece) -> None:
        """What `take` gave."""
        self.used -= piece.size
        if piece.before is not None and piece.before.is_free:
            self._forget(piece.before)
            piece = _joined(piece.before, piece)
        if piece.after is not None and piece.after.is_free:
            self._forget(piece.after)
            piece = _joined(piece, piece.after)
        piece.is_free = True
        insort(self._free[piece.pool], (piece.size, piece.segment, piece.offset, piece))

    def _segment(self, wanted: int, pool: tuple[int, bool]) -> Piece:
        size = SMALL_SEGMENT if pool[1] else MIDDLE_SEGMENT
        if wanted >= MIDDLE:
            size = -(-wanted // STEP) * STEP
        self.reserved += size
        self._segments += 1
        return Piece(size, self._segments, 0, pool)

    def _forget(self, piece: Piece) -> None:
        free = self._free[piece.pool]
        del free[bisect_left(free, (piece.size, piece.segment, piece.offset))]


def _joined(first: Piece, second: Piece) -> Piece:
    """Neighbours as one."""
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
