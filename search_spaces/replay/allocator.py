"""torch's caching allocator of a GPU, by sizes alone.

As `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.11 has it by default: a request is rounded to 512 bytes and takes
the smallest free piece of its stream that is large enough; what is left of the piece stays free; neighbours that are
free become one again. Where there is none, a segment is reserved: 2 MiB for requests of up to 1 MiB, which have
segments of their own, 20 MiB for those below 10 MiB, and else what was asked for, in steps of 2 MiB. Of free pieces
that are alike it takes the one at the lowest address, and each new segment is below the older ones, or in the highest
hole that they have left: so CUDA's driver for Linux places them, by the records of 44 ranks on H200.
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
    """Some bytes of a segment, between its neighbours there; `segment` and `offset` say where. `pool`: the free pieces
    of its stream and kind. `others`: how many have it besides the first."""

    size: int
    segment: int
    offset: int
    pool: list[Order]
    is_free: bool = False
    before: Piece | None = None
    after: Piece | None = None
    others: int = 0


Order = tuple[int, int, int, Piece]
"""Smallest first, and of pieces alike the one at the lowest address."""


class Allocator:
    """`reserved`: bytes of all segments. `most`: bytes in use, at most."""

    def __init__(self) -> None:
        self.reserved = self.used = self.most = 0
        self._lowest = 0
        self._holes: list[tuple[int, int]] = []
        """The addresses and sizes of what was given back to the driver."""
        self._free: defaultdict[tuple[int, bool], list[Order]] = defaultdict(list)

    @property
    def free(self) -> list[tuple[tuple[int, bool], int, int, int]]:
        """The pieces that are free: each one's pool, size, and place."""
        return [(pool, *order[:3]) for pool, orders in self._free.items() for order in orders]

    def take(self, size: float, stream: int = 0) -> Piece:
        """At least `size` bytes for a stream."""
        wanted = -(-int(size) // ROUNDING) * ROUNDING or ROUNDING
        is_small = wanted <= SMALL
        free = self._free[stream, is_small]
        index = bisect_left(free, (wanted,))
        piece = free.pop(index)[3] if index < len(free) else self._segment(wanted, free)
        left = piece.size - wanted
        if left > SMALL or (is_small and left):
            segment, offset, after = piece.segment, piece.offset + wanted, piece.after
            rest = Piece(left, segment, offset, free, True, piece, after)
            if after is not None:
                after.before = rest
            piece.after, piece.size = rest, wanted
            insort(free, (left, segment, offset, rest))
        piece.is_free = False
        self.used += piece.size
        if self.used > self.most:
            self.most = self.used
        return piece

    def share(self, piece: Piece) -> Piece:
        """Have one more give a piece back before it is free."""
        piece.others += 1
        return piece

    def give_back(self, piece: Piece) -> None:
        """What `take` gave."""
        if piece.others:
            piece.others -= 1
            return
        self.used -= piece.size
        before, after, free = piece.before, piece.after, piece.pool
        if before is not None and before.is_free:
            del free[bisect_left(free, (before.size, before.segment, before.offset))]
            before.size += piece.size
            piece = before
        if after is not None and after.is_free:
            del free[bisect_left(free, (after.size, after.segment, after.offset))]
            piece.size += after.size
            after = after.after
        if piece.after is not after:
            piece.after = after
            if after is not None:
                after.before = piece
        piece.is_free = True
        insort(free, (piece.size, piece.segment, piece.offset, piece))

    def empty(self) -> None:
        """Give the driver back all segments of which nothing is in use."""
        for free in self._free.values():
            for order in [one for one in free if one[3].before is one[3].after is None]:
                free.remove(order)
                self.reserved -= order[0]
                self._holes.append((order[1], order[0]))
        holes, self._holes = sorted(self._holes), []
        for start, size in holes:
            if self._holes and sum(self._holes[-1]) == start:
                start, size = self._holes[-1][0], self._holes.pop()[1] + size
            self._holes.append((start, size))

    def _segment(self, wanted: int, pool: list[Order]) -> Piece:
        size = SMALL_SEGMENT if wanted <= SMALL else MIDDLE_SEGMENT
        if wanted >= MIDDLE:
            size = -(-wanted // STEP) * STEP
        self.reserved += size
        return Piece(size, self._address(size), 0, pool)

    def _address(self, size: int) -> int:
        """Where the driver has a new segment: at the end of the highest hole that has room for it, or below all."""
        if fitting := [hole for hole in self._holes if hole[1] >= size]:
            start, room = max(fitting)
            self._holes.remove((start, room))
            if room > size:
                self._holes.append((start, room - size))
            return start + room - size
        self._lowest -= size
        return self._lowest
