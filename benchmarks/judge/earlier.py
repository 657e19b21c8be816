"""What ranks of the `deepspeed` engine reserved as it was when most of what is committed was measured.

Until 2026-11-23 what the model was made in stayed reserved, ZeRO-1 and replicas had their moments made in the first
step, and of steps of several microbatches ZeRO-1 kept the gradients in bf16 of the one before. Until 2026-11-25 ZeRO-3
had its moments made in the first step.
"""

from __future__ import annotations

from collections.abc import Mapping

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.replay import fullest, rounds_of, run, shortened
from search_spaces.replay.flat import Flat
from search_spaces.replay.flat_pipelined import FlatPipelined
from search_spaces.replay.flat_split import FlatSplit
from search_spaces.replay.groups import groups_of, parameters_of
from search_spaces.replay.replicas import Replicas
from search_spaces.replay.shards import GatheredWhole, Shards, SummedShare, SummedWhole
from search_spaces.replay.training import Training
from search_spaces.workload import Workload


def make_whole(training: Training, groups: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Have parameters made one by one, by way of fp32; their names."""
    whole = {f"whole {group} {name}": count for group, some in groups.items() for name, count in some.items()}
    for name, count in whole.items():
        training.take("in fp32", count, 4)
        training.take(name, count)
        training.give_back("in fp32")
    return list(whole)


class Leftovers(Flat):
    """Parameters were made one by one, and then copied to what is flat."""

    def start(self) -> None:
        whole = make_whole(self, self.groups)
        super().start()
        self.give_back(*whole)


class LateMoments(Flat):
    is_late = False

    def make_moments(self) -> None:
        if self.is_late:
            super().make_moments()

    def end(self) -> None:
        if not self.is_late:
            self.is_late = True
            self.make_moments()
        super().end()


class KeptGradients(Flat):
    """Of steps of several microbatches, in bf16."""

    def arrive(self, name: str, count: int) -> None:
        if self.rounds == 1 or self.holds(f"kept {name}"):
            super().arrive(name, count)
        else:
            self.rename(name, f"kept {name}")


class EarlierWhole(Leftovers, LateMoments, KeptGradients, SummedWhole):
    pass


class EarlierShare(Leftovers, SummedShare):
    pass


class EarlierGathered(LateMoments, GatheredWhole):
    pass


EARLIER: dict[int, type[Shards]] = {1: EarlierWhole, 2: EarlierShare, 3: EarlierGathered}
"""By ZeRO stage."""


class EarlierFlat(KeptGradients, FlatSplit):
    """Parameters were made whole, one by one, before a rank had its part of each; the first step had its moments made
    at its end; gradients in bf16 were kept until the next microbatch's."""

    def __init__(self, model: ModelShape, tokens: int, rounds: int, layout: Layout) -> None:
        self.whole = groups_of(model)
        self.has_moments = False
        super().__init__(model, tokens, rounds, layout)

    def start(self) -> None:
        self.waiting: list[tuple[str, int]] = []
        parts = {f"part {group} {name}": count for group, some in self.groups.items() for name, count in some.items()}
        for (name, count), made_of in zip(parts.items(), make_whole(self, self.whole), strict=True):
            self.take(name, count)
            self.give_back(made_of)
        self.count = sum(parts.values())
        self.take("weights", self.count)
        self.give_back(*parts)
        self.take("copy", self.count)
        self.take("master weights", self.count, 4)
        self.give_back("copy")
        self.take("sums of gradients", self.count, 4)

    def end(self) -> None:
        if not self.has_moments:
            self.has_moments = True
            self.take("first moments", self.count, 4)
            self.take("second moments", self.count, 4)


class EarlierFlatPipelined(FlatPipelined, Leftovers, LateMoments, KeptGradients):
    """Likewise, of a pipeline's rank."""

    states = (*FlatPipelined.states, "kept ")


class EarlierReplicas(Replicas):
    """Parameters were made whole before a rank had its part of each; the first step had its moments made."""

    def __init__(self, model: ModelShape, tokens: int, rounds: int, layout: Layout) -> None:
        self.has_moments = False
        super().__init__(model, tokens, rounds, layout)

    def make_weights(self) -> None:
        made = {f"whole {name}": count for name, count in self.wholes.items()} if self.splits else {}
        for name, count in made.items():
            self.take(name, count, 4)
        for name, count in parameters_of(self.groups):
            self.take(f"weight {name}", count, 4)
        self.give_back(*made)

    def make_moments(self) -> None:
        if self.has_moments:
            super().make_moments()

    def reduce(self) -> None:
        super().reduce()
        if not self.has_moments:
            self.has_moments = True
            self.make_moments()


def reserved_then(layout: Layout, work: Workload, rank: int = 0) -> float:
    """Bytes, of a pipeline rank of a layout that `search_spaces.replay.replayed` replays."""
    tokens = layout.microbatch_tokens(work.sequence_length)
    if layout.pipeline_parallel_size > 1:
        return run(EarlierFlatPipelined(work.shape, tokens, shortened(layout), rank)).reserved
    if not layout.zero_stage and layout.shard_ranks > 1:
        return run(EarlierReplicas(work.shape, tokens, rounds_of(layout), layout)).reserved
    if layout.tensor_parallel_size == layout.num_gpus:
        return run(EarlierFlat(work.shape, tokens, rounds_of(layout), layout)).reserved
    return fullest(EARLIER[layout.zero_stage], work.shape, tokens, rounds_of(layout), layout).reserved
