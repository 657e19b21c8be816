"""What the `deepspeed` engine allocates in ways of its own."""

from __future__ import annotations

from collections.abc import Sequence

from search_spaces.replay.filled import FilledExperts
from search_spaces.replay.groups import block_of, is_of_experts
from search_spaces.replay.turns import turns


class Flat(FilledExperts):
    """DeepSpeed's optimizer of ZeRO-1 for bf16 on a single rank: all states are flat and there before the first step,
    and gradients go as soon as they are summed up, those of a compiled block all at once."""

    compiles_recomputation = True  # or, of a graph that ends at experts, autograd sees it

    replicas = 1
    """Ranks that have a share each of what the optimizer updates and keeps."""

    def start(self) -> None:
        self.count = sum(sum(parameters.values()) for parameters in self.groups.values())
        self.waiting: list[tuple[str, int]] = []
        self.take("weights", self.count)
        self.take("master weights", self.count / self.replicas, 4)
        self.take("sums of gradients", self.count, 4)
        self.make_moments()

    def make_moments(self) -> None:
        for name in ("first moments", "second moments"):
            self.take(name, self.count / self.replicas, 4)

    def gradient(self, group: str, name: str) -> None:
        count = self.groups[group][name]
        if is_of_experts(group):  # of one after the other
            count //= self.experts
        self.waiting.append((self._make_gradient(group, name, count), count))
        if not self.waits(group):
            self.sum_up(group, False)

    def waits(self, group: str) -> bool:
        """Whether a group's gradients are summed up once all of them are there."""
        return self.compiled and group.startswith("block")

    def in_turn(self, names: Sequence[str]) -> Sequence[str]:
        """The parameters of a group that waits, in the order in which their gradients are summed up."""
        return [names[turn] for turn in turns(len(names))]

    def sum_up(self, group: str, is_last: bool) -> None:
        if self.waits(group) and not self.has_mixture:
            counts = dict(self.waiting)
            names = [f"gradient {group} {name}" for name in self.in_turn(list(self.groups[group]))]
            self.waiting = [(name, counts[name]) for name in names]
        for name, count in self.waiting:
            self.arrive(name, count)
        self.waiting.clear()

    def arrive(self, name: str, count: int) -> None:
        """What becomes of a gradient once there is nothing left to wait for: added to the sum, by way of a copy in
        fp32."""
        self.take("copy in fp32", count, 4)
        self.give_back("copy in fp32", name)

    # A Llama's block that is one compiled graph, and whose backward pass computes it again within another one

    keeps_sums = False
    """Whether such a block keeps what attention's last product came to."""

    @property
    def projects_in_place(self) -> bool:
        """Where these are as many: so it was recorded of one graph of torch's products that is not computed again."""
        in_graph = self.compiled and not (self.selective or self.full or self.exchanges or self.has_own_products)
        return in_graph and not self.is_gpt and self.queries_are_hidden

    @property
    def recomputes_in_graph(self) -> bool:
        return self.compiled and self.full and not (self.is_gpt or self.has_mixture)

    def _forward(self, layer: int, again: bool = False) -> None:
        if self.drops and self.compiled and self.is_gpt and not self.exchanges:
            self._forward_in_place(layer)
        elif not self.recomputes_in_graph:
            super()._forward(layer, again)
        elif not again:  # or its backward pass begins with it
            self._forward_at_once(layer)

    def _forward_in_place(self, layer: int) -> None:
        """Of a GPT, whose graph keeps nothing meanwhile: products, norms and activations are where what they are made
        of was. While the last are tried, each time of a copy, that is there beside them."""
        model = self.model
        self.take_normed(f"{layer} n1")
        self._try_norm()
        for name in ("q", "k", "v"):
            self._keep(layer, name, model.hidden)
            self._work_forward()
        self._done(layer, "n1")
        self._keep(layer, "attended", model.hidden)
        self._keep(layer, "sums", model.heads, 4)
        self._done(layer, "k", "v", "sums")
        self._keep(layer, "up", model.ffn_hidden)
        self._done(layer, "attended")
        if not self.has_tried:
            self._keep(layer, "copy", model.ffn_hidden)
            self._try_kernels()
            self._done(layer, "copy")
        self._keep(layer, "down", model.hidden)
        self._done(layer, "up", "q")
        self.rename(f"{layer} down", f"x{layer + 1}")

    def _take_projected(self, layer: int) -> None:
        model = self.model
        self._keep(layer, "n1", model.hidden)
        self._try_norm()
        for name, width in (("q", model.query_width), ("k", model.key_width), ("v", model.key_width)):
            self._keep(layer, name, width)
            self._work_forward()

    def _take_attended(self, layer: int) -> None:
        queries, keys = self.model.query_width, self.model.key_width
        if self.exchanges:
            for name, width in (("rotated q", queries), ("rotated k", keys), ("v", keys)):
                self._exchange(layer, width)
                self._done(layer, name)
                self.rename(f"{layer} exchanged", f"{layer} {name}")
        self._keep(layer, "attended", queries)
        self._keep(layer, "sums", self.model.heads, 4)
        if self.exchanges:
            self._exchange(layer, queries)

    def _exchange(self, layer: int, width: float) -> None:
        """Of heads for tokens: in order, as it came, and in order again."""
        self._keep(layer, "to send", width)
        self._keep(layer, "received", width)
        self._keep(layer, "exchanged", width)
        self._done(layer, "to send", "received")

    def _attention(self, layer: int) -> None:
        self._take_projected(layer)
        for name, width in (("q", self.model.query_width), ("k", self.model.key_width)):
            self._rotate(layer, name, width)
            self._done(layer, name)
        self._take_attended(layer)

    def _forward_at_once(self, layer: int) -> None:
        """What the compiler makes takes the place of what is as large and not needed any more."""
        model, alike = self.model, self.queries_are_hidden
        self._take_projected(layer)
        if alike:
            self.rename(f"{layer} n1", f"{layer} rotated q")
        else:
            self._keep(layer, "rotated q", model.query_width)
        self._done(layer, "q")
        self._rotate(layer, "k", model.key_width)
        self._done(layer, "k")
        self._take_attended(layer)
        self._done(layer, "v", "rotated k", "sums", *(() if alike else ("rotated q",)))
        self.rename(f"{layer} rotated q" if alike else f"{layer} n1", f"x{layer + 1}")
        self._done(layer, *(["exchanged"] if self.exchanges else []))
        if alike:
            self.rename(f"{layer} attended", f"{layer} n2")
        else:
            self._done(layer, "attended")
            self._keep(layer, "n2", model.hidden)
        self._keep(layer, "gate", model.ffn_hidden)
        self._keep(layer, "up", model.ffn_hidden)
        self._done(layer, "n2", "up")
        self._keep(layer, "down", model.hidden)
        self._done(layer, "gate")
        self._add_at_once(layer)

    def _add_at_once(self, layer: int) -> None:
        """The next hidden states lie where what attention's last product came to did."""
        self._done(layer, "down")

    def _backward(self, layer: int, is_last: bool) -> None:
        """The gradients of all that goes into products are there at once, beside what they are computed from."""
        if not self.recomputes_in_graph:
            super()._backward(layer, is_last)
            return
        model, group = self.model, block_of(layer)
        hidden, inner = model.hidden, model.ffn_hidden
        if not self.keeps_sums:
            self._attention(layer)
            self.take(f"summed of {layer}", self.tokens * hidden)
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
        if self.keeps_sums:
            self._attention(layer)
        self._keep(layer, "d attended", model.query_width)
        if self.exchanges:
            self._keep(layer, "d exchanged", model.query_width)
            self._done(layer, "d attended")
            self.rename(f"{layer} d exchanged", f"{layer} d attended")
        self._go_back_through_attention(layer)
        self._done(layer, "v", "rotated q", "sums", "d attended")
        self.gradient(group, "wo")
        self._done(layer, "rotated k", "attended", *(["exchanged"] if self.exchanges else []))
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
