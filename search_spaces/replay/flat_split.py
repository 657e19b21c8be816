"""What the `deepspeed` engine allocates where products are split over ranks, by DeepSpeed's own layers (AutoTP)."""

from __future__ import annotations

from dataclasses import replace

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.replay.flat import Flat
from search_spaces.replay.groups import block_of


def share_of(model: ModelShape, ranks: int) -> ModelShape:
    """What a rank has of a model whose products are split over so many."""
    return replace(
        model, heads=model.heads // ranks, kv_heads=model.kv_heads // ranks, ffn_hidden=model.ffn_hidden // ranks
    )


class FlatSplit(Flat):
    """One rank: it has its heads and inner values of each block, all tables, and all of what is between products.

    What is summed over ranks is summed in place. The compiler does not sum again what it computes again: of a compiled
    block it keeps what attention's last product came to.
    """

    def __init__(self, model: ModelShape, tokens: int, rounds: int, layout: Layout) -> None:
        super().__init__(share_of(model, layout.tensor_parallel_size), tokens, rounds, layout.compile, layout.recompute)

    def _forward(self, layer: int, again: bool = False) -> None:
        if not self.compiled:
            super()._forward(layer, again)
        elif not self.full:
            super()._forward(layer)
            self._take_sum(layer)
        elif not again:  # or its backward pass begins with it
            self._forward_at_once(layer)

    def _take_sum(self, layer: int) -> None:
        """The next hidden states are not made in place of what was summed over ranks."""
        self.take("sum", self.tokens * self.model.hidden)
        self.give_back(f"x{layer + 1}")
        self.rename("sum", f"x{layer + 1}")

    def _attention(self, layer: int) -> None:
        model = self.model
        self._keep(layer, "n1", model.hidden)
        for name, width in (("q", model.query_width), ("k", model.key_width), ("v", model.key_width)):
            self._keep(layer, name, width)
        for name, width in (("q", model.query_width), ("k", model.key_width)):
            self._rotate(layer, name, width)
            self._done(layer, name)
        self._keep(layer, "attended", model.query_width)
        self._keep(layer, "sums", model.heads, 4)

    def _forward_at_once(self, layer: int) -> None:
        """Products take the place of what is not needed any more."""
        model = self.model
        self._attention(layer)
        self._done(layer, "v", "rotated q", "rotated k", "sums")
        self.rename(f"{layer} n1", f"summed of {layer}")
        self._done(layer, "attended")
        self._keep(layer, "n2", model.hidden)
        self._keep(layer, "gate", model.ffn_hidden)
        self._keep(layer, "up", model.ffn_hidden)
        self._done(layer, "n2", "up")
        self.take(f"x{layer + 1}", self.tokens * model.hidden)
        self._done(layer, "gate")
        self._take_sum(layer)

    def _backward(self, layer: int, is_last: bool) -> None:
        if not (self.compiled and self.full):
            super()._backward(layer, is_last)
            return
        model, group = self.model, block_of(layer)
        hidden, inner = model.hidden, model.ffn_hidden
        self._keep(layer, "n2", hidden)
        for name in ("gate", "up", "d activated", "activated", "d gate", "d up"):
            self._keep(layer, name, inner)
        self._done(layer, "gate", "up", "d activated")
        self.gradient(group, "down")
        self._done(layer, "activated")
        self.gradient(group, "up")
        self.gradient(group, "gate")
        self._done(layer, "d up")
        self._keep(layer, "d n2 of gate", hidden)  # the other one in place of n2
        self._done(layer, "d gate")
        self._norm_gradients(group, "ffn norm")
        self._keep(layer, "d x2", hidden)
        self._attention(layer)
        self._keep(layer, "d attended", model.query_width)
        for name, width in (("d q", model.query_width), ("d k", model.key_width), ("d v", model.key_width)):
            self._keep(layer, name, width)
        self._work_on_attention(layer)
        self._done(layer, "v", "rotated q", "sums", "d attended")
        self.gradient(group, "wo")
        self._done(layer, "rotated k", "attended")
        for name in ("wv", "wk", "wq"):
            self.gradient(group, name)
        self._done(layer, "d q")
        self._keep(layer, "d n1 of wq", hidden)
        self._done(layer, "d k")
        self._keep(layer, "d n1 of wk", hidden)  # the last one in place of n1
        self._done(layer, "d v")
        self._norm_gradients(group, "attention norm")
        self.give_back("dx", f"x{layer}", f"summed of {layer}")
        self.rename(f"{layer} d x2", "dx")
        self._drop()
