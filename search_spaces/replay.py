"""What a training on one GPU has torch's allocator reserve, by replaying what it allocates, in order.

The sum of what is there at once is less than what is reserved, as tensors do not fit each other's places: the moments
of Adam, which `megatron` makes at the end of the first step, lie where activations and logits were; what cuBLAS works
in may lie where the first logits were, and the next find no room there. So a few microbatches of a few steps are run
through `search_spaces.allocator`, tensor by tensor, as autograd, torch's compiler and FSDP2 make and drop them
(`trainables`, PyTorch 2.11).

Sizes are in values of the width that is given, 2 bytes if none is. A block keeps what `docs/memory.md` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from search_spaces.allocator import Allocator, Piece
from search_spaces.engines import ENGINES
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.workload import Workload

STEPS = 3
"""After which no more is reserved: the second is the first with moments, the third has them where they stay."""

ROUNDS = 2
"""Microbatches of a step that differ: the first finds no gradients, the last sums them up."""

WORKSPACE = 2**25
"""Bytes that cuBLAS works in on Hopper, one piece for each thread that has products, which it keeps."""

FULLEST = 2.4
"""Tokens that come to the fullest of all experts, in those of an even share, while routers are young. Fitted."""

MAIN, REDUCING = 0, 1
"""Streams: FSDP2 makes the gradients of its shards on one of their own."""


@dataclass(frozen=True)
class Replayed:
    """Bytes: `reserved` by torch's allocator, `most` in use at once, and `late`, gradients made by a step's last
    backward pass in a pool of their own."""

    reserved: float
    most: float
    late: float


def replayed(layout: Layout, work: Workload) -> Replayed | None:
    """Of a legal layout; None where the order of its allocations is not known."""
    model, facts = work.shape, ENGINES.get(layout.engine)  # what is built on them may allocate otherwise
    plain = (layout.precision, layout.reduce_precision, layout.zero_stage) == ("bf16", "fp32", 0)
    if facts is None or facts.allocates is None or work.trainer is not None or layout.num_gpus > 1 or not plain:
        return None
    if layout.offload_optimizer or layout.expandable_segments:
        return None
    rounds = min(ROUNDS, layout.gradient_accumulation_steps)
    tokens = layout.micro_batch_size * work.sequence_length
    return _replay(facts.allocates, model, tokens, rounds, layout.compile, layout.recompute)


@lru_cache(maxsize=4096)
def _replay(run: str, model: ModelShape, tokens: int, rounds: int, compiled: bool, recompute: str) -> Replayed:
    training = _RUNS[run](model, tokens, rounds, compiled, recompute)
    for _ in range(STEPS):
        training.step()
    return Replayed(training.allocator.reserved, training.allocator.most, training.late)


class _Run:
    """A training of one model, whose tensors have names while they live: those of block i begin with its number."""

    def __init__(self, model: ModelShape, tokens: int, rounds: int, compiled: bool, recompute: str) -> None:
        self.allocator = Allocator()
        self.model, self.tokens, self.rounds, self.compiled = model, tokens, rounds, compiled
        self.selective, self.full = recompute == "selective", recompute == "full"
        self.is_gpt, self.has_mixture = model.family == "gpt", model.num_experts > 0
        # Compiled as one graph, which a mixture is not: autograd, or the policy of selective recomputation, then keep
        # what they keep of eager blocks.
        self.whole_graph = compiled and not (self.has_mixture and self.selective)
        self.live: dict[str, Piece] = {}
        self.drops = False
        self.groups = _groups(model)
        self.late = 0.0
        self.start()
        self.take("workspace", WORKSPACE, 1)

    def take(self, name: str, values: float, width: int = 2, stream: int = MAIN) -> None:
        self.live[name] = self.allocator.take(values * width, stream)

    def give_back(self, *names: str) -> None:
        for name in names:
            self.allocator.give_back(self.live.pop(name))

    def rename(self, name: str, other: str) -> None:
        self.live[other] = self.live.pop(name)

    # What engines do in ways of their own

    def start(self) -> None:
        """Make the model, and the states that are there from the start."""
        raise NotImplementedError

    def gather(self, group: str) -> None:
        """Have the parameters of a group in the width of products."""

    def gradient(self, group: str, name: str) -> None:
        """Have one of a parameter, which autograd made."""
        raise NotImplementedError

    def sum_up(self, group: str, is_last: bool) -> None:
        """What follows once all gradients of a group are there, of the last microbatch or another."""
        raise NotImplementedError

    def end(self) -> None:
        """What follows the last microbatch."""

    # A step

    def step(self) -> None:
        for index in range(self.rounds):
            self._microbatch(index == self.rounds - 1)
        self.end()

    def _microbatch(self, is_last: bool) -> None:
        model, tokens, hidden = self.model, self.tokens, self.model.hidden
        ends = ("ends", "ends") if model.tie_embeddings else ("embedding", "head")
        self.gather(ends[0])
        self.take("x0", tokens * hidden)
        if self.is_gpt:
            self.take("positions", model.max_sequence_length * hidden)
            self.take("sum", tokens * hidden)
            self.give_back("x0", "positions")
            self.rename("sum", "x0")
        for layer in range(model.layers):
            self.gather(_block(layer))
            self.drops = self.full and not self.compiled
            self._forward(layer)
            self.drops = False
            if self.full:
                self._drop(layer)
        self.gather(ends[1])
        self._loss()
        self.take("dn", tokens * hidden)
        if "workspace of backward passes" not in self.live:
            self.take("workspace of backward passes", WORKSPACE, 1)
        self._table_gradient("output")
        self.give_back("dlogits", "n")
        self.take("dx", tokens * hidden)
        self.give_back("dn")
        self._norm_gradients(ends[1], "norm")
        self.give_back(f"x{model.layers}")
        if not model.tie_embeddings:
            self.sum_up("head", is_last)
        for layer in reversed(range(model.layers)):
            if self.full:
                self._forward(layer, again=True)
            self._backward(layer, is_last)
            self.sum_up(_block(layer), is_last)
        if self.is_gpt and not model.tie_embeddings:
            self.gradient("embedding", "positions")
        self._table_gradient("tokens")
        self.give_back("dx")
        self.sum_up(ends[0], is_last)

    def _loss(self) -> None:
        """Logits to their gradients: compiled in bf16 alone; else a copy in fp32, its log-softmax, and the gradients of
        both, one after the other."""
        tokens, count = self.tokens, self.tokens * self.model.vocab
        self.take("n", tokens * self.model.hidden)
        self.take("logits", count)
        if self.compiled:
            self.take("sums", tokens, 4)
            self.take("dlogits", count)
            self.give_back("logits", "sums")
            return
        self.take("copy", count, 4)
        self.take("log-softmax", count, 4)
        self.give_back("copy", "logits")
        self.take("of chosen", count, 4)
        self.take("of copy", count, 4)
        self.give_back("of chosen", "log-softmax")
        self.take("dlogits", count)
        self.give_back("of copy")

    def _table_gradient(self, name: str) -> None:
        """A tied table's comes in two parts, of which autograd keeps the first until it has the second."""
        if not self.model.tie_embeddings:
            self.gradient("head" if name == "output" else "embedding", name)
        elif name == "output":
            self.take("first part", self.model.vocab * self.model.hidden)
        else:
            self.take("second part", self.model.vocab * self.model.hidden)
            if self.is_gpt:
                self.gradient("ends", "positions")
            self.give_back("second part")
            self.gradient("ends", "tokens")

    def _norm_gradients(self, group: str, norm: str) -> None:
        for name in self.groups[group]:
            if name.startswith(norm):
                self.gradient(group, name)

    # A block

    def _keep(self, layer: int, name: str, values: float, width: int = 2) -> None:
        """Of each token."""
        self.take(f"{layer} {name}", self.tokens * values, width)

    def _done(self, layer: int, *names: str) -> None:
        self.give_back(*(f"{layer} {name}" for name in names))

    def _past(self, layer: int, *names: str) -> None:
        """Only a backward pass needs these, which eager blocks that are computed again do not keep for it."""
        if self.drops:
            self._done(layer, *names)

    def _drop(self, layer: int) -> None:
        self.give_back(*[name for name in self.live if name.startswith(f"{layer} ")])

    def _forward(self, layer: int, again: bool = False) -> None:
        """From x to the next one, which is not made where the block is computed `again`."""
        model, selective, fused = self.model, self.selective, self.compiled
        hidden, inner, queries, keys = model.hidden, model.ffn_hidden, model.query_width, model.key_width
        self._keep(layer, "n1", hidden)
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            self._keep(layer, name, width)
        if not self.is_gpt:
            for name, width in (("q", queries), ("k", keys)):
                self._rotate(layer, name, width)
                if fused and not selective:
                    self._done(layer, name)
        self._keep(layer, "attended", queries)
        self._keep(layer, "sums", model.heads, 4)
        if not fused and not selective and not self.is_gpt:  # names of theirs lived on
            self._done(layer, "q", "k")
        if selective:
            self._done(layer, "n1", *(() if self.is_gpt else ("rotated q", "rotated k")))
        self._past(layer, "v", *(("q", "k") if self.is_gpt else ("rotated q", "rotated k")), "sums")
        self._keep(layer, "wo", hidden)
        self._past(layer, "n1", "attended")
        if not fused or self.has_mixture:
            self._keep(layer, "x2", hidden)
            if not selective:
                self._done(layer, "wo")
        self._keep(layer, "n2", hidden)
        if self.has_mixture:
            self._experts_forward(layer)
        else:
            if not self.is_gpt:
                self._keep(layer, "gate", inner)
            self._keep(layer, "up", inner)
            if not fused and not self.is_gpt:
                self._keep(layer, "silu", inner)
            self._keep(layer, "activated", inner)
            self._past(layer, "up", *(() if self.is_gpt else ("gate", "silu")))
            if selective:
                self._done(layer, "n2", *(("silu",) if f"{layer} silu" in self.live else ()))
            self._keep(layer, "down", hidden)
            if selective:
                self._done(layer, "activated")
        if fused and not self.has_mixture:  # the sum is made in place of the last product
            if again:
                self._done(layer, "down")
            else:
                self.rename(f"{layer} down", f"x{layer + 1}")
            return
        if not again:
            self.take(f"x{layer + 1}", self.tokens * hidden)
        if selective:  # the policy keeps the last product, which nothing needs
            self._done(layer, "x2")
        if not selective or self.has_mixture:
            self._done(layer, "down")

    def _rotate(self, layer: int, name: str, width: int) -> None:
        """Eager ones are turned in fp32, step by step."""
        if self.compiled:
            self._keep(layer, f"rotated {name}", width)
            return
        for made, size, gone in (
            ("whole", width, ()),
            ("copy", width, ()),
            ("cosines", width, ("copy",)),
            ("negative", width / 2, ()),
            ("turned", width, ("negative",)),
            ("sines", width, ("turned",)),
            ("sum", width, ("cosines", "sines")),
        ):
            self._keep(layer, made, size, 4)
            self._done(layer, *gone)
        self._keep(layer, f"rotated {name}", width)
        self._done(layer, "sum", "whole")

    def _experts_forward(self, layer: int) -> None:
        """Tokens once for each expert that they go to, through one grouped product after the other."""
        model, selective, chosen = self.model, self.selective, self.model.experts_per_token
        hidden, inner = chosen * model.hidden, chosen * model.ffn_hidden
        self.gather(_experts(layer))
        self._keep(layer, "probabilities", model.num_experts, 4)
        self._keep(layer, "rows", hidden)
        for name in ("gate", "up", "silu", "activated"):
            self._keep(layer, name, inner)
        self._past(layer, "gate", "up", "silu")
        if selective:
            self._done(layer, "silu")
        self._keep(layer, "of experts", hidden)
        self._past(layer, "activated")
        if selective:
            self._done(layer, "activated", "rows")
        self._keep(layer, "in order", hidden)
        if not selective:
            self._done(layer, "of experts")
        if self.whole_graph:
            self._keep(layer, "down", model.hidden)
        else:
            self._keep(layer, "weighted", hidden)
            self._keep(layer, "down", model.hidden)
            self._done(layer, "weighted")
        if selective:
            self._done(layer, "in order", "n2")

    def _backward(self, layer: int, is_last: bool) -> None:
        model, selective, fused = self.model, self.selective, self.compiled
        hidden, inner, queries, keys = model.hidden, model.ffn_hidden, model.query_width, model.key_width
        in_graph = selective and self.whole_graph
        group = _block(layer)
        if selective:
            self._recompute(layer)
        if self.has_mixture:
            self._experts_backward(layer, is_last)
        else:
            self._keep(layer, "d activated", inner)
            self.gradient(group, "down")
            if self.is_gpt:
                self.gradient(group, "down bias")
            self._done(layer, "activated")
            if fused:  # in place of what goes in, where that is the last to need it
                self.rename(f"{layer} d activated", f"{layer} d up" if self.is_gpt else f"{layer} d gate")
                if self.is_gpt:
                    self._done(layer, "up")
                else:
                    self.rename(f"{layer} up", f"{layer} d up")
                    self._done(layer, "gate")
            elif self.is_gpt:
                self._keep(layer, "d up", inner)
                self._done(layer, "d activated", "up")
            else:
                self._keep(layer, "d silu", inner)
                self._keep(layer, "d up", inner)
                self._done(layer, "d activated", "silu")
                self._keep(layer, "d gate", inner)
                self._done(layer, "d silu", "gate", "up")
            if not self.is_gpt:
                self._keep(layer, "d n2 of gate", hidden)
                self.gradient(group, "gate")
                self._done(layer, "d gate")
            self._keep(layer, "d n2", hidden)
            self.gradient(group, "up")
            if self.is_gpt:
                self.gradient(group, "up bias")
            self._done(layer, "d up")
            if not self.is_gpt and fused:
                self._done(layer, "d n2 of gate")
            elif not self.is_gpt:
                self._keep(layer, "both", hidden)
                self._done(layer, "d n2 of gate", "d n2")
                self.rename(f"{layer} both", f"{layer} d n2")
        self._done(layer, "n2")
        self._norm_gradients(group, "ffn norm")
        self._keep(layer, "d x2", hidden)
        self._done(layer, "d n2")
        if f"{layer} x2" in self.live:
            self._keep(layer, "both", hidden)
            self._done(layer, "d x2", "x2")
            self.rename(f"{layer} both", f"{layer} d x2")
        if f"{layer} wo" in self.live:
            self._done(layer, "wo")
        self.give_back("dx")
        self._keep(layer, "d attended", queries)
        self.gradient(group, "wo")
        if self.is_gpt:
            self.gradient(group, "wo bias")
        if in_graph and not self.is_gpt:
            self._keep(layer, "rotated q", queries)
            self._keep(layer, "rotated k", keys)
        for name, width in (("d q", queries), ("d k", keys), ("d v", keys)):
            self._keep(layer, name, width)
        self._done(layer, "d attended", "attended", "sums", "v")
        if self.is_gpt:
            self._done(layer, "q", "k")
        else:
            self._done(layer, "rotated q", "rotated k")
            if not fused:
                self._rotate_back(layer, "d q", queries)
                self._rotate_back(layer, "d k", keys)
            if selective:
                self._done(layer, "q", "k")
        if in_graph:
            self._keep(layer, "n1", hidden)
        for name in ("wv", "wk", "wq"):
            self._keep(layer, f"d n1 of {name}", hidden)
            self.gradient(group, name)
        if self.is_gpt:
            for name in ("wv", "wk", "wq"):
                self.gradient(group, f"{name} bias")
        self._done(layer, "d q", "d k", "d v", "n1")
        self._norm_gradients(group, "attention norm")
        self.take("dx", self.tokens * hidden)
        self.give_back(f"x{layer}")
        self._drop(layer)

    def _recompute(self, layer: int) -> None:
        """What selective recomputation does not keep; in one graph, what the next products need, and later the rest."""
        model = self.model
        if self.whole_graph:
            self._keep(layer, "n2", model.hidden)
            self._keep(layer, "activated", model.ffn_hidden)
            return
        self._keep(layer, "n1", model.hidden)
        if not self.is_gpt:
            for name, width in (("q", model.query_width), ("k", model.key_width)):
                self._rotate(layer, name, width)
        self._keep(layer, "x2", model.hidden)
        self._keep(layer, "n2", model.hidden)
        if self.has_mixture:
            chosen = model.experts_per_token
            self._keep(layer, "rows", chosen * model.hidden)
            self._keep(layer, "silu", chosen * model.ffn_hidden)
            self._keep(layer, "activated", chosen * model.ffn_hidden)
            self._keep(layer, "in order", chosen * model.hidden)
        else:
            if not self.is_gpt:
                self._keep(layer, "silu", model.ffn_hidden)
            self._keep(layer, "activated", model.ffn_hidden)

    def _rotate_back(self, layer: int, name: str, width: int) -> None:
        for made, gone in (
            ("copy", ()),
            ("sines", ()),
            ("turned", ()),
            ("cosines", ("copy", "sines")),
            ("sum", ("turned", "cosines")),
        ):
            self._keep(layer, made, width, 4)
            self._done(layer, *gone)
        self._keep(layer, "back", width)
        self._done(layer, "sum", name)
        self.rename(f"{layer} back", f"{layer} {name}")

    def _experts_backward(self, layer: int, is_last: bool) -> None:
        model, chosen = self.model, self.model.experts_per_token
        hidden, inner, group = chosen * model.hidden, chosen * model.ffn_hidden, _experts(layer)
        if not self.whole_graph:
            self._keep(layer, "d weighted", hidden)
        self._keep(layer, "d of experts", hidden)
        self._done(layer, "in order", *(() if self.whole_graph else ("d weighted",)))
        self._keep(layer, "d activated", inner)
        self.gradient(group, "down")
        self._done(layer, "activated", "d of experts")
        self._keep(layer, "d silu", inner)
        self._keep(layer, "d up", inner)
        self._done(layer, "d activated", "silu")
        self._keep(layer, "d gate", inner)
        self._done(layer, "d silu", "gate", "up")
        self._keep(layer, "d rows of gate", hidden)
        self.gradient(group, "gate")
        self._done(layer, "d gate")
        self._keep(layer, "d rows of up", hidden)
        self.gradient(group, "up")
        self._done(layer, "d up", "rows")
        self._keep(layer, "d rows", hidden)
        self._done(layer, "d rows of gate", "d rows of up")
        self._keep(layer, "d copies", hidden)
        self._done(layer, "d rows")
        self._keep(layer, "d n2 of experts", model.hidden)
        self._done(layer, "d copies")
        self.sum_up(group, is_last)
        self._keep(layer, "d n2 of router", model.hidden)
        self.gradient(_block(layer), "router")
        self._keep(layer, "d n2", model.hidden)
        self._done(layer, "d n2 of experts", "d n2 of router")
        if self.selective:
            self._done(layer, "of experts")


