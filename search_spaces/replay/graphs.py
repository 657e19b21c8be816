"""What a compiled block allocates that is one graph forward and one backward, as the compiler orders them."""

from __future__ import annotations

from search_spaces.replay.groups import block_of
from search_spaces.replay.training import Training

ROWS = 16
"""Tokens of which a kernel adds up gradients of biases and of norms' weights first, in fp32."""


class Graphs(Training):
    """A dense block by itself: what full recomputation computes again is the same graph.

    Recorded of a GPT, whose graph torch's compiler orders for the least peak. What it writes for CPUs has the same
    order, and so a Llama's is known. A new tensor has the place of another that is as large and not needed any more.
    """

    @property
    def is_graph(self) -> bool:
        """Whether the code of blocks is known."""
        return self.compiled and not (self.has_mixture or self.selective or self.exchanges or self.has_own_products)

    @property
    def queries_are_hidden(self) -> bool:
        """Whether tensors of queries are as large as hidden states."""
        return self.model.query_width == self.model.hidden

    def keeps_place(self, name: str) -> bool:
        return name == "q" and self.is_graph and not self.is_gpt and self.queries_are_hidden

    def _backward(self, layer: int, is_last: bool) -> None:
        if not self.is_graph:
            super()._backward(layer, is_last)
            return
        group = block_of(layer)
        if self.is_gpt:
            self._network_of_gpt(layer, group)
        else:
            self._network_of_llama(layer, group)
        self._attention_of_graph(layer)
        self._keep(layer, "next", self.own_width)
        self._sum_rows(layer, 4 if self.is_gpt else 2)
        self._done(layer, "wo", *(f"d n1 of {name}" for name in ("wv", "wk", "wq")))
        self._done(layer, "d n2", *(() if self.is_gpt else ("d n2 of gate",)))
        self.give_back(f"x{layer}")
        self._norm_gradients(group, "ffn norm")
        for name, made in (("wo", "d x2"), ("wv", "d v"), ("wk", "d k"), ("wq", "d q")):
            self.gradient(group, name)
            if name == "wo":
                self._done(layer, "attended")
            self._done(layer, made)
            if self.is_gpt:
                self.gradient(group, f"{name} bias")
        self._done(layer, "n1")
        self._norm_gradients(group, "attention norm")
        self.give_back("dx")
        self.rename(f"{layer} next", "dx")
        self._drop()

    def _network_of_gpt(self, layer: int, group: str) -> None:
        self._keep(layer, "d activated", self.model.ffn_hidden)
        self._work_backward()
        self.gradient(group, "down")
        self._done(layer, "activated", "up")  # the gradient of which is in the place of what it comes from
        self._keep(layer, "d n2", self.model.hidden)
        self._keep(layer, "d x2", self.own_width)
        self._sum_rows(layer, 1)
        self.gradient(group, "down bias")
        self.gradient(group, "up")
        self._done(layer, "n2")
        self.gradient(group, "up bias")
        self._done(layer, "d activated")

    def _network_of_llama(self, layer: int, group: str) -> None:
        self.gradient(group, "down")
        self._work_backward()
        self._done(layer, "activated")
        self._keep(layer, "d activated", self.model.ffn_hidden)
        self._keep(layer, "d gate", self.model.ffn_hidden)
        self._done(layer, "d activated", "gate")  # the other gradient is in the place of what went in
        self.gradient(group, "gate")
        self._keep(layer, "d n2 of gate", self.model.hidden)
        self._done(layer, "d gate")
        self.gradient(group, "up")
        self._done(layer, "n2")
        self._keep(layer, "d n2", self.model.hidden)
        self._done(layer, "up")
        self._keep(layer, "d x2", self.own_width)

    def _attention_of_graph(self, layer: int) -> None:
        """From the gradients of what was added to the hidden states, to those of what went into attention's products.
        Gradients of queries and keys are turned where they are, but for a part of each."""
        queries, keys = self.model.query_width, self.model.key_width
        self._keep(layer, "d attended", queries)
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            self._keep(layer, f"d {name}", width)
        self._work_on_attention(layer)
        self._done(layer, "sums", "v", *(("q", "k") if self.is_gpt else ("rotated q", "rotated k")))
        if self.queries_are_hidden:
            self.rename(f"{layer} d attended", f"{layer} d n1 of wv")
        else:
            self._done(layer, "d attended")
            self._keep(layer, "d n1 of wv", self.model.hidden)
        for name, width in (("k", keys), ("q", queries)):
            if not self.is_gpt:
                self._keep(layer, "turned", width)
                self._done(layer, "turned")
            self._keep(layer, f"d n1 of w{name}", self.model.hidden)

    def _sum_rows(self, layer: int, count: int) -> None:
        """Of so many gradients at once. What a GPT's sums work in was recorded as well."""
        rows = self.own_width / ROWS
        self._keep(layer, "rows", count * rows, 4)
        for _ in range(count if self.is_gpt else 0):
            self._keep(layer, "others", 2 * rows, 4)
            self._done(layer, "others")
        self._done(layer, "rows")
