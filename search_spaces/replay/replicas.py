"""What the `deepspeed` engine allocates where ranks have all states each, which is under torch's autocast: by
`deepspeed/runtime/engine.py` of DeepSpeed 0.19 and `autocast_mode.cpp` of PyTorch 2.11."""

from __future__ import annotations

from collections.abc import Sequence

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.replay.flat_split import share_of
from search_spaces.replay.groups import block_of, groups_of, parameters_of
from search_spaces.replay.training import Training

BUCKET = 500_000_000
"""Values of gradients beyond which no more are reduced together: `MEMORY_OPT_ALLREDUCE_SIZE`."""


class Replicas(Training):
    """A rank of eager blocks of a Llama, which are not computed again or wholly so: weights, gradients and moments are
    in fp32, parameter by parameter. The model is made whole: where products are split, a rank's part of a weight is a
    copy, in the place of wholes before it, so that some of their segments stay when the others are given back.

    Autocast makes a copy in bf16 of a weight for each product, and of its gradient one in fp32. Copies are kept until
    the end of a forward pass, and longer where the backward pass needs them; of DeepSpeed's own layers, which split
    products over ranks and give them transposed weights, it keeps none. A norm is computed step by step in fp32, as its
    weight is. Gradients stay from a step's first microbatch until its update, before which they are reduced.
    """

    def __init__(self, model: ModelShape, tokens: int, rounds: int, layout: Layout) -> None:
        self.splits = layout.tensor_parallel_size > 1
        self.wholes = dict(parameters_of(groups_of(model)))
        self.positions = tokens // layout.micro_batch_size
        share = share_of(model, layout.tensor_parallel_size)
        super().__init__(share, tokens, rounds, layout.compile, layout.recompute)

    def start(self) -> None:
        self.copies: list[str] = []
        self._make_rotary()
        self.make_weights()
        self.make_moments()

    def make_weights(self) -> None:
        for name, count in self.wholes.items():
            self.take(f"weight {name}", count, 4)
        for name, count in parameters_of(self.groups):
            if count < self.wholes[name]:
                self.take("part", count, 4)
                self.give_back(f"weight {name}")
                self.rename("part", f"weight {name}")
        self.allocator.empty()

    def _make_rotary(self) -> None:
        """The table of cosines and sines: small, but what else is smaller than ten MiB lies beside it."""
        angles = self.positions * self.model.head_dim
        self.take("half", angles / 2, 4)
        self.take("angles", angles, 4)
        self.give_back("half")
        self.take("cosines", angles, 4)
        self.take("sines", angles, 4)
        self.take("rotary table", 2 * angles, 4)
        self.give_back("cosines", "sines", "angles")

    def make_moments(self) -> None:
        for name, count in parameters_of(self.groups):
            self.take(f"first moment {name}", count, 4)
            self.take(f"second moment {name}", count, 4)

    # Gradients

    def gradient(self, group: str, name: str) -> None:
        """In fp32: of a weight of products by way of the one in bf16 that was made."""
        whole = f"gradient {group} {name}"
        kept, made = f"sum of {whole}", f"{whole} in bf16"
        self.take(whole, self.groups[group][name], 4)
        if self.holds(made):
            self.give_back(made)
        if self.holds(kept):
            self.give_back(whole)
        else:
            self.rename(whole, kept)

    def sum_up(self, group: str, is_last: bool) -> None:
        """Each gradient was, as it came."""

    def end(self) -> None:
        self.reduce()
        self.give_back(*(f"sum of gradient {name}" for name, _ in parameters_of(self.groups)))

    def reduce(self) -> None:
        """Buckets are copies of several gradients in a row."""
        filled: list[int] = []
        for _, count in parameters_of(self.groups):
            filled.append(count)
            if sum(filled) > BUCKET:
                self._send(filled)
                filled = []
        self._send(filled)

    def _send(self, gradients: Sequence[int]) -> None:
        if len(gradients) > 1:
            self.take("flat", sum(gradients), 4)
            self.give_back("flat")

    # Products

    def _cast(self, group: str, name: str) -> str:
        """Have a weight in bf16."""
        copy = f"{group} {name} in bf16"
        self.take(copy, self.groups[group][name])
        return copy

    def _product(self, layer: int, weight: str, made: str, values: float) -> None:
        """What comes of a block's weight."""
        copy = self._cast(block_of(layer), weight)
        self._keep(layer, made, values)
        self._work_forward()
        if self.drops and self.splits:
            self.give_back(copy)
        elif self.drops:
            self.copies.append(copy)

    def _product_back(self, layer: int, weight: str, made: str, values: float, *gone: str) -> None:
        """Both gradients of one, after which the copy of the weight goes as well, and that in fp32 of the weight."""
        group = block_of(layer)
        self.take(f"gradient {group} {weight} in bf16", self.groups[group][weight])
        self._keep(layer, made, values)
        self.give_back(f"{group} {weight} in bf16")
        self._done(layer, *gone)

    # Norms

    def take_normed(self, name: str) -> None:
        values = self.tokens * self.model.hidden
        self.take(f"{name} in fp32", values, 4)
        self.take("squares", values, 4)
        self.give_back("squares")
        self.take(f"{name} scaled", values, 4)
        self.take("weighted", values, 4)
        if self.drops:
            self.give_back(f"{name} in fp32", f"{name} scaled")
        self.take_all(name)
        self.give_back("weighted")

    def _norm_back(self, name: str, group: str, norm: str) -> None:
        """From the gradient `d {name}` of what a norm came to, to `from norm`, of what went in."""
        values = self.tokens * self.model.hidden
        self.take("d in fp32", values, 4)
        self.give_back(f"d {name}")
        self.take("of weight", values, 4)
        self.take("of scaled", values, 4)
        self._norm_gradients(group, norm)
        self.give_back("of weight", f"{name} scaled", "d in fp32")
        self.take("of sums", values, 4)
        self.take("directly", values, 4)
        self.give_back("of scaled", "of sums")
        for made in ("spread", "power", "twice", "by squares"):
            self.take(made, values, 4)
        self.give_back(f"{name} in fp32", "spread", "power", "twice")
        self.take("sum", values, 4)
        self.give_back("directly", "by squares")
        self.take_all("from norm")
        self.give_back("sum")

    # The ends

    def _embed(self, group: str) -> None:
        self.take("looked up", self.tokens * self.model.hidden, 4)
        self.take_all("x0")
        self.give_back("looked up")

    def _logits(self) -> None:
        self.take_normed("n")
        self._cast("head", "output")
        self.take("logits", self.tokens * self.model.vocab)
        self.give_back(*self.copies, f"x{self.model.layers}")
        self.copies.clear()

    def _head_backward(self, group: str, layer: int) -> None:
        self.take("gradient head output in bf16", self.model.vocab * self.model.hidden)
        self._work_backward()
        self.take_all("d n")
        self.give_back("n", "head output in bf16", "dlogits")
        self.gradient(group, "output")
        self._norm_back("n", group, "norm")
        self.rename("from norm", "dx")

    def _table_gradient(self) -> None:
        self.take("dx in fp32", self.tokens * self.model.hidden, 4)
        self.give_back("dx")
        self.rename("dx in fp32", "dx")
        self.gradient("embedding", "tokens")

    # A block

    def _forward(self, layer: int, again: bool = False) -> None:
        """Computed again, it ends with the last that is kept: the copy of a weight."""
        model = self.model
        hidden, inner = model.hidden, model.ffn_hidden
        self.take_normed(f"{layer} n1")
        for weight, width in (("q", model.query_width), ("k", model.key_width), ("v", model.key_width)):
            self._product(layer, f"w{weight}", weight, width)
            self._work_forward()
        for name, width in (("q", model.query_width), ("k", model.key_width)):
            self._rotate(layer, name, width)
        self._attend(layer)
        self._product(layer, "wo", "wo", hidden)
        self._past(layer, "n1", "attended")
        self._keep(layer, "x2", hidden)
        self._done(layer, "wo")
        self.take_normed(f"{layer} n2")
        self._product(layer, "gate", "gate", inner)
        self._product(layer, "up", "up", inner)
        for name in ("silu", "activated"):
            self._keep(layer, name, inner)
        self._past(layer, "gate", "up", "silu")
        if again:
            self._cast(block_of(layer), "down")
            self._done(layer, "x2")
            return
        self._product(layer, "down", "down", hidden)
        self._past(layer, "n2", "activated")
        self.take_all(f"x{layer + 1}")
        self._done(layer, "x2", "down")
        if not self.full:
            self.give_back(f"x{layer}")

    def _backward(self, layer: int, is_last: bool) -> None:
        model, group = self.model, block_of(layer)
        hidden, inner = model.hidden, model.ffn_hidden
        self._product_back(layer, "down", "d activated", inner, "activated")
        self.gradient(group, "down")
        self._keep(layer, "d up", inner)
        self._keep(layer, "d silu", inner)
        self._done(layer, "up", "silu", "d activated")
        self._keep(layer, "d gate", inner)
        self._done(layer, "gate", "d silu")
        self._product_back(layer, "up", "of up", hidden, "d up")
        self.gradient(group, "up")
        self._product_back(layer, "gate", "of gate", hidden, "n2", "d gate")
        self._add_gradients(layer, "of gate", "of gate", "of up")
        self.gradient(group, "gate")
        self.rename(f"{layer} of gate", f"d {layer} n2")
        self._norm_back(f"{layer} n2", group, "ffn norm")
        self._add_to_hidden()
        self._product_back(layer, "wo", "d attended", model.query_width)
        self.gradient(group, "wo")
        self._attend_back(layer)
        self._product_back(layer, "wv", "of v", hidden, "d v")
        self.gradient(group, "wv")
        self._product_back(layer, "wk", "of k", hidden, "d k")
        self._add_gradients(layer, "of k", "of k", "of v")
        self.gradient(group, "wk")
        self._product_back(layer, "wq", "of q", hidden, "n1", "d q")
        self._add_gradients(layer, "of q", "of q", "of k")
        self.gradient(group, "wq")
        self.rename(f"{layer} of q", f"d {layer} n1")
        self._norm_back(f"{layer} n1", group, "attention norm")
        self._add_to_hidden()
        if self.full:
            self.give_back(f"x{layer}")

    def _add_to_hidden(self) -> None:
        """What comes through a norm to what comes past it."""
        self.take_all("sum")
        self.give_back("dx", "from norm")
        self.rename("sum", "dx")
