"""What one of the tensor-parallel ranks of the `megatron` engine allocates in ways of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.replay.fully_sharded import FullySharded
from search_spaces.replay.pipelined import Pipelined
from search_spaces.replay.sharded import TIED
from search_spaces.replay.split_graphs import SplitGraphs

WHOLE = ("norm", "attention norm", "ffn norm", "wo bias", "down bias", "router")
"""How the names begin of parameters that each rank has whole, as wide as hidden states."""


def share_of(model: ModelShape, ranks: int) -> ModelShape:
    """What a rank has of the heads, the widths between products and the tables: all but the hidden states."""
    return replace(
        model,
        heads=model.heads // ranks,
        kv_heads=model.kv_heads // ranks,
        ffn_hidden=model.ffn_hidden // ranks,
        vocab=-(-model.vocab // ranks),
        max_sequence_length=-(-model.max_sequence_length // ranks),
    )


class Split(SplitGraphs):
    """One of the ranks that share all products (Shoeybi et al. 2019).

    Under sequence parallelism (Korthikanti et al. 2022) it has its own tokens alone where hidden states are added up
    and normed, gathers all of them for the products that follow, which keep them, and has its own of the sums of what
    the last products come to. They are gathered rank after rank, which of several sequences is not their order, and are
    copied to be scattered.

    The loss is shared as well (`torch.distributed.tensor.parallel.loss_parallel`), and never compiled. DTensor makes
    the gradients of what the embedding looks up whole on each rank, and FSDP2 sums these up as they are.
    """

    def __init__(self, model: ModelShape, tokens: int, rounds: int, layout: Layout) -> None:
        self.share(layout)
        super().__init__(share_of(model, self.ranks), tokens, rounds, layout.compile, layout.recompute)

    def share(self, layout: Layout) -> None:
        """Take note of what the ranks split, and how."""
        self.ranks, self.scatters = layout.tensor_parallel_size, layout.splits_sequence
        self.sequences = layout.micro_batch_size
        self.joins = self.sequences > 1
        self.know_graphs(layout)

    def make(self, group: str) -> None:
        """Whole, but for experts, and then a rank's part of each parameter."""
        parts = [name for name in self.groups[group] if not (group.startswith("experts") or name.startswith(WHOLE))]
        for name, count in self.groups[group].items():
            self.take(f"whole {group} {name}", count * (self.ranks if name in parts else 1), 4)
        for name in parts:
            self.take("part", self.groups[group][name], 4)
            self.give_back(f"whole {group} {name}")
            self.rename("part", f"whole {group} {name}")

    def make_head(self) -> None:
        table = self.groups[TIED]["tokens"]
        self.take("table", table * self.ranks, 4)
        self.take("part", table, 4)
        self.give_back("table", "part")

    @property
    def own_width(self) -> float:
        return self.model.hidden / (self.ranks if self.scatters else 1)

    def made(self, group: str, name: str) -> int:
        is_whole = name == "positions" or (group, name) == ("embedding", "tokens")
        return super().made(group, name) * (self.ranks if is_whole else 1)

    def reduce(self, group: str, made: Sequence[str]) -> None:
        self.take_parts(group, made)
        super().reduce(group, made)

    def take_parts(self, group: str, made: Sequence[str]) -> None:
        """Of gradients that are whole, where the rank has a part of the parameter."""
        for name, gradient in zip(self.groups[group], made, strict=True):
            if self.made(group, name) > self.groups[group][name]:
                self.take("part", self.groups[group][name], 4 if gradient.startswith("sum ") else 2)
                self.give_back(gradient)
                self.rename("part", gradient)

    # Between a rank's own tokens and all

    def gather_tokens(self, name: str) -> None:
        self.take_all(name)
        if self.joins:
            self.take_all("joined")
            self.give_back(name)
            self.rename("joined", name)

    def sum_tokens(self, name: str) -> None:
        """From summands to a rank's own part of the sum."""
        self._add_up()
        self.give_back(name)
        self.rename("sum", name)

    def _add_up(self) -> None:
        if self.scatters:
            self.take_all("in order")
        self.take_own("sum")
        if self.scatters:
            self.give_back("in order")

    def take_normed(self, name: str) -> None:
        if not self.scatters:
            super().take_normed(name)
            return
        self.take_own(f"{name} own")
        self.gather_tokens(name)

    def take_summands(self, name: str, norm: str) -> None:
        super().take_summands(name, norm)
        if self.selective and not self.whole_graph:  # the policy keeps what products come to, and their sums
            self._add_up()
            self.rename("sum", f"{name} summed")
        elif self.scatters or not self.compiled:
            self.sum_tokens(name)
        if self.scatters:
            self.give_back(f"{norm} own")

    def _recompute(self, layer: int) -> None:
        super()._recompute(layer)
        if not self.whole_graph:
            self._done(layer, "wo summed")
        if self.scatters:
            self._done(layer, *(() if self.whole_graph else ("n1 own",)), "n2 own")

    def spread(self, name: str) -> None:
        if self.scatters and not self.holds(f"{name} spread"):
            self.gather_tokens(f"{name} spread")

    def spread_no_more(self, name: str) -> None:
        if self.scatters:
            self.give_back(f"{name} spread")

    def sum_gradients(self, name: str, *others: str) -> None:
        self.give_back(*others)
        if self.scatters or not self.compiled:
            self.sum_tokens(name)

    # Blocks

    def _forward(self, layer: int, again: bool = False) -> None:
        if again and not self.compiled:
            self.spread("dx")
        super()._forward(layer, again)

    def _add_compiled(self, layer: int, again: bool) -> None:
        """The sum is made apart."""
        if not again:
            self.take_own(f"x{layer + 1}")
        self._done(layer, "down")

    # The ends

    @property
    def positions(self) -> float:
        """Values that are looked up of positions, which all sequences share."""
        return self.tokens / self.sequences * self.model.hidden

    def _embed(self, group: str) -> None:
        """What is looked up in one table stays until it is in the other as well."""
        self.gather(group)
        self.take_all("looked up")
        self._add_up()
        self.rename("sum", "x0")
        if self.is_gpt:
            self.take("of positions", self.positions)
            self.take("in order", self.positions)
            self.take("own of positions", self.positions / self.ranks)
            self.give_back("in order", "of positions", "looked up")
            self.take_own("sum")
            self.give_back("x0", "own of positions")
            self.rename("sum", "x0")
        else:
            self.give_back("looked up")
        self.take_own("arrived")
        self.give_back("x0")
        self.rename("arrived", "x0")

    def _logits(self) -> None:
        super()._logits()
        if self.scatters:
            self.give_back("n own")

    def _loss_forward(self) -> None:
        """Of the log-softmax torch has what is shifted, and its exponentials, one after the other."""
        count = self.tokens * self.model.vocab
        for name in ("copy", "shifted", "exponentials"):
            self.take(name, count, 4)
        self.give_back("exponentials")
        self.take("log-softmax", count, 4)
        self.give_back("shifted", *(() if self.hands_on_logits else ("logits",)), "copy")

    def _loss_backward(self) -> None:
        count = self.tokens * self.model.vocab
        for name in ("of chosen", "exponentials", "sum"):
            self.take(name, count, 4)
        self.give_back("exponentials")
        self.take("of copy", count, 4)
        self.give_back("of chosen", "sum", "log-softmax")
        self.take("dlogits", count)
        self.give_back("of copy")

    def _table_gradient(self) -> None:
        """Once the gradients of hidden states are gathered for it, a rank's own are let go of."""
        is_tied = self.model.tie_embeddings
        if self.is_gpt and is_tied:
            self.take("own of positions", self.positions / self.ranks)
            self.take("of positions", self.positions)
            self.give_back("own of positions")
            self.gradient("ends", "positions")
            self.give_back("of positions")
        self.spread("dx")
        if self.scatters:
            self.give_back("dx")
            self.rename("dx spread", "dx")
        if not is_tied:
            super()._table_gradient()
            return
        table = self.model.vocab * self.model.hidden
        self.take("second part", self.ranks * table)
        self._work_on_table(self.model.vocab)
        self.give_back("dx")
        self.take("dx", table)  # what the rank has of that part, the last to be let go of
        self.take("both parts", table)
        self.give_back("second part", "both parts")
        self.gradient("ends", "tokens")

    def _work_on_table(self, rows: int) -> None:
        super()._work_on_table(rows * self.ranks)