class _Sharded(_Run):
    """The `megatron` engine, by FSDP2 of a single rank: parameters are cast group by group as they are needed,
    gradients of microbatches are summed in fp32 and copied to those of the shards after the last, and the first step
    ends with the moments of Adam."""

    def start(self) -> None:
        """Each part of the model is made whole, and then copied to what the rank holds of it."""
        self.gathered: set[str] = set()
        self.summed: set[str] = set()
        self.has_moments = self.is_sending = False
        for group, parameters in self.groups.items():
            for name, count in parameters.items():
                self.take(f"whole {group} {name}", count, 4)
            for name, count in parameters.items():
                self.take(f"shard {group} {name}", count, 4)
                self.give_back(f"whole {group} {name}")

    def gather(self, group: str) -> None:
        if group in self.gathered:
            return
        self.gathered.add(group)
        for name, count in self.groups[group].items():
            self.take("cast", count)
            self.take(f"{group} {name}", count)
            self.give_back("cast")

    def gradient(self, group: str, name: str) -> None:
        if name == "tokens" and group == "ends":
            self.rename("first part", f"gradient {group} {name}")
        else:
            self.take(f"gradient {group} {name}", self.groups[group][name])

    def sum_up(self, group: str, is_last: bool) -> None:
        parameters = self.groups[group]
        new = [f"gradient {group} {name}" for name in parameters]
        if group in self.summed:
            self.give_back(*new)
        elif not is_last:
            for name, count in parameters.items():
                self.take(f"sum {group} {name}", count, 4)
                self.give_back(f"gradient {group} {name}")
            self.summed.add(group)
        if not is_last:
            return
        self.give_back(*(f"{group} {name}" for name in parameters))
        self.gathered.remove(group)
        if self.is_sending:
            self.give_back("sent")
        self.is_sending, whole = True, sum(parameters.values())
        self.take("sent", whole, 4)
        self.give_back(*((f"sum {group} {name}" for name in parameters) if group in self.summed else new))
        self.summed.discard(group)
        self.take(f"late {group}", whole, 4, REDUCING)

    def step(self) -> None:
        self.give_back(*[name for name in self.live if name.startswith("late ")])
        super().step()

    def end(self) -> None:
        self.give_back("sent")
        self.is_sending = False
        if not self.has_moments:
            self.has_moments = True
            for group, parameters in self.groups.items():
                for name, count in parameters.items():
                    self.take(f"first {group} {name}", count, 4)
                    self.take(f"second {group} {name}", count, 4)
        self.late = 4.0 * sum(sum(parameters.values()) for parameters in self.groups.values())


