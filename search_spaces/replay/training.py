"""What any engine allocates for a step on one GPU: blocks, the tables and the loss, forward and backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from search_spaces.models import MOST_LOGITS, ModelShape
from search_spaces.replay.allocator import Allocator, Piece
from search_spaces.replay.groups import block_of, ends_of, experts_of, groups_of

WORKSPACE = 2**25
"""Bytes that cuBLAS works in on Hopper, one piece for each thread that has products, which it keeps."""

TABLE = "gradient of the head's table"
"""Made before it is a parameter's: of a tied table it is a part."""

L2_CACHE = 60 * 2**20
"""Bytes that are written before each try of a kernel while the compiler looks for the fastest: an H200's, others' are
like it. They stay reserved, and small things that last find room there."""

ONE_WAY = 2048
"""Values of a token up to which the compiler knows one way to norm them, and has nothing to try: beyond, it sums them
up in one go or in parts of so many (`_reduction_configs` in `torch/_inductor/runtime/triton_heuristics.py`)."""

FEW_ROWS, ROWS = 3072, 10
"""Tokens up to which torch goes back through a table without a workspace, and tokens of which it adds up the gradients
of one row first (`aten/src/ATen/native/cuda/Embedding.cu`)."""

MAIN = 0
"""The stream that computes."""