class PipelinedSplit(Split, Pipelined):
    """One of those of a rank of a pipeline, which hands on its own tokens. Nothing of what it sends waits for the
    weights' turn."""

    def __init__(self, model: ModelShape, tokens: int, layout: Layout, rank: int) -> None:
        self.share(layout)
        Pipelined.__init__(self, share_of(model, self.ranks), tokens, layout, rank)

    def _is_ended(self, name: str) -> bool:
        return name in ("exponentials", "sum") or super()._is_ended(name)

    def gather_tokens(self, name: str) -> None:
        with self._letting_go():
            super().gather_tokens(name)

    def sum_tokens(self, name: str) -> None:
        with self._letting_go():
            super().sum_tokens(name)


class FullySplit(Split, FullySharded):
    """One of those that shard with others what each has of the parameters."""

    def __init__(self, model: ModelShape, tokens: int, rounds: int, layout: Layout) -> None:
        self.share(layout)
        FullySharded.__init__(self, share_of(model, self.ranks), tokens, rounds, layout)

    def _embed(self, group: str) -> None:
        super()._embed(group)
        if not self.model.tie_embeddings:
            self._past_forward(group)

    def send(self, group: str, made: Sequence[str]) -> None:
        if self.zero > 1:  # else they are summed up first
            self.take_parts(group, made)
        super().send(group, made)