class _Flat(_Run):
    """DeepSpeed's optimizer of ZeRO-1 for bf16 on a single rank: all states are flat and there before the first step,
    and gradients go as soon as they are summed up, those of a compiled block all at once."""

    def start(self) -> None:
        count = sum(sum(parameters.values()) for parameters in self.groups.values())
        self.take("weights", count)
        for name in ("master weights", "sums of gradients", "first moments", "second moments"):
            self.take(name, count, 4)
        self.waiting: list[str] = []

    def gradient(self, group: str, name: str) -> None:
        if group == "ends" and name == "tokens":
            self.give_back("first part")
            return
        count = self.groups[group][name]
        if group.startswith("experts"):  # of one after the other
            count //= self.model.num_experts
        self.take(f"gradient {group} {name}", count)
        self.waiting.append(f"gradient {group} {name}")
        if not self.compiled or not group.startswith("block"):
            self.sum_up(group, False)

    def sum_up(self, group: str, is_last: bool) -> None:
        self.give_back(*self.waiting)
        self.waiting.clear()

    def _experts_forward(self, layer: int) -> None:
        """One after the other, each with room for as many tokens as the fullest has; results are weighed in fp32."""
        model, chosen = self.model, self.model.experts_per_token
        room, hidden = chosen * FULLEST, model.hidden
        share, inner = room / model.num_experts, room * model.ffn_hidden / model.num_experts
        self._keep(layer, "for router", hidden, 4)
        self._keep(layer, "probabilities", model.num_experts, 4)
        self._past(layer, "for router")
        self._keep(layer, "padded", hidden)
        self._keep(layer, "rows", room * hidden)
        self._done(layer, "padded")
        for expert in range(model.num_experts):
            for name in ("gate", "up", "silu", "activated"):
                self._keep(layer, f"{name} {expert}", inner)
            if self.selective:
                self._done(layer, f"silu {expert}")
            self._past(layer, f"gate {expert}", f"up {expert}", f"silu {expert}")
            self._keep(layer, f"of expert {expert}", share * hidden)
            self._past(layer, f"activated {expert}")
            if self.selective:
                self._done(layer, f"activated {expert}")
        results = [f"of expert {expert}" for expert in range(model.num_experts)]
        self._keep(layer, "together", room * hidden)
        if self.selective:
            self._done(layer, "rows")
        else:
            self._done(layer, *results)
        self._decode(layer)
        if self.selective:
            self._done(layer, "in order", "for router")
        else:
            self._keep(layer, "for balance", hidden, 4)
        if self.selective:
            self._done(layer, "n2")

    def _decode(self, layer: int) -> None:
        hidden, chosen = self.model.hidden, self.model.experts_per_token
        self._keep(layer, "padded", chosen * FULLEST * hidden)
        self._done(layer, "together")
        self._keep(layer, "in order", chosen * hidden)
        self._done(layer, "padded")
        self._keep(layer, "weighted", chosen * hidden, 4)
        self._keep(layer, "weighted sum", hidden, 4)
        self._done(layer, "weighted")
        self._keep(layer, "down", hidden)
        self._done(layer, "weighted sum")

    def _recompute(self, layer: int) -> None:
        if not self.has_mixture:
            super()._recompute(layer)
            return
        model, chosen = self.model, self.model.experts_per_token
        room, hidden = chosen * FULLEST, model.hidden
        inner = room * model.ffn_hidden / model.num_experts
        self._keep(layer, "n1", hidden)
        for name, width in (("q", model.query_width), ("k", model.key_width)):
            self._rotate(layer, name, width)
        self._keep(layer, "x2", hidden)
        self._keep(layer, "n2", hidden)
        self._keep(layer, "for router", hidden, 4)
        self._keep(layer, "padded", hidden)
        self._keep(layer, "rows", room * hidden)
        self._done(layer, "padded")
        for expert in range(model.num_experts):
            self._keep(layer, f"silu {expert}", inner)
            self._keep(layer, f"activated {expert}", inner)
        self._keep(layer, "together", room * hidden)
        self._decode(layer)
        self._done(layer, "down")
        self._keep(layer, "for balance", hidden, 4)

    def _experts_backward(self, layer: int, is_last: bool) -> None:
        model, chosen = self.model, self.model.experts_per_token
        room, hidden, group = chosen * FULLEST, model.hidden, _experts(layer)
        share, inner = room / model.num_experts, room * model.ffn_hidden / model.num_experts
        self._keep(layer, "d sum", hidden, 4)
        self._keep(layer, "d weighted", chosen * hidden, 4)
        self._keep(layer, "d in order", chosen * hidden)
        self._done(layer, "d weighted")
        self._keep(layer, "of gates", chosen * hidden, 4)
        self._done(layer, "of gates", "d sum", "in order")
        self._keep(layer, "d of experts", room * hidden)
        self._done(layer, "d in order")
        for expert in reversed(range(model.num_experts)):
            self._keep(layer, "d activated", inner)
            self.gradient(group, "down")
            self._done(layer, f"activated {expert}")
            self._keep(layer, "d silu", inner)
            self._keep(layer, "d up", inner)
            self._done(layer, "d activated", f"silu {expert}")
            self._keep(layer, "d gate", inner)
            self._done(layer, "d silu", f"gate {expert}", f"up {expert}")
            self._keep(layer, "of up", share * hidden)
            self.gradient(group, "up")
            self._done(layer, "d up")
            self._keep(layer, "of gate", share * hidden)
            self.gradient(group, "gate")
            self._done(layer, "d gate")
            self._keep(layer, f"d rows {expert}", share * hidden)
            self._done(layer, "of up", "of gate")
        self._keep(layer, "d rows", room * hidden)
        self._done(layer, "rows", "d of experts", *(f"d rows {expert}" for expert in range(model.num_experts)))
        self._keep(layer, "d padded", hidden)
        self._done(layer, "d rows")
        self._keep(layer, "d for router", hidden, 4)
        self.gradient(_block(layer), "router")
        self._keep(layer, "d n2 of router", hidden)
        self._done(layer, "d for router", "for router", "for balance")
        self._keep(layer, "d n2", hidden)
        self._done(layer, "d padded", "d n2 of router")
        if self.selective:
            self._done(layer, *(f"of expert {expert}" for expert in range(model.num_experts)))