class Training:
    """A training of one model, whose tensors have names while they live: those of block i begin with its number, and
    are apart from all others."""

    has_own_products = False
    """Whether products are functions of the engine's own, and none of torch's."""

    exchanges = False
    """Whether ranks of a sequence exchange what attention comes to: each has it of its heads and of its tokens."""

    spread_over = 1
    """Ranks that have other experts each."""

    compiles_recomputation = False
    """Whether forward passes of compiled blocks that are computed again keep nothing meanwhile, as the compiler sees
    that they are."""

    hands_on_logits = False
    """Whether logits are there until the end of their backward pass, as what a pipeline's last stage comes to."""

    def __init__(self, model: ModelShape, tokens: int, rounds: int, compiled: bool, recompute: str) -> None:
        self.allocator = Allocator()
        self.model, self.tokens, self.rounds, self.compiled = model, tokens, rounds, compiled
        self.selective, self.full = recompute == "selective", recompute == "full"
        self.is_gpt, self.has_mixture = model.family == "gpt", model.num_experts > 0
        # Compiled as one graph, which a mixture is not: autograd, or the policy of selective recomputation, then keep
        # what they keep of eager blocks.
        self.whole_graph = compiled and not (self.has_mixture and self.selective)
        self.live: dict[str, Piece] = {}
        self.block: dict[str, Piece] = {}  # what lives of the one under way, in the order in which it was made
        self.of_blocks: defaultdict[tuple[str, int], dict[str, Piece]] = defaultdict(dict)
        self.drops = self.stops = self.has_tried = False
        self.groups = groups_of(model, self.spread_over)
        self.late = 0.0
        self.start()

    def _try_norm(self) -> None:
        """The first, if there are several ways for it, or what it comes to is gathered."""
        if self.model.hidden > ONE_WAY or self.own_width < self.model.hidden:
            self._try_kernels()

    def _try_kernels(self) -> None:
        """Those that are the first for which there are several ways: the ways of others are often known already."""
        if self.compiled and not self.has_tried:
            self.has_tried = True
            self.take("cache", L2_CACHE, 1)
            self.give_back("cache")

    def _work_forward(self) -> None:
        self._work("workspace")

    def _work_backward(self) -> None:
        self._work("workspace of backward passes")

    def _work(self, name: str) -> None:
        """What a thread's products work in, which the first of them has made after what it comes to."""
        if not self.holds(name):
            self.take(name, WORKSPACE, 1)

    def among(self, name: str) -> dict[str, Piece]:
        """Those among which a tensor is."""
        return self.block if name[0].isdigit() else self.live

    def take(self, name: str, values: float, width: int = 2, stream: int = MAIN) -> None:
        self.among(name)[name] = self.allocator.take(values * width, stream)

    def take_all(self, name: str) -> None:
        """Hidden states of all tokens."""
        self.take(name, self.tokens * self.model.hidden)

    def take_own(self, name: str) -> None:
        """A rank's own of hidden states."""
        self.take(name, self.tokens * self.own_width)

    def give_back(self, *names: str) -> None:
        for name in names:
            self.allocator.give_back(self.among(name).pop(name))

    def rename(self, name: str, other: str) -> None:
        self.among(other)[other] = self.among(name).pop(name)

    def holds(self, name: str) -> bool:
        return name in self.among(name)

    @property
    def projects_in_place(self) -> bool:
        """Whether what attention comes to is projected to where the queries were before they were rotated."""
        return False

    @property
    def queries_are_hidden(self) -> bool:
        """Whether tensors of queries are as large as hidden states."""
        return self.model.query_width == self.model.hidden

    @property
    def makes_weights_first(self) -> bool:
        """Of eager products without a bias, autograd has the gradients of weights first."""
        return not (self.compiled or self.is_gpt or self.has_own_products)

    @property
    def keeps_gradients(self) -> bool:
        """Whether others still have the gradient of what came out of a block, or of its first half, when that of what
        went into attention or the network is added to it, which makes a new one then."""
        return self.compiled or self.has_own_products

    # What engines do in ways of their own

    def start(self) -> None:
        """Make the model, and the states that are there from the start."""
        raise NotImplementedError

    def gather(self, group: str) -> None:
        """Have the parameters of a group in the width of products."""

    def gradient(self, group: str, name: str) -> None:
        """Have one of a parameter, which autograd made."""
        raise NotImplementedError

    @property
    def own_width(self) -> float:
        """Values that a rank has of each token where hidden states are added up and normed."""
        return self.model.hidden

    def take_normed(self, name: str) -> None:
        """What a norm comes to, as products are given it."""
        self.take_all(name)

    def take_summands(self, name: str, norm: str) -> None:
        """What a product comes to, as it is added to the hidden states; it is the last to need `norm`."""
        self.take_all(name)

    def spread(self, name: str) -> None:
        """Have the gradient `name` of hidden states as the backward passes of such products are given it."""

    def spread_no_more(self, name: str) -> None:
        """Let go of what `spread` made."""

    def sum_gradients(self, name: str, *others: str) -> None:
        """From what products made of gradients of what a norm came to, to `name`, their sum."""

    def sum_up(self, group: str, is_last: bool) -> None:
        """What follows once all gradients of a group are there, of the last microbatch or another."""
        raise NotImplementedError

    def end(self) -> None:
        """What follows the last microbatch."""

    # A step

    def step(self) -> None:
        self._passes()
        self.end()

    def _passes(self) -> None:
        for index in range(self.rounds):
            self._microbatch(index == self.rounds - 1)

    def _microbatch(self, is_last: bool) -> None:
        model = self.model
        ends = ends_of(model)
        self._embed(ends[0])
        self._blocks_forward(range(model.layers))
        self.gather(ends[1])
        self._logits()
        self._loss_forward()
        self._loss_backward()
        self._head_backward(ends[1], model.layers)
        if not model.tie_embeddings:
            self.sum_up("head", is_last)
        self._blocks_backward(range(model.layers), is_last)
        if self.is_gpt and not model.tie_embeddings:
            self.gradient("embedding", "positions")
        self._table_gradient()
        self.give_back("dx")
        self.sum_up(ends[0], is_last)

    def _embed(self, group: str) -> None:
        tokens, hidden = self.tokens, self.model.hidden
        self.gather(group)
        self.take("x0", tokens * hidden)
        if self.is_gpt:
            self.take("positions", self.model.max_sequence_length * hidden)
            self.take("sum", tokens * hidden)
            self.give_back("x0", "positions")
            self.rename("sum", "x0")

    def _blocks_forward(self, layers: Iterable[int]) -> None:
        for layer in layers:
            self._enter(layer)
            self.gather(block_of(layer))
            self.drops = self.full and (self.compiles_recomputation or not self.compiled)
            self._forward(layer)
            self.drops = False
            if self.full:
                self._drop()

    def _blocks_backward(self, layers: Sequence[int], is_last: bool) -> None:
        for layer in reversed(layers):
            self._enter(layer)
            if self.full:
                self._forward(layer, again=True)
            self._backward(layer, is_last)
            self.sum_up(block_of(layer), is_last)

    def _logits(self) -> None:
        self.take_normed("n")
        self.take("logits", self.tokens * self.model.vocab)
        self._work_forward()

    def _loss_forward(self) -> None:
        """Of logits: compiled in bf16 alone; else of a copy in fp32, of which the log-softmax is left."""
        count = self.tokens * self.model.vocab
        if self.compiled:
            self.take("sums of logits", self.tokens, 4)
            return
        self.take("copy", count, 4)
        self.take("log-softmax", count, 4)
        self.give_back("copy", *(() if self.hands_on_logits else ("logits",)))

    def _loss_backward(self) -> None:
        """The gradients of logits: compiled piece by piece where they are too many; else by those of the copy, one
        after the other."""
        count = self.tokens * self.model.vocab
        if self.compiled:
            pieces = -(-count // MOST_LOGITS)
            gradients = [f"dlogits of piece {piece}" for piece in range(pieces)]
            for gradient in gradients:
                self.take(gradient, count / pieces)
            self.give_back(*(() if self.hands_on_logits else ("logits",)), "sums of logits")
            if pieces == 1:
                self.rename(gradients[0], "dlogits")
                return
            self.take("dlogits", count)
            self.give_back(*gradients)
            return
        self.take("of chosen", count, 4)
        self.take("of copy", count, 4)
        self.give_back("of chosen", "log-softmax")
        self.take("dlogits", count)
        self.give_back("of copy")

    def _head_backward(self, group: str, layer: int) -> None:
        """From the gradients of logits to those of the hidden states that came from the block before `layer`."""
        self._head_products()
        self.give_back("dlogits", "n")
        if not self.model.tie_embeddings:
            self.gradient("head", "output")
        self.sum_gradients("dn")
        self.take_own("dx")
        self.give_back("dn")
        self._norm_gradients(group, "norm")
        self.give_back(f"x{layer}")

    def _head_products(self) -> None:
        """The gradients of weights before those of what comes in, as autograd takes them without a bias."""
        self._table_product()
        if self.holds(TABLE):
            self._work_backward()
        self.take("dn", self.tokens * self.model.hidden)
        self._work_backward()

    def _table_product(self) -> None:
        self.take(TABLE, self.model.vocab * self.model.hidden)

    def _make_gradient(self, group: str, name: str, count: int) -> str:
        """Its name: a table's is there already, if the head's products made it."""
        made = f"gradient {group} {name}"
        if name in ("tokens", "output") and self.holds(TABLE):
            self.rename(TABLE, made)
        else:
            self.take(made, count)
            if name == "tokens":
                self._work_on_table(self.model.vocab)
        return made

    def _table_gradient(self) -> None:
        """A tied table's comes in two parts, of which autograd keeps the first until it has the second."""
        if not self.model.tie_embeddings:
            self.gradient("embedding", "tokens")
            return
        if self.is_gpt:
            self.gradient("ends", "positions")
        table = self.model.vocab * self.model.hidden
        self.take("second part", table)
        self._work_on_table(self.model.vocab)
        self.take("both parts", table)
        self.give_back("second part", TABLE)
        self.rename("both parts", TABLE)
        self.gradient("ends", "tokens")

    def _work_on_table(self, rows: int) -> None:
        """What the kernel works in that adds up the gradients of what was looked up in a table, in fp32: a sum for each
        row that may have been, and for all further parts of its tokens."""
        if self.tokens > FEW_ROWS:
            sums = min(self.tokens, rows) + self.tokens // ROWS
            self.take("workspace of a table", sums * self.model.hidden, 4)
            self.give_back("workspace of a table")

    def _norm_gradients(self, group: str, norm: str) -> None:
        for name in self.groups[group]:
            if name.startswith(norm):
                self.gradient(group, name)

    # A block

    under_way = ""
    """Which microbatch's pass through which stage, where several may have been through the same block."""

    def _enter(self, layer: int) -> None:
        self.block = self.of_blocks[self.under_way, layer]

    def _keep(self, layer: int, name: str, values: float, width: int = 2) -> None:
        """Of each token."""
        self.block[f"{layer} {name}"] = self.allocator.take(self.tokens * values * width)

    def _done(self, layer: int, *names: str) -> None:
        for name in names:
            self.allocator.give_back(self.block.pop(f"{layer} {name}"))

    def _past(self, layer: int, *names: str) -> None:
        """Only a backward pass needs these, which eager blocks that are computed again do not keep for it."""
        if self.drops:
            self._done(layer, *names)

    def _drop(self) -> None:
        """What lives yet of the block."""
        for piece in self.block.values():
            self.allocator.give_back(piece)
        self.block.clear()

    def _forward(self, layer: int, again: bool = False) -> None:
        """From x to the next one, which is not made where the block is computed `again`."""
        model, selective, fused = self.model, self.selective, self.compiled
        inner, queries, keys = model.ffn_hidden, model.query_width, model.key_width
        self.take_normed(f"{layer} n1")
        self._try_norm()
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            self._keep(layer, name, width)
            if again:
                self._work_backward()
            else:
                self._work_forward()
        if not self.is_gpt:
            for name, width in (("q", queries), ("k", keys)):
                self._rotate(layer, name, width)
                if fused and not selective and not (name == "q" and self.projects_in_place):
                    self._done(layer, name)
        self._attend(layer)
        if self.exchanges:
            self._keep(layer, "exchanged", queries)
        if self.projects_in_place:
            self.rename(f"{layer} q", f"{layer} wo")
        else:
            self.take_summands(f"{layer} wo", f"{layer} n1")
        if self.exchanges and selective:  # the policy leaves exchanges to be done again
            self._done(layer, "exchanged")
        self._past(layer, "n1", "attended", *(["exchanged"] if self.exchanges else []))
        if not fused or self.has_mixture:
            self._keep(layer, "x2", self.own_width)
            if not selective:
                self._done(layer, "wo")
        self.take_normed(f"{layer} n2")
        if self.has_mixture:
            self.stops = again and not fused  # before what the experts come to is weighted and added up
            self._experts_forward(layer)
            if not self.holds(f"{layer} down"):
                return
        else:
            if not self.is_gpt:
                self._keep(layer, "gate", inner)
            self._keep(layer, "up", inner)
            if not fused and not self.is_gpt:
                self._keep(layer, "silu", inner)
            self._keep(layer, "activated", inner)
            self._try_kernels()
            self._past(layer, "up", *(() if self.is_gpt else ("gate",) if fused else ("gate", "silu")))
            if again and not fused:  # all is there that its backward pass wants
                return
            if selective:
                self._done(layer, "n2", *(("silu",) if self.holds(f"{layer} silu") else ()))
            self.take_summands(f"{layer} down", f"{layer} n2")
            if selective:
                self._done(layer, "activated")
            if not fused:
                self._past(layer, "n2", "activated")
        if fused and not self.has_mixture:
            self._add_compiled(layer, again)
            return
        if not again:
            self.take_own(f"x{layer + 1}")
        if selective:  # the policy keeps the last product, which nothing needs
            self._done(layer, "x2")
        if not selective or self.has_mixture:
            self._done(layer, "down")

    def _add_compiled(self, layer: int, again: bool) -> None:
        """The sum is made in place of the last product."""
        if again:
            self._done(layer, "down")
        else:
            self.rename(f"{layer} down", f"x{layer + 1}")

    def _attend(self, layer: int) -> None:
        """What attention comes to, and what was needed for that alone."""
        self._keep(layer, "attended", self.model.query_width)
        self._keep(layer, "sums", self.model.heads, 4)
        if not self.compiled and not self.selective and not self.is_gpt:  # names of theirs lived on
            self._done(layer, "q", "k")
        if self.selective:
            self._done(layer, "n1", *(() if self.is_gpt else ("rotated q", "rotated k")))
        self._past(layer, "v", *(("q", "k") if self.is_gpt else ("rotated q", "rotated k")), "sums")

    def _rotate(self, layer: int, name: str, width: int) -> None:
        """Eager ones are turned in fp32, step by step."""
        if self.compiled:
            self._keep(layer, f"rotated {name}", width)
            self._try_kernels()
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
        self._keep(layer, "probabilities", model.num_experts, 4)
        self._keep(layer, "rows", hidden)
        self.gather(experts_of(layer))
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
        if self.stops:
            return
        if not self.whole_graph:
            self._keep(layer, "weighted", hidden)
        self.take_summands(f"{layer} down", f"{layer} n2")
        if not self.whole_graph:
            self._done(layer, "weighted")
        if selective:
            self._done(layer, "in order", "n2")

    def _backward(self, layer: int, is_last: bool) -> None:
        model, selective, fused = self.model, self.selective, self.compiled
        hidden, inner, queries = model.hidden, model.ffn_hidden, model.query_width
        in_graph = selective and self.whole_graph
        group = block_of(layer)
        self.spread("dx")
        if selective:
            self._recompute(layer)
        if self.has_mixture:
            self._experts_backward(layer, is_last)
            self._done(layer, "n2")
        else:
            self._back_through(layer, "d activated", inner, "down")
            self._done(layer, "activated")
            self.spread_no_more("dx")
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
                self._done(layer, "d activated", "silu", "up")
                self._keep(layer, "d gate", inner)
                self._done(layer, "d silu", "gate")
            if not self.is_gpt:
                self._back_through(layer, "d n2 of gate", hidden, "gate")
                self._done(layer, "d gate")
            self._back_through(layer, "d n2", hidden, "up")
            self._done(layer, "d up", "n2")
            if not self.is_gpt and (fused or self.has_own_products):
                self._done(layer, "d n2 of gate")
            elif not self.is_gpt:
                self._add_gradients(layer, "d n2", "d n2 of gate", "d n2")
        self.sum_gradients(f"{layer} d n2")
        self._norm_gradients(group, "ffn norm")
        self._keep(layer, "d x2", self.own_width)
        self._done(layer, "d n2")
        if self.holds(f"{layer} x2"):
            is_kept = self.keeps_gradients or self.among("dx")["dx"].others > 0
            if is_kept:
                self._keep(layer, "both", self.own_width)
            self._done(layer, "d x2", "x2")
            self.rename(f"{layer} both" if is_kept else "dx", f"{layer} d x2")
        if self.holds(f"{layer} wo"):
            self._done(layer, "wo")
        if self.holds("dx"):
            self.give_back("dx")
        self.spread(f"{layer} d x2")
        if self.exchanges and in_graph:
            self._keep(layer, "d attended", queries)
            self._keep(layer, "exchanged", queries)
            self.gradient(group, "wo")
            if self.is_gpt:
                self.gradient(group, "wo bias")
        else:
            self._back_through(layer, "d attended", queries, "wo")
        self.spread_no_more(f"{layer} d x2")
        if self.exchanges:
            self._keep(layer, "d exchanged", queries)
            self._done(layer, "d attended", "exchanged")
            self.rename(f"{layer} d exchanged", f"{layer} d attended")
        self._attend_back(layer)
        if in_graph:
            self._keep(layer, "n1", hidden)
        if fused:
            for name in ("wv", "wk", "wq"):
                self._keep(layer, f"d n1 of {name}", hidden)
                self.gradient(group, name)
            if self.is_gpt:
                for name in ("wv", "wk", "wq"):
                    self.gradient(group, f"{name} bias")
            self._done(layer, "d q", "d k", "d v", "n1")
            self.sum_gradients(*(f"{layer} d n1 of {name}" for name in ("wq", "wk", "wv")))
        else:
            for name in ("v", "k", "q"):
                self._back_through(layer, f"d n1 of w{name}", hidden, f"w{name}")
                self._done(layer, f"d {name}")
                if name == "k" and self.has_own_products:
                    self._done(layer, "d n1 of wk")
                    self.rename(f"{layer} d n1 of wv", f"{layer} d n1")
                elif name == "k":
                    self._add_gradients(layer, "d n1", "d n1 of wv", "d n1 of wk")
            self._done(layer, "d n1 of wq", "n1")  # the sum of the other two is nobody else's: it is added to that
            self.sum_gradients(f"{layer} d n1")
        self._norm_gradients(group, "attention norm")
        if fused:
            self.take_own("dx")
        else:
            self._keep(layer, "d x1", self.own_width)
            self._done(layer, "d n1")
            if self.keeps_gradients:
                self.take_own("dx")
            else:
                self.rename(f"{layer} d x2", "dx")
            self._done(layer, "d x1")
        self.give_back(f"x{layer}")
        self._drop()

    def _back_through(self, layer: int, name: str, values: float, parameter: str) -> None:
        """The gradient `name` of what went into a product, of each token, and that of its weight: which comes first if
        autograd takes it by itself."""
        group = block_of(layer)
        if self.makes_weights_first:
            self.gradient(group, parameter)
        self._keep(layer, name, values)
        self._work_backward()
        if not self.makes_weights_first:
            self.gradient(group, parameter)
        if self.is_gpt:
            self.gradient(group, f"{parameter} bias")

    def _add_gradients(self, layer: int, made: str, *names: str) -> None:
        """Gradients of the same hidden states, of which others may have views, to another one."""
        self._keep(layer, "both", self.model.hidden)
        self._done(layer, *names)
        self.rename(f"{layer} both", f"{layer} {made}")

    def _attend_back(self, layer: int) -> None:
        """From the gradients of what attention came to, to those of queries, keys and values."""
        queries, keys = self.model.query_width, self.model.key_width
        if self.selective and self.whole_graph and not self.is_gpt:
            self._keep(layer, "rotated q", queries)
            self._keep(layer, "rotated k", keys)
        self._go_back_through_attention(layer)
        self._done(layer, "d attended", "attended", "sums", "v")
        if self.is_gpt:
            self._done(layer, "q", "k")
            return
        self._done(layer, "rotated q", "rotated k")
        if not self.compiled:
            self._rotate_back(layer, "d k", keys)
            self._rotate_back(layer, "d q", queries)
        if self.selective:
            self._done(layer, "q", "k")

    def _go_back_through_attention(self, layer: int) -> None:
        """The gradients of queries, keys and values, and what the kernel works in that makes them: in fp32 a sum for
        each value of the queries and for each head, and where heads share keys and values, the gradients of these for
        each head, in half the width."""
        model = self.model
        for name, width in (("q", model.query_width), ("k", model.key_width), ("v", model.key_width)):
            self._keep(layer, f"d {name}", width)
        of_heads = model.query_width if model.kv_heads < model.heads else 0
        self._keep(layer, "workspace of attention", model.query_width + of_heads + model.heads, 4)
        self._done(layer, "workspace of attention")

    def _recompute(self, layer: int) -> None:
        """What selective recomputation does not keep; in one graph, what the next products need, and later the rest."""
        model = self.model
        if self.whole_graph:
            self.take_normed(f"{layer} n2")
            self._keep(layer, "activated", model.ffn_hidden)
            return
        self.take_normed(f"{layer} n1")
        if not self.is_gpt:
            for name, width in (("q", model.query_width), ("k", model.key_width)):
                self._rotate(layer, name, width)
        if self.exchanges:
            self._keep(layer, "exchanged", model.query_width)
        self._keep(layer, "x2", self.own_width)
        self.take_normed(f"{layer} n2")
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
        """The two copies in fp32 that were turned and not have a gradient each."""
        for made, size, gone in (
            ("copy", 4, (name,)),
            ("sines", 4, ()),
            ("negative", 2, ()),
            ("cosines", 4, ("copy",)),
            ("straight", 2, ("cosines",)),
            ("turned", 4, ("sines", "negative")),
            (name, 2, ("turned", "straight")),
        ):
            self._keep(layer, made, width, size)
            self._done(layer, *gone)

    def _experts_backward(self, layer: int, is_last: bool) -> None:
        model, chosen = self.model, self.model.experts_per_token
        hidden, inner, group = chosen * model.hidden, chosen * model.ffn_hidden, experts_of(layer)
        if not self.compiled:  # what each gate weighed, before it is summed up
            self._keep(layer, "d weighted of gates", hidden)
        self._keep(layer, "d weighted", hidden)
        if not self.compiled:
            self._done(layer, "d weighted of gates")
        self.spread_no_more("dx")
        self._done(layer, "in order")
        self._keep(layer, "d copies", hidden)
        self._keep(layer, "d of experts", hidden)
        self._done(layer, "d copies", "d weighted")
        self.gradient(group, "down")
        self._keep(layer, "d activated", inner)
        self._done(layer, "activated", "d of experts")
        self._keep(layer, "d up", inner)
        self._keep(layer, "d silu", inner)
        self._done(layer, "d activated", "silu", "up")
        self._keep(layer, "d gate", inner)
        self._done(layer, "d silu", "gate")
        self.gradient(group, "up")
        self._keep(layer, "d rows of up", hidden)
        self._done(layer, "d up")
        self.gradient(group, "gate")
        self._keep(layer, "d rows of gate", hidden)
        self._done(layer, "d gate", "rows", "d rows of gate")  # which is added to the other one
        self.sum_up(group, is_last)
        self._keep(layer, "d copies", hidden)
        self._keep(layer, "d n2 of experts", model.hidden)
        self._done(layer, "d copies", "d rows of up")
        self._keep(layer, "d n2 of router", model.hidden)
        self.gradient(block_of(layer), "router")
        self._keep(layer, "d n2", model.hidden)
        self._done(layer, "d n2 of experts", "d n2 of router")
        if self.selective:
            self._done(layer, "of experts")
