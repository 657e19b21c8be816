"""What the `megatron` engine's attention allocates where ranks have parts of each sequence, as cuDNN's kernels have it
in parts (`trainables/engines/megatron/context.py`, `trainables/merged.py`)."""

from __future__ import annotations

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.replay.fully_sharded import FullySharded
from search_spaces.replay.pipelined import Pipelined
from search_spaces.replay.sharded import Sharded
from search_spaces.replay.training import Training


class Context(Training):
    """A rank gathers keys and values, which it keeps of whole sequences. What its queries make of keys at their own
    positions, results of others are merged into: of keys before them and of those between its two pieces. Of these that
    is replayed which needs most: forward the former, for all queries, as the second rank has it, and backward the
    latter, as the first rank has it, to which all keys of others are between."""

    ranks: int
    is_graph = False  # that of `Graphs`

    @property
    def queries(self) -> str:
        return "q" if self.is_gpt else "rotated q"

    def _gather_keys(self, layer: int) -> None:
        """Keys and values together, and those of all ranks."""
        own = 2 * self.model.key_width
        self._keep(layer, "own keys", own)
        self._keep(layer, "all keys", own * self.ranks)
        self._done(layer, "own keys")

    def _attend(self, layer: int) -> None:
        self._gather_keys(layer)
        self._keep(layer, "attended", self.model.query_width)
        self._keep(layer, "sums", self.model.heads, 4)
        self._keep(layer, "part", self.model.query_width)
        self._keep(layer, "part sums", self.model.heads, 4)
        self._done(layer, "part", "part sums")
        if self.selective:
            self._done(layer, "n1", "all keys", *(() if self.is_gpt else ("rotated q", "rotated k")))
        else:
            self._let_go_of_keys(layer)
        self._past(layer, self.queries, "all keys", "sums")

    def _let_go_of_keys(self, layer: int) -> None:
        """Of all but the queries that attention had, and the keys and values of all ranks."""
        names = ("k", "v") if self.is_gpt else ("q", "k", "v", "rotated k")
        self._done(layer, *(name for name in names if self.holds(f"{layer} {name}")))

    def _recompute(self, layer: int) -> None:
        super()._recompute(layer)
        if not self.whole_graph:
            self._gather_keys(layer)
            if not self.is_gpt:
                self._done(layer, "rotated k")

    def _attend_back(self, layer: int) -> None:
        model, own = self.model, 2 * self.model.key_width
        if self.selective and self.whole_graph:
            if not self.is_gpt:
                self._keep(layer, "rotated q", model.query_width)
            self._gather_keys(layer)
        self._go_back_through_attention(layer)
        self._keep(layer, "d all keys", own * self.ranks)
        self._back_to_others(layer)
        self._done(layer, "d k", "d v")
        self._done(layer, "d attended", "attended", "sums", "all keys")
        if not self.is_gpt:
            self._done(layer, "rotated q")
        self._keep(layer, "d own keys", own)
        self._done(layer, "d all keys")
        self._keep(layer, "d k", model.key_width)
        self._keep(layer, "d v", model.key_width)
        self._done(layer, "d own keys")
        if not self.is_gpt and not self.compiled:
            self._rotate_back(layer, "d q", model.query_width)
            self._rotate_back(layer, "d k", model.key_width)
        if self.selective:
            self._let_go_of_keys(layer)
        if self.is_gpt:
            self._done(layer, "q")

    def _back_to_others(self, layer: int) -> None:
        """From the later piece's queries, to the keys and values between the pieces."""
        model, others = self.model, self.ranks - 1
        found = ["d later q", "d k between", "d v between"]
        joined = ["joined"] if others > 1 else []
        for name in joined:
            self._keep(layer, name, 2 * others * model.key_width)
        self._keep(layer, "later sums", model.heads / 2, 4)
        for name, width in zip(found, (model.query_width / 2, *2 * [others * model.key_width]), strict=True):
            self._keep(layer, name, width)
        of_heads = others * model.query_width if model.kv_heads < model.heads else 0
        self._keep(layer, "workspace of attention", (model.query_width + model.heads) / 2 + of_heads, 4)
        self._done(layer, "workspace of attention", "later sums", *joined, *found)


class ContextSharded(Context, Sharded):
    """Where nothing is sharded."""

    def __init__(self, model: ModelShape, tokens: int, rounds: int, layout: Layout) -> None:
        self.ranks = layout.context_parallel_size
        super().__init__(model, tokens, rounds, layout.compile, layout.recompute)


class ContextFullySharded(Context, FullySharded):
    def __init__(self, model: ModelShape, tokens: int, rounds: int, layout: Layout) -> None:
        self.ranks = layout.context_parallel_size
        super().__init__(model, tokens, rounds, layout)


class ContextPipelined(Context, Pipelined):
    """On a rank of a pipeline."""

    def __init__(self, model: ModelShape, tokens: int, layout: Layout, rank: int) -> None:
        self.ranks = layout.context_parallel_size
        super().__init__(model, tokens, layout, rank)
