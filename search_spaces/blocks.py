"""Of which operators a pass through each part of the model consists, on one GPU of a layout."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from search_spaces.attention import Kernel
from search_spaces.engines import facts_of
from search_spaces.engines.base import EngineFacts
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.operators import Kind, Operator
from search_spaces.workload import Workload


class Places(NamedTuple):
    """The GPUs that ranks take, those of their own number where `order` is None, and the switches between their nodes.
    `num_gpus` is 0 within one node."""

    num_gpus: int
    gpus_per_node: int
    gpus_per_switch: int | None
    oversubscription: float
    order: tuple[int, ...] | None

    @classmethod
    def of(cls, layout: Layout, work: Workload) -> Places:
        if layout.num_gpus <= work.gpus_per_node:
            return ONE_NODE
        switches = work.gpus_per_switch, work.oversubscription
        return cls(layout.num_gpus, work.gpus_per_node, *switches, layout.rank_order)


ONE_NODE = Places(0, 1, None, 1.0, None)


class Cut(NamedTuple):
    """All of a layout that a pass through a part of the model depends on. `width`: bytes of a weight or an
    activation."""

    engine: EngineFacts
    micro_batch_size: int
    tensor: int
    context: int
    experts: int
    sequence_parallel: bool
    async_tensor_parallel: bool
    recompute: str
    compile: bool
    precision: str
    width: int
    autocast: bool
    adds_biases: bool
    leaves_out_last: bool
    attention: Kernel
    places: Places

    @classmethod
    def of(cls, layout: Layout, work: Workload) -> Cut:
        engine = facts_of(layout, work)
        return cls(
            engine,
            layout.micro_batch_size,
            layout.tensor_parallel_size,
            layout.context_parallel_size,
            layout.expert_parallel_size,
            layout.splits_sequence,
            layout.async_tensor_parallel,
            layout.recompute,
            layout.compile,
            layout.precision,
            layout.width,
            engine.autocasts(layout),
            engine.adds_biases(layout) and not layout.compile,
            engine.leaves_out_last(layout),
            engine.attention(work.accelerator, engine.exchanges_heads or layout.context_parallel_size == 1),
            Places.of(layout, work),
        )

    @property
    def tables(self) -> int:
        """GPUs over which embedding and head are split."""
        return self.tensor if self.engine.splits_tables else 1

    @property
    def waits_at_once(self) -> bool:
        """Whether nothing is computed while keys go around: what torch compiles waits for a message where it is sent
        (`_maybe_wrap_tensor` of `torch/distributed/_functional_collectives.py`)."""
        return self.engine.rings_heads and self.compile

    @property
    def is_uneven(self) -> bool:
        """Whether more tokens come to the experts of one rank than to those of another."""
        return self.experts > 1 and not self.engine.routes_evenly

    @property
    def copies_tokens(self) -> bool:
        """Whether hidden states whose tokens are split are copied, as torch gathers and scatters along the first
        dimension alone. Asynchronous ranks copy those of one sequence, too, unless the compiler fuses that away, which
        was not timed."""
        if self.engine.sequence_first:
            return False
        return self.micro_batch_size > 1 or self.async_tensor_parallel or self.engine.copies_one_sequence

    def tokens(self, sequence_length: int) -> int:
        """Tokens of a microbatch that a GPU has between the parts."""
        return self.micro_batch_size * sequence_length // self.context

    def shares(self, model: ModelShape) -> tuple[int, int, int, int]:
        """The width of hidden states, and a GPU's share of that of the feed-forward network, of queries, and of
        keys."""
        tensor = self.tensor
        return model.hidden, model.ffn_hidden // tensor, model.query_width // tensor, model.key_width // tensor


Used = tuple[Operator, int]
"""An operator, and how many of it there are."""


class Parts(NamedTuple):
    """What a microbatch goes through once in each part."""

    block: tuple[Used, ...]
    embedding: tuple[Used, ...]
    head: tuple[Used, ...]


@lru_cache(maxsize=4096)
def parts_of(cut: Cut, model: ModelShape, sequence_length: int) -> Parts:
    """For a microbatch of sequences of `sequence_length` tokens."""
    tokens = cut.tokens(sequence_length)
    plain = "bf16" if cut.precision == "fp8" else cut.precision
    entries, shared = model.vocab // cut.tables, ("shared",) * (cut.tables > 1)
    embedding = Operator(Kind.EMBEDDING, (tokens, model.hidden, entries), plain, cut.compile, shared)
    product = Operator(Kind.PRODUCT, (tokens, model.hidden, entries), plain, False)
    is_compiled = cut.compile and cut.engine.compiles_loss and not shared
    loss = Operator(Kind.LOSS, (tokens, entries), plain, is_compiled, shared)
    return Parts(_block(cut, model, sequence_length, plain), ((embedding, 1),), ((product, 1), (loss, 1)))


def update_of(engine: EngineFacts, parameters: float) -> Operator:
    """The update of so many parameters, once a step."""
    return Operator(Kind.UPDATE, (round(parameters),), "fp32", False, (engine.name,))


def _block(cut: Cut, model: ModelShape, sequence_length: int, plain: str) -> tuple[Used, ...]:
    """What lies between products is cast to fp8 by the same kernels where the block is compiled, else by those of the
    product."""
    tokens, (hidden, inner, _, _) = cut.tokens(sequence_length), cut.shares(model)
    between = cut.precision if cut.compile else plain
    outside = tokens // (cut.tensor if cut.sequence_parallel else 1), hidden

    used: Counter[Operator] = Counter()  # several may be alike
    used[Operator(Kind.NORM, outside, between, cut.compile, (model.family, *["autocast"] * cut.autocast))] = 2
    used[_attention(cut, model, sequence_length, between)] = 1
    used.update(_products(cut, model, tokens))
    if model.num_experts:
        here, filled = model.num_experts // cut.experts, cut.engine.fills_experts
        dims = (tokens, hidden, inner, here, model.experts_per_token)
        form = (model.family, "filled" if filled else "grouped")
        used[Operator(Kind.EXPERTS, dims, cut.precision, cut.compile and not filled, form)] = 1
    else:
        used[Operator(Kind.ACTIVATION, (tokens, inner), between, cut.compile, (model.family,))] = 1
    if cut.sequence_parallel and cut.copies_tokens:
        used[Operator(Kind.COPIES, (tokens, hidden), plain, cut.compile)] = 1
    return tuple(used.items())


def selected_of(cut: Cut, model: ModelShape, sequence_length: int) -> list[Operator]:
    """The products of a block that selective recomputation computes again, where an engine has it do so: no last one
    that nothing needs."""
    products = _products(cut, model, cut.tokens(sequence_length))
    if cut.leaves_out_last and not model.num_experts:
        products.pop()
    return products if cut.precision == "fp8" else products[1::2]


def last_product(cut: Cut, model: ModelShape, sequence_length: int) -> Operator:
    """Of a block without experts."""
    return _products(cut, model, cut.tokens(sequence_length))[-1]


def _products(cut: Cut, model: ModelShape, tokens: int) -> list[Operator]:
    """Of a block, in their order, but for those of experts."""
    hidden, inner, heads, keys = cut.shares(model)
    shapes = [(hidden, heads), (hidden, keys), (hidden, keys), (heads, hidden)]
    if not model.num_experts:
        shapes += [(hidden, inner)] * (2 if model.family == "llama" else 1) + [(inner, hidden)]
    biased, cast = ("bias",) * (model.family == "gpt"), cut.compile and cut.precision == "fp8"
    return [Operator(Kind.PRODUCT, (tokens, inside, wide), cut.precision, cast, biased) for inside, wide in shapes]


def _attention(cut: Cut, model: ModelShape, sequence_length: int, precision: str) -> Operator:
    """Ranks that exchange heads for tokens have whole sequences of fewer heads."""
    _, _, heads, keys = cut.shares(model)
    exchanged = cut.context if cut.engine.exchanges_heads else 1
    times = cut.context // exchanged
    dims = (
        cut.micro_batch_size,
        sequence_length // times,
        heads // exchanged,
        keys // exchanged,
        model.head_dim,
        times,
    )
    rotary = ("rotary",) * (model.family == "llama")
    return Operator(Kind.ATTENTION, dims, precision, cut.compile, rotary)
