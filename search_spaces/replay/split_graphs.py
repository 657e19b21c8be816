"""What blocks allocate that tensor-parallel ranks compile, each as one graph forward and one backward."""

from __future__ import annotations

from search_spaces.layout import Layout
from search_spaces.replay.groups import block_of
from search_spaces.replay.sharded import Sharded

ROWS = 8
"""Tokens of which a norm's backward pass adds up the gradients of its weights first, in fp32, as recorded of both
families."""


class SplitGraphs(Sharded):
    """Under sequence parallelism, of several sequences at once.

    The compiler has a new tensor take the place of another that is as large and not needed any more, unless that makes
    the graph's peak higher: the other one stays until then. What attention and collectives come to are tensors of their
    own, whose places others may take. What was recorded of two GPUs is the same for each block of a model, and up to
    the sizes for all models of a family.
    """

    def know_graphs(self, layout: Layout) -> None:
        """Take note of whether the code of blocks is known. A mixture is several graphs."""
        known = layout.splits_sequence and layout.micro_batch_size > 1 and not layout.splits_backward
        self.knows_graphs = known and layout.compile and layout.recompute != "selective"

    @property
    def is_graph(self) -> bool:
        """These are others."""
        return False

    @property
    def are_graphs(self) -> bool:
        return self.knows_graphs and not self.has_mixture

    def _own(self, layer: int, name: str, width: int = 2) -> None:
        """What a rank has of its own tokens alone."""
        self._keep(layer, name, self.own_width, width)

    def _all(self, layer: int, name: str) -> None:
        self._keep(layer, name, self.model.hidden)

    def _place(self, layer: int, old: str, new: str) -> None:
        """A new tensor in the place of an old one."""
        self.rename(f"{layer} {old}", f"{layer} {new}")

    def _forward(self, layer: int, again: bool = False) -> None:
        if not self.are_graphs:
            super()._forward(layer, again)
            return
        inner = self.model.ffn_hidden
        self._own(layer, "n1 own")
        self._try("n1")
        self._all(layer, "gathered")
        self._all(layer, "n1")
        self._try("in order")
        self._place(layer, "n1 own", "q")
        self._work_forward()
        for name in ("k", "v"):
            self._keep(layer, name, self.model.key_width)
        if not self.is_gpt:
            for name, width in (("q", self.model.query_width), ("k", self.model.key_width)):
                self._keep(layer, f"rotated {name}", width)
                self._try(f"rotated {name}")
            self._done(layer, "k")
        self._attend(layer)
        self._all(layer, "n2")  # before that, the summands in order, which are where the first were gathered
        self._try("summands")
        self._own(layer, "wo")
        if self.is_gpt:
            self._own(layer, "n2 own")
        else:
            self._place(layer, "q", "n2 own")
        self._try("n2")
        self._all(layer, "gathered of n2")
        self._done(layer, "n2 own")
        for name in (*(() if self.is_gpt else ("gate",)), "up", "activated"):
            self._keep(layer, name, inner)
        self._try("activated")
        self._done(layer, "gathered of n2")  # where the last product came to be
        self._own(layer, "sum")
        self._done(layer, "gathered")  # where that was put in order
        self._own(layer, "next")
        self._try("next")
        self._done(layer, "sum")
        if again:
            self._done(layer, "next")
        else:
            self.rename(f"{layer} next", f"x{layer + 1}")

    def _backward(self, layer: int, is_last: bool) -> None:
        if not self.are_graphs:
            super()._backward(layer, is_last)
            return
        group = block_of(layer)
        self.spread("dx")
        self.gradient(group, "down")
        self._done(layer, "activated")
        self._keep(layer, "d activated", self.model.ffn_hidden)
        self.spread_no_more("dx")
        if self.is_gpt:
            self._backward_of_gpt(layer, group)
        else:
            self._backward_of_llama(layer, group)
        self.give_back("dx")
        self.rename(f"{layer} d x2", "dx")
        self._drop()

    def _backward_of_gpt(self, layer: int, group: str) -> None:
        self.gradient(group, "down bias")
        self._done(layer, "up")  # its gradient is in the place of what it comes from
        self._all(layer, "d n2")
        self.gradient(group, "up")
        self.gradient(group, "up bias")
        self._done(layer, "d activated", "n2")
        self._all(layer, "in order")
        self._own(layer, "d n2 own")
        self._own(layer, "d n2 in fp32", 4)
        self._done(layer, "wo")
        self._own(layer, "d x2")
        self._keep_rows(layer, "rows")
        self._sum_weight_and_bias(layer)
        self._norm_gradients(group, "ffn norm")
        self._done(layer, "d n2 in fp32")
        self._all(layer, "gathered")  # and joined where the gradient of what was gathered was
        self.gradient(group, "wo")
        self.gradient(group, "wo bias")
        self._place(layer, "d n2 own", "d attended")
        self._attend_back(layer)
        for name in ("wv", "wk", "wq"):
            self.gradient(group, name)
            self.gradient(group, f"{name} bias")
            self._done(layer, f"d {name[1]}")
        self._done(layer, "n1")
        self._all(layer, "summands")
        self._done(layer, "in order", "gathered", "d n2")
        self._own(layer, "d n1 own")
        self._done(layer, "summands")
        self._sum_weight_and_bias(layer)
        self._norm_gradients(group, "attention norm")
        self._done(layer, "rows", "d n1 own")
        self.give_back(f"x{layer}")

    def _backward_of_llama(self, layer: int, group: str) -> None:
        """The gradients of attention's weights come last."""
        self._keep(layer, "d gate", self.model.ffn_hidden)
        self._try("d up", self.model.ffn_hidden)
        self._done(layer, "d activated", "gate")  # the other gradient is in the place of what went in
        self.gradient(group, "gate")
        self._all(layer, "d n2 of gate")
        self._done(layer, "d gate")
        self.gradient(group, "up")
        self._done(layer, "n2")
        self._all(layer, "d n2")
        self._done(layer, "up")
        self._all(layer, "in order")
        self._own(layer, "d n2 own")
        self._own(layer, "d x2")
        self._all(layer, "gathered")
        self._keep(layer, "d attended", self.model.query_width)
        self._go_back_through_attention(layer)
        self._done(layer, "rotated q", "rotated k", "v")
        self._keep(layer, "turned", self.model.key_width)
        self._done(layer, "turned", "d attended")
        self._all(layer, "summands")
        self._done(layer, "gathered", "d n2 of gate", "d n2")
        self._own(layer, "d n1 own")
        self._done(layer, "summands")
        self._keep_rows(layer, "rows")
        self._norm_gradients(group, "ffn norm")
        self._norm_gradients(group, "attention norm")
        self._done(layer, "rows", "d n2 own", "d n1 own")
        self.give_back(f"x{layer}")
        self._done(layer, "wo")
        self.gradient(group, "wo")
        self._done(layer, "in order", "attended")
        for name in ("wv", "wk", "wq"):
            self.gradient(group, name)
            self._done(layer, f"d {name[1]}")
        self._done(layer, "n1")

    def _keep_rows(self, layer: int, name: str) -> None:
        self._keep(layer, name, self.own_width / ROWS, 4)

    def _sum_weight_and_bias(self, layer: int) -> None:
        """The rows of a norm's gradients, one after the other."""
        for _ in ("weight", "bias"):
            self._keep_rows(layer, "others")
            self._done(layer, "others")
