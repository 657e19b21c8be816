"""What the `deepspeed` engine allocates where ZeRO shards over data-parallel ranks, by `bf16_optimizer.py`,
`zero/stage_1_and_2.py` and `zero/stage3.py` of DeepSpeed 0.19."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.replay.flat import Flat
from search_spaces.replay.gathering import Gathering, Module
from search_spaces.replay.groups import block_of, ends_of, is_of_experts
from search_spaces.replay.sharded import REDUCING
from search_spaces.replay.training import MAIN

GATHERING = 2
"""The stream on which ZeRO-3 gathers parameters."""

SUMS = ("sums of gradients", "sums of experts' gradients")
"""Of all but experts, and of these."""

TOGETHER = 1_000_000_000
"""Values of a rank's share from which on ZeRO-3 updates the rest apart: `sub_group_size`, as it is by default."""


class Shards(Flat):
    """The states of one of the ranks that shard them, of which it has its share; they are there before the first step.

    The shares are of what all parameters are in the order of the model, rank after rank.
    """

    def __init__(self, model: ModelShape, tokens: int, rounds: int, layout: Layout, rank: int = 0) -> None:
        self.layout, self.rank = layout, rank
        self.exchanges = layout.context_parallel_size > 1
        self.spread_over = layout.expert_parallel_size
        super().__init__(model, tokens, rounds, layout.compile, layout.recompute)

    def start(self) -> None:
        self.counts = [0, 0]  # of all but experts, and of these
        for group, parameters in self.groups.items():
            self.counts[is_of_experts(group)] += sum(parameters.values())
        self.count = sum(self.counts)
        ranks = self.layout.shard_ranks
        self.shares = [self.counts[False] / ranks, self.counts[True] / ranks * self.spread_over]
        self.share = sum(self.shares)
        self.waiting: list[tuple[str, int]] = []
        self.take("weights", self.weights())
        self.make_states()
        self.make_moments()

    def make_states(self) -> None:
        """Those that are there before the moments."""
        self.take("master weights", self.share, 4)

    def make_moments(self) -> None:
        for piece, values in enumerate(self.pieces()):
            for name in ("first moments", "second moments"):
                self.take(f"{name} {piece}", values, 4)

    def pieces(self) -> list[float]:
        """What of its share is updated together."""
        return [self.share]

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
    summed up in fp32, from the first of it until the update, experts apart from all else.

    A bucket is reduced in pieces: gradients of the rank's own share, each by itself, and what comes in a row for
    another one as a whole. They are put together first, where they are several. Those of experts are reduced among
    other ranks, or in a group of their own, before or after all else.
    """

    def start(self) -> None:
        super().start()
        self.arrived = [0, 0]
        self.owners: dict[bool, list[int]] = {}
        self.of_kinds = [0, 0]

    def arrive(self, name: str, count: int) -> None:
        if not self.holds("bucket"):
            self.take("bucket", self.bucket_size)
            if self.reducing != MAIN:
                self.take("second bucket", self.bucket_size)
        super().arrive(name, count)
        kind = is_of_experts(name.removeprefix("gradient "))
        self.of_kinds[kind] += count
        self.arrived[kind] += count  # the last of the model first
        begins, share = self.counts[kind] - self.arrived[kind], self.shares[kind]
        owners = self.owners.setdefault(kind, [])
        for owner in range(int(begins // share), int((begins + count - 1) // share) + 1):
            if owner == self.own(kind) or owners[-1:] != [owner]:
                owners.append(owner)

    def own(self, kind: bool) -> int:
        """Which share is the rank's: ranks that have other experts follow each other."""
        return self.rank // self.spread_over if kind else self.rank

    def exchange(self) -> None:
        for kind, owners in self.owners.items():
            sums, filled = SUMS[kind], self.of_kinds[kind]
            if self.own(kind) in owners and not self.holds(sums):
                self.take(sums, self.shares[kind], 4, self.reducing)
            together = len(owners) > 1
            if together:
                self.take("flat", filled, stream=self.reducing)
            self.take("copy in fp32", filled, 4, self.reducing)
            self.give_back(*(("flat",) if together else ()), "copy in fp32")
        self.owners.clear()
        self.of_kinds = [0, 0]

    def _microbatch(self, is_last: bool) -> None:
        super()._microbatch(is_last)
        self.reduce()
        self.give_back("bucket", *(("second bucket",) if self.reducing != MAIN else ()))
        self.arrived = [0, 0]

    def end(self) -> None:
        self.norm(self.largest())
        self.give_back(*filter(self.holds, SUMS))


