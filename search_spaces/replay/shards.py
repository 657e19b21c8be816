"""What the `deepspeed` engine allocates where ZeRO shards over data-parallel ranks, by `bf16_optimizer.py`,
`zero/stage_1_and_2.py` and `zero/stage3.py` of DeepSpeed 0.19."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.replay.flat import Flat
from search_spaces.replay.gathering import Gathering
from search_spaces.replay.groups import block_of
from search_spaces.replay.sharded import REDUCING
from search_spaces.replay.training import MAIN

GATHERING = 2
"""The stream on which ZeRO-3 gathers parameters."""

LONG = 3e12
"""FLOP of a block's forward pass from which on the CPU is ahead of the GPU, which at some 10 ms a block forward and
backward it is late with ZeRO-3. Fitted to what ranks of Llamas and a GPT reserved on H200."""

KEPT = 100_000
"""A parameter of fewer values is never sharded: `stage3_param_persistence_threshold`, as it is by default."""


class Shards(Flat):
    """The states of one of the ranks that shard them, of which it has its share; they are there before the first step.

    The shares are of what all parameters are in the order of the model, rank after rank.
    """

    def __init__(self, model: ModelShape, tokens: int, rounds: int, layout: Layout, rank: int = 0) -> None:
        self.layout, self.rank = layout, rank
        self.exchanges = layout.context_parallel_size > 1
        super().__init__(model, tokens, rounds, layout.compile, layout.recompute)

    def start(self) -> None:
        self.count = sum(sum(parameters.values()) for parameters in self.groups.values())
        self.share = self.count / self.layout.shard_ranks
        self.waiting: list[tuple[str, int]] = []
        self.take("weights", self.weights())
        self.take("master weights", self.share, 4)
        self.make_moments()

    def make_moments(self) -> None:
        for name in ("first moments", "second moments"):
            self.take(name, self.share, 4)

    def weights(self) -> float:
        """How many a rank has all the time in the width of products."""
        return self.count

    def largest(self) -> int:
        return max(max(parameters.values()) for parameters in self.groups.values())

    def norm(self, values: float) -> None:
        """The gradients' norm is taken in fp64, one parameter after the other."""
        self.take("in fp64", values, 8)
        self.give_back("in fp64")


class SummedWhole(Shards):
    """ZeRO-1: gradients are summed up whole, in fp32, and reduced where they are."""

    def start(self) -> None:
        super().start()
        self.take("sums of gradients", self.count, 4)


class Bucketed(Shards):
    """ZeRO-2 and 3: gradients go to a bucket, which is reduced once the next one would not fit, or by itself where it
    is larger than a bucket."""

    def start(self) -> None:
        super().start()
        self.reducing = REDUCING if self.layout.overlap_grad_reduce else MAIN
        self.bucket_size = self.layout.bucket_size
        self.filled = 0

    def arrive(self, name: str, count: int) -> None:
        if self.filled + count > self.bucket_size:
            self.reduce()
        self.filled += count
        if count > self.bucket_size:
            self.rename(name, "too large a gradient")
        else:
            self.give_back(name)

    def reduce(self) -> None:
        """What is in the bucket."""
        if self.filled:
            self.exchange()
        if self.holds("too large a gradient"):
            self.give_back("too large a gradient")
        self.filled = 0

    def exchange(self) -> None:
        raise NotImplementedError