_RUNS: dict[str, type[_Run]] = {"sharded": _Sharded, "flat": _Flat}


def _block(layer: int) -> str:
    return f"block {layer}"


def _experts(layer: int) -> str:
    return f"experts {layer}"


def _groups(model: ModelShape) -> dict[str, dict[str, int]]:
    """Parameters by what is gathered and summed up together, in the order of the model: tied tables are one group, and
    experts another than what else their block has."""
    hidden, inner, queries, keys = model.hidden, model.ffn_hidden, model.query_width, model.key_width
    is_gpt = model.family == "gpt"

    def norm(name: str) -> dict[str, int]:
        return {f"{name} {index}": hidden for index in range(2 if is_gpt else 1)}

    def products(**sizes: tuple[int, int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, (inside, outside) in sizes.items():
            found[name] = inside * outside
            if is_gpt:
                found[f"{name} bias"] = outside
        return found

    embedding = {"tokens": model.vocab * hidden} | ({"positions": model.max_sequence_length * hidden} if is_gpt else {})
    head = norm("norm")
    block = norm("attention norm")
    block |= products(wq=(hidden, queries), wk=(hidden, keys), wv=(hidden, keys), wo=(queries, hidden))
    block |= norm("ffn norm")
    experts: dict[str, int] = {}
    if model.num_experts:
        block["router"] = hidden * model.num_experts
        experts = dict.fromkeys(("gate", "up", "down"), model.num_experts * hidden * inner)
    else:
        gate = {} if is_gpt else {"gate": (hidden, inner)}
        block |= products(**gate, up=(hidden, inner), down=(inner, hidden))
    groups = {"ends": embedding | head} if model.tie_embeddings else {"embedding": embedding}
    for layer in range(model.layers):
        groups |= {_block(layer): block} | ({_experts(layer): experts} if experts else {})
    return groups if model.tie_embeddings else groups | {"head": head | {"output": model.vocab * hidden}}
