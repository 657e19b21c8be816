"""What data-parallel ranks of the `deepspeed` engine reserved as it was when most of what is committed was measured.

Until 2026-11-23 what the model was made in stayed reserved, ZeRO-1 had its moments made in the first step, and of steps
of several microbatches it kept the gradients in bf16 of the one before. Until 2026-11-25 ZeRO-3 had its moments made in
the first step.
"""

from __future__ import annotations

from search_spaces.layout import Layout
from search_spaces.replay import fullest, rounds_of
from search_spaces.replay.shards import GatheredWhole, Shards, SummedShare, SummedWhole
from search_spaces.workload import Workload


class Leftovers(Shards):
    """Parameters were made one by one, and then copied to what is flat."""

    def start(self) -> None:
        whole = {f"whole {group} {name}": count for group, some in self.groups.items() for name, count in some.items()}
        for name, count in whole.items():
            self.take(name, count)
        super().start()
        self.give_back(*whole)


class LateMoments(Shards):
    is_late = False

    def make_moments(self) -> None:
        if self.is_late:
            super().make_moments()

    def end(self) -> None:
        if not self.is_late:
            self.is_late = True
            self.make_moments()
        super().end()


class EarlierWhole(Leftovers, LateMoments, SummedWhole):
    def arrive(self, name: str, count: int) -> None:
        if self.rounds == 1 or self.holds(f"kept {name}"):
            super().arrive(name, count)
        else:
            self.rename(name, f"kept {name}")


class EarlierShare(Leftovers, SummedShare):
    pass


class EarlierGathered(LateMoments, GatheredWhole):
    pass


EARLIER: dict[int, type[Shards]] = {1: EarlierWhole, 2: EarlierShare, 3: EarlierGathered}
"""By ZeRO stage."""


def reserved_then(layout: Layout, work: Workload) -> float:
    """Bytes, of a layout that `search_spaces.replay.replayed` replays by shards."""
    tokens = layout.microbatch_tokens(work.sequence_length)
    return fullest(EARLIER[layout.zero_stage], work.shape, tokens, rounds_of(layout), layout).reserved
