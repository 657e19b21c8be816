"""What a compiled block allocates that is one graph forward and one backward, as the compiler orders them."""

from __future__ import annotations

from math import ceil

from search_spaces.models import ModelShape
from search_spaces.replay.groups import block_of
from search_spaces.replay.training import L2_CACHE, ONE_WAY, Training

ROWS = 16
"""Tokens of which a kernel adds up gradients of biases and of norms' weights first, in fp32."""

BLOCKS, THREADS, WIDE = 132 * 16, 4, 128
"""Blocks of threads that an H100 or H200 has at once, threads of one that share a column, and columns of one."""

SUMMED, LEAST_SUMMED = 256, 16
"""Values that a thread sums up before others help it, and those that it has then, at least."""


def workspace_of_sum(rows: float, columns: float) -> float:
    """Bytes that torch works in where it sums up rows (`setReduceConfig` in `aten/src/ATen/native/cuda/Reduce.cuh`): so
    it was recorded of sums of 1,024 and of 16,384 rows."""
    of_each = rows / THREADS
    if of_each < SUMMED:
        return 0
    parts = min(ceil(BLOCKS / ceil(columns / WIDE)), ceil(of_each / LEAST_SUMMED))
    return 4 * WIDE * columns * max(parts, ceil(of_each / SUMMED))


class Graphs(Training):
    """A dense block by itself: what full recomputation computes again is the same graph.

    Recorded of a GPT, whose graph torch's compiler orders for the least peak. What it writes for CPUs has the same
    order, and so a Llama's is known. A new tensor has the place of another that is as large and not needed any more.
    """

    def __init__(self, model: ModelShape, tokens: int, rounds: int, compiled: bool, recompute: str) -> None:
        self.tried: set[str] = set()
        super().__init__(model, tokens, rounds, compiled, recompute)

    @property
    def is_graph(self) -> bool:
        """Whether the code of blocks is known."""
        return self.compiled and not (self.has_mixture or self.selective or self.exchanges or self.has_own_products)

    def _forward(self, layer: int, again: bool = False) -> None:
        if not self.is_graph:
            super()._forward(layer, again)
            return
        model, work = self.model, self._work_backward if again else self._work_forward
        self.take_normed(f"{layer} n1")
        self._try("n1")
        for name, width in (("q", model.query_width), ("k", model.key_width), ("v", model.key_width)):
            self._keep(layer, name, width)
            work()
        if not self.is_gpt:
            for name, width in (("q", model.query_width), ("k", model.key_width)):
                self._keep(layer, f"rotated {name}", width)
                self._try(f"rotated {name}")
            self._done(layer, "k", *(() if self.queries_are_hidden else ("q",)))
        self._attend(layer)
        if self.holds(f"{layer} q") and not self.is_gpt:  # its place is free
            self.rename(f"{layer} q", f"{layer} wo")
        else:
            self.take_all(f"{layer} wo")
        self.take_normed(f"{layer} n2")
        self._try("n2")
        for name in (*(() if self.is_gpt else ("gate",)), "up", "activated"):
            self._keep(layer, name, model.ffn_hidden)
        self._try("activated")
        self.take_all(f"{layer} down")
        self._try("sum", model.hidden)
        self._add_compiled(layer, again)

    def _try(self, kernel: str, changed: float = 0) -> None:
        """Several ways to run a kernel, the first time, each on a copy of what it changes of each token."""
        if kernel in self.tried or (kernel in ("n1", "n2") and self.model.hidden <= ONE_WAY):
            return
        self.tried.add(kernel)
        if changed:
            self.take("copy of what is changed", self.tokens * changed)
            self.give_back("copy of what is changed")
        self.take("cache", L2_CACHE, 1)
        if changed:
            self.take("copy of what is changed", self.tokens * changed)
            self.give_back("copy of what is changed")
        self.give_back("cache")

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
        self._done(layer, "activated")
        self._try("d up", self.model.ffn_hidden)
        self._done(layer, "up")  # the gradient of which is in the place of what it comes from
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
        self._try("d up", self.model.ffn_hidden)
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
        self._go_back_through_attention(layer)
        self._done(layer, "sums", "v", *(("q", "k") if self.is_gpt else ("rotated q", "rotated k")))
        if self.queries_are_hidden:
            self.rename(f"{layer} d attended", f"{layer} d n1 of wv")
        else:
            self._done(layer, "d attended")
            self._keep(layer, "d n1 of wv", self.model.hidden)
        for name, width in (("k", keys), ("q", queries)):
            if not self.is_gpt:
                self._keep(layer, "turned", width)
                self._try(f"turned {name}", width)
                self._done(layer, "turned")
            self._keep(layer, f"d n1 of w{name}", self.model.hidden)

    def _sum_rows(self, layer: int, count: int) -> None:
        """Of so many gradients at once, each of which torch sums up then."""
        self._keep(layer, "rows", count * self.own_width / ROWS, 4)
        for _ in range(count):
            self.work_on_sum(self.tokens / ROWS, self.own_width)
        self._done(layer, "rows")

    def work_on_sum(self, rows: float, columns: float) -> None:
        """Have what torch sums up rows in."""
        if size := workspace_of_sum(rows, columns):
            self.take("workspace of a sum", size, 1)
            self.give_back("workspace of a sum")