class SummedShare(Bucketed):
    """ZeRO-2: a microbatch has buckets in bf16, and of each one a copy in fp32 is reduced. What is a rank's own is
    summed up in fp32, from the first of it until the update.

    A bucket is reduced in pieces: gradients of the rank's own share, each by itself, and what comes in a row for
    another one as a whole. They are put together first, where they are several.
    """

    def start(self) -> None:
        super().start()
        self.arrived = 0
        self.owners: list[int] = []

    def arrive(self, name: str, count: int) -> None:
        if not self.holds("bucket"):
            self.take("bucket", self.bucket_size)
            if self.reducing != MAIN:
                self.take("second bucket", self.bucket_size)
        super().arrive(name, count)
        self.arrived += count  # the last of the model first
        begins = self.count - self.arrived
        for owner in range(int(begins // self.share), int((begins + count - 1) // self.share) + 1):
            if owner == self.rank or self.owners[-1:] != [owner]:
                self.owners.append(owner)

    def exchange(self) -> None:
        if self.rank in self.owners and not self.holds("sums of gradients"):
            self.take("sums of gradients", self.share, 4, self.reducing)
        together = len(self.owners) > 1
        if together:
            self.take("flat", self.filled, stream=self.reducing)
        self.take("copy in fp32", self.filled, 4, self.reducing)
        self.give_back(*(("flat",) if together else ()), "copy in fp32")
        self.owners.clear()

    def _microbatch(self, is_last: bool) -> None:
        super()._microbatch(is_last)
        self.reduce()
        self.give_back("bucket", *(("second bucket",) if self.reducing != MAIN else ()))
        self.arrived = 0

    def end(self) -> None:
        self.norm(self.largest())
        self.give_back("sums of gradients")


class GatheredWhole(Bucketed):
    """ZeRO-3: a bucket in fp32 is there all the time, as are the sums of a rank's own gradients, and parameters are
    gathered module by module, ahead of their turn."""

    def start(self) -> None:
        super().start()
        self.take("sums of gradients", self.share, 4)
        self.take("bucket", self.bucket_size, 4)
        sizes = {
            f"{group} {name}": count
            for group, parameters in self.groups.items()
            for name, count in parameters.items()
            if count >= KEPT
        }
        ahead = self.bucket_size if self.layout.overlap_param_gather else 0
        stream = GATHERING if self.layout.overlap_grad_reduce else MAIN
        hurried = 2 * self.tokens * sum(self.groups[block_of(0)].values()) > LONG
        self.gathered = Gathering(self.allocator, sizes, ahead, stream, hurried)

    def weights(self) -> float:
        return self.share

    def exchange(self) -> None:
        self.take("flat", self.filled, 4, self.reducing)
        self.give_back("flat")

    def _parameters(self, group: str, *names: str) -> list[str]:
        found = [f"{group} {name}" for name in names or self.groups[group]]
        return [name for name in found if name in self.gathered.sizes]

    @contextmanager
    def _having(self, names: Sequence[str]) -> Iterator[None]:
        """Have these parameters meanwhile."""
        self.gathered.fetch(names)
        yield
        self.gathered.let_go(names)

    def _embed(self, group: str) -> None:
        with self._having(self._parameters(group)):
            super()._embed(group)

    def _blocks_forward(self, layers: Iterable[int]) -> None:
        for layer in layers:
            with self._having(self._parameters(block_of(layer))):
                super()._blocks_forward([layer])

    def _head(self) -> list[str]:
        return self._parameters("ends", "tokens") if self.model.tie_embeddings else self._parameters("head")

    def _logits(self) -> None:
        with self._having(self._head()):
            super()._logits()

    def _loss_backward(self) -> None:
        self.gathered.catch_up()
        super()._loss_backward()

    def _head_backward(self, group: str, layer: int) -> None:
        with self._having(self._head()):
            super()._head_backward(group, layer)

    def _head_products(self) -> None:
        """As DeepSpeed's own linear layers take them (`zero/linear.py`), which compiled layouts do without."""
        if self.compiled:
            super()._head_products()
            return
        self.take("dn", self.tokens * self.model.hidden)
        self._work_backward()
        self._table_product()

    def _blocks_backward(self, layers: Sequence[int], is_last: bool) -> None:
        for layer in reversed(layers):
            with self._having(self._parameters(block_of(layer))):
                super()._blocks_backward([layer], is_last)

    def _microbatch(self, is_last: bool) -> None:
        super()._microbatch(is_last)
        self.reduce()
        self.gathered.end()

    def end(self) -> None:
        self.norm(self.largest() / self.layout.shard_ranks)
        self.take("flat", self.share, 4)
        self.give_back("flat")