class GatheredWhole(Bucketed):
    """ZeRO-3: a bucket in fp32 is there all the time, as are the sums of a rank's own gradients, and parameters are
    gathered module by module, ahead of their turn. Gradients of a block go to the bucket together, in the model's
    order."""

    has_own_products = True

    def start(self) -> None:
        super().start()
        self._find_modules()
        sizes = {_full(group, name): count for group, some in self.groups.items() for name, count in some.items()}
        ahead = self.bucket_size if self.layout.overlap_param_gather else 0
        stream = GATHERING if self.layout.overlap_grad_reduce else MAIN
        self.gathered = Gathering(self.allocator, sizes, ahead, stream)

    def make_states(self) -> None:
        """The bucket, or the sums, lie where weights in fp32 were, of which the master weights are a copy."""
        pieces = self.pieces()
        for piece, values in enumerate(pieces):
            self.take(f"in fp32 {piece}", values, 4)
            if piece:
                self.give_back(f"in fp32 {piece - 1}")
            self.take(f"master weights {piece}", values, 4)
        self.give_back(f"in fp32 {len(pieces) - 1}")
        self.take("bucket", self.layout.bucket_size, 4)
        self.take("sums of gradients", self.share, 4)

    def pieces(self) -> list[float]:
        found = [0.0]
        for parameters in self.groups.values():
            for count in parameters.values():
                if found[-1] >= TOGETHER:
                    found.append(0.0)
                found[-1] += count / self.layout.shard_ranks
        return found

    def _find_modules(self) -> None:
        """Those that DeepSpeed gathers for, with what is in them."""

        def module(group: str, *names: str) -> Module:
            full = tuple(_full(group, name) for name in names)
            return Module(full, full)

        first, last = ends_of(self.model)
        tables = [name for name in self.groups[first] if name in ("tokens", "positions")]
        self.tables = [module(first, name) for name in tables]
        self.head_norm = module(last, *(name for name in self.groups[last] if name.startswith("norm")))
        self.head_output = module(last, "tokens" if self.model.tie_embeddings else "output")
        self.embedding = Module((), sum((one.all for one in self.tables), ()))
        self.head = Module((), self.head_norm.all + self.head_output.all)
        names = {block_of(layer): tuple(self.groups[block_of(layer)]) for layer in range(self.model.layers)}
        self.blocks = [Module((), module(group, *of_block).all, leaf=True) for group, of_block in names.items()]
        every = (*self.embedding.all, *(name for block in self.blocks for name in block.all), *self.head.all)
        self.whole = Module((), tuple(dict.fromkeys(every)))

    def weights(self) -> float:
        return self.share

    def waits(self, group: str) -> bool:
        return group.startswith("block")

    def in_turn(self, names: Sequence[str]) -> Sequence[str]:
        return names

    def exchange(self) -> None:
        self.take("flat", self.filled, 4, self.reducing)
        self.give_back("flat")

    @contextmanager
    def _having(self, module: Module) -> Iterator[None]:
        """Have a module's parameters meanwhile."""
        self.gathered.fetch(module)
        yield
        self.gathered.let_go(module)

    def _embed(self, group: str) -> None:
        self.gathered.fetch(self.whole)
        self.gathered.fetch(self.embedding)
        for table in self.tables:
            with self._having(table):
                pass
        super()._embed(group)

    def _blocks_forward(self, layers: Iterable[int]) -> None:
        for layer in layers:
            with self._having(self.blocks[layer]):
                super()._blocks_forward([layer])

    def _logits(self) -> None:
        self.gathered.fetch(self.head)
        with self._having(self.head_norm):
            pass
        with self._having(self.head_output):
            super()._logits()

    def _head_backward(self, group: str, layer: int) -> None:
        self.gathered.fetch(self.whole)
        self.gathered.fetch(self.head)
        with self._having(self.head_output):
            super()._head_backward(group, layer)
        with self._having(self.head_norm):
            pass

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
            with self._having(self.blocks[layer]):
                super()._blocks_backward([layer], is_last)
        self.gathered.fetch(self.embedding)
        for table in reversed(self.tables):
            self.gathered.fetch(table)

    def _microbatch(self, is_last: bool) -> None:
        super()._microbatch(is_last)
        self.reduce()
        self.gathered.end()

    def end(self) -> None:
        self.norm(self.largest() / self.layout.shard_ranks)
        for values in self.pieces():
            self.take("flat", values, 4)
            self.give_back("flat")
        self.gathered.gather_small()


def _full(group: str, name: str) -> str:
    """Of a parameter among all."""
    return f"{group} {name}"
