"""Which of a gang's workers a trial gets: as few nodes as can be, and neighbours on each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from operator import itemgetter

from trainables.mailbox import Member


def placed(size: int, free: Collection[int], members: Sequence[Member]) -> tuple[int, ...] | None:
    """`size` of the gang's `members`, by rank, all of them `free`; None where that cannot be had at present.

    They are on as few nodes as it takes of the whole gang. On one node they begin at a multiple of `size`, as GPUs that
    share links do, where that spoils least for a group of twice the size; of several, all are taken whole but the last.
    """
    nodes: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda one: (len(one.device or ""), one.device or "", one.rank)):
        nodes.setdefault(member.node_id, []).append(member)
    by_node = [[member.rank for member in here] for here in nodes.values()]
    fewest = _fewest(size, [len(ranks) for ranks in by_node])
    if fewest is None:
        return None
    if fewest == 1:
        blocks = [
            (sum(rank in free for rank in _around(ranks, start, size)), ranks[start : start + size])
            for ranks in by_node
            for start in range(0, len(ranks) - size + 1, size)
            if all(rank in free for rank in ranks[start : start + size])
        ]
        return tuple(min(blocks, key=itemgetter(0))[1]) if blocks else None
    left = sorted(([rank for rank in ranks if rank in free] for ranks in by_node), key=len, reverse=True)[:fewest]
    group = [rank for ranks in left for rank in ranks][:size]
    return tuple(group) if len(group) == size else None


def _fewest(size: int, have: Sequence[int]) -> int | None:
    """How many nodes it takes for `size` workers, None if all together have too few."""
    for number, workers in enumerate(accumulate(sorted(have, reverse=True)), start=1):
        if workers >= size:
            return number
    return None


def _around(ranks: Sequence[int], start: int, size: int) -> Sequence[int]:
    """The block of twice the size that the one at `start` is part of."""
    start -= start % (2 * size)
    return ranks[start : start + 2 * size]
