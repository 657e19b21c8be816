"""What one GPU does for a microbatch in each part of the model, in seconds, FLOPs and bytes; see docs/cost.md.

Matrix products and memory traffic by the roofline (Williams et al. 2009), collectives by `search_spaces.network`.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

from search_spaces.coefficients import Coefficients
from search_spaces.engines import facts_of
from search_spaces.engines.base import EngineFacts
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.network import Collective, Group, Network, group_of
from search_spaces.workload import Workload

LOSS_TRAFFIC = 40
"""Bytes that kernels move for a logit and its gradient, in fp32 and kernel by kernel."""

COMPILED_LOSS_TRAFFIC = 10
"""Bytes a logit with one kernel each way."""

EAGER_ROTARY = 24
"""Values that the kernels of rotary positions read and write for one of queries and keys, where nothing fuses them."""

EAGER_COPIES = 20
"""Values that the kernels which sequence parallelism's gathers and scatters need read and write for one of the hidden
states, where nothing fuses them. Fitted."""

HEAD_WIDTHS = (32, 64, 96, 128, 192, 256)
"""Of heads that attention has kernels for; others than multiples of 8 are padded to the next of them (Dao 2023)."""

AUTOCAST_NORMS = 25
"""Values that autocast's kernels read and write for one of the hidden states of a block: norms, which are in fp32, and
copies in bf16 for each product."""


class Load(NamedTuple):
    """Work of one GPU: seconds at the full clock by kind, FLOPs as bf16 would have them for the same time, and bytes
    that it moves in its memory and sends to others."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    flops: float = 0.0
    moved: float = 0.0
    sent: float = 0.0

    @property
    def seconds(self) -> float:
        return self.matmul + self.attention + self.elementwise + self.tensor + self.context + self.experts

    def plus(self, other: Load, times: float = 1.0) -> Load:
        return Load(*[mine + times * theirs for mine, theirs in zip(self, other, strict=True)])

    def times(self, factor: float) -> Load:
        return Load(*[factor * mine for mine in self])


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
    attention_time: float
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
            engine.attention_time(work.accelerator),
            Places.of(layout, work),
        )

    @property
    def gathers_fp8(self) -> bool:
        return self.precision == "fp8" and self.sequence_parallel and self.engine.gathers_fp8

    @property
    def tables(self) -> int:
        """GPUs over which embedding and head are split."""
        return self.tensor if self.engine.splits_tables else 1


class Passes(NamedTuple):
    """A microbatch forward and backward, with what is computed again, through one part of the model each."""

    block: Load
    embedding: Load
    head: Load


@lru_cache(maxsize=4096)  # a fit of the coefficients goes through many
def passes(cut: Cut, model: ModelShape, sequence_length: int, c: Coefficients) -> Passes:
    """For a microbatch of sequences of `sequence_length` tokens."""
    tokens = cut.micro_batch_size * sequence_length // cut.context
    forward, backward = _block(cut, model, sequence_length, tokens, c)
    block = forward.plus(backward)
    if cut.recompute == "full":
        block = block.plus(forward)
    elif cut.recompute == "selective":
        block = block.plus(Load(elementwise=forward.elementwise, moved=forward.moved))
        if cut.engine.selects_products:
            block = block.plus(_selected(cut, model, tokens, c))
    embedding = _traffic(3.0 * cut.width * tokens * model.hidden, cut.compile, c)
    shared = cut.tables > 1
    fused = cut.compile and not shared
    loss = cut.engine.shared_loss_traffic if shared else COMPILED_LOSS_TRAFFIC if fused else LOSS_TRAFFIC
    head = _traffic(tokens * model.vocab / cut.tables * loss, fused, c)
    product = _products(tokens, [(model.hidden, model.vocab // cut.tables, 1)], cut, c, _speed(cut, c, fp8=False))
    head = head.plus(product, 3)
    if shared:
        state = cut.width * tokens * model.hidden
        seconds, sent = communicate(Collective.ALL_REDUCE, state, 1, cut.tensor, 1, cut.places, c)
        embedding, head = (part.plus(Load(tensor=seconds, sent=sent)) for part in (embedding, head))
    return Passes(block, embedding, head)


def communicate(
    kind: Collective, size: float, count: int, ranks: int, stride: int, places: Places, c: Coefficients
) -> tuple[float, float]:
    """Seconds, and bytes that a GPU sends, of `count` collectives of `size` bytes together, of ranks `stride` apart."""
    if ranks == 1:
        return 0.0, 0.0
    twice = 2 if kind == Collective.ALL_REDUCE else 1
    seconds = count * network(places, c).takes(kind, size / count, spread(ranks, stride, places))
    return seconds, twice * size * (ranks - 1) / ranks


@lru_cache(maxsize=4096)
def network(places: Places, c: Coefficients) -> Network:
    """The network between these GPUs, as the coefficients have it."""
    return c.network(places.gpus_per_node, places.gpus_per_switch, places.oversubscription, places.order)


@cache
def spread(ranks: int, stride: int, places: Places) -> Group:
    """How a group of ranks, `stride` apart, lies on the machines, at the worst of all such groups."""
    num_gpus, per_node, per_switch, _, order = places
    if not num_gpus:
        return Group(ranks, 1, ranks, ranks)
    if order is None:
        together, beneath = (_sharing(ranks, stride, size) for size in (per_node, per_switch or num_gpus))
        return Group(ranks, -(-ranks // together), together, beneath)
    firsts = (first for first in range(num_gpus) if first // stride % ranks == 0)
    placed = [[order[first + i * stride] for i in range(ranks)] for first in firsts]
    groups = [group_of(gpus, per_node, per_switch) for gpus in placed]
    return Group(
        ranks,
        max(group.nodes for group in groups),
        min(group.together for group in groups),
        min(group.beneath for group in groups),
    )


def _sharing(ranks: int, stride: int, size: int) -> int:
    """How many of `ranks`, `stride` apart, are among `size` neighbours."""
    return ranks if ranks * stride <= size else max(1, size // stride)


def _block(cut: Cut, model: ModelShape, sequence: int, tokens: int, c: Coefficients) -> tuple[Load, Load]:
    """A transformer block forward, and backward, which takes twice the products and two and a half times attention
    (Dao 2023, section 3)."""
    products, spread = _matmuls(cut, model, tokens, c)
    attention = _attention(cut, model, sequence, tokens, c)
    elementwise = _traffic(cut.width * tokens * _values(cut, model), cut.compile, c)
    if cut.sequence_parallel and not cut.engine.sequence_first:
        # torch gathers and scatters along the first dimension, and copies from and to the second, four times.
        copies = (6.0 if cut.gathers_fp8 else 8.0) if cut.compile else EAGER_COPIES
        elementwise = elementwise.plus(_traffic(copies * cut.width * tokens * model.hidden, cut.compile, c))
    there, back = _tensor_sums(cut, model, tokens, c)
    forward = products.plus(attention).plus(elementwise).plus(spread).plus(there)
    backward = products.times(2).plus(attention, 2.5).plus(elementwise, 2).plus(spread).plus(back)
    if cut.precision == "fp8" and not cut.compile:
        casts, gradient_casts = _casts(cut, model, tokens, c)
        forward, backward = forward.plus(casts), backward.plus(gradient_casts)
    return forward, backward


def _selected(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> Load:
    """What selective recomputation computes again of the products, and what it gathers for them."""
    shapes = [
        (inside, outside, 1) for some in _widths(cut, model) for inside, outside, count in some for _ in range(count)
    ]
    again = _products(tokens, shapes if cut.precision == "fp8" else shapes[1::2], cut, c, _speed(cut, c))
    return again.plus(_gathers(cut, model, tokens, c)) if cut.sequence_parallel else again


def _casts(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> tuple[Load, Load]:
    """To fp8, forward and backward, in a block that is not compiled: each product casts what it is given for itself.

    Two bytes a value are read twice, for the scale and for the cast, and one is written. Backward that is done to
    gradients, and gradients, inputs and weights are laid out anew, a byte read and a byte written.
    """
    projections, network = _widths(cut, model)
    products = projections + network
    given = sum(count * (tokens * inside + inside * outside) for inside, outside, count in products)
    gradients = sum(count * tokens * outside for _, outside, count in products)
    return _traffic(5.0 * given, True, c), _traffic(5.0 * gradients + 2.0 * (gradients + given), True, c)


def _widths(cut: Cut, model: ModelShape) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Width in, width out and how many, of the products of attention, and of one feed-forward network."""
    hidden, inner, heads, keys = _shares(cut, model)
    projections = [(hidden, heads, 1), (hidden, keys, 2), (heads, hidden, 1)]
    network = [(hidden, inner, 2 if model.family == "llama" else 1), (inner, hidden, 1)]
    return projections, network


def _matmuls(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> tuple[Load, Load]:
    """The matrix products of a block forward, and the exchanges of tokens and of keys and values among their GPUs."""
    hidden, _, heads, keys = _shares(cut, model)
    projections, network = _widths(cut, model)
    speed = _speed(cut, c)
    spread = Load()
    if cut.context > 1:
        # Ulysses's four exchanges, or keys and values of the whole sequence.
        shape = 2.0 * (heads + keys) if cut.engine.exchanges_heads else 2.0 * keys * cut.context
        kind, count = (Collective.ALL_TO_ALL, 4) if cut.engine.exchanges_heads else (Collective.ALL_GATHER, 1)
        size = cut.width * tokens * shape
        seconds, sent = communicate(kind, size, count, cut.context, cut.tensor, cut.places, c)
        spread = Load(context=c.contention * seconds if cut.engine.rings_keys else seconds, sent=sent)
    if not model.num_experts:
        return _products(tokens, projections + network, cut, c, speed), spread
    rows = tokens * model.experts_per_token * (c.expert_imbalance if cut.experts > 1 else 1.0)
    here = model.num_experts // cut.experts
    products = _products(tokens, projections, cut, c, speed)
    products = products.plus(_products(max(1.0, rows / here), network, cut, c, speed), here)
    if cut.engine.masks_experts:
        # Tokens are dealt out and collected by products with masks of each token, expert and place there.
        products = products.plus(_products(tokens, [(hidden, round(rows), 2)], cut, c, speed))
    size = 2 * cut.width * rows * hidden
    seconds, sent = communicate(Collective.ALL_TO_ALL, size, 2, cut.experts, cut.tensor, cut.places, c)
    return products, spread.plus(Load(experts=seconds, sent=sent))


def _products(rows: float, shapes: list[tuple[int, int, int]], cut: Cut, c: Coefficients, speed: float) -> Load:
    """Products of `rows` rows with matrices (width in, width out, how many), at `speed` in that of bf16."""
    seconds = flops = 0.0
    for inside, outside, count in shapes:
        work = 2.0 * rows * inside * outside / speed
        traffic = cut.width * (rows * inside + inside * outside + rows * outside)
        computed = work / c.matmul_flops * (1 + c.matmul_half / min(rows, inside, outside))
        seconds += count * max(computed, traffic / c.memory_bytes_per_s)
        flops += count * work
    return Load(matmul=seconds, flops=flops)


def _attention(cut: Cut, model: ModelShape, sequence: int, tokens: int, c: Coefficients) -> Load:
    """Causal attention forward: half of all pairs of tokens, of which context-parallel ranks have equal shares."""
    engine, work = cut.engine, 2.0 * tokens * sequence * model.hidden / cut.tensor / _speed(cut, c, fp8=False)
    if engine.scores_traffic:  # of all pairs
        moved = 1.0 * engine.scores_traffic * tokens * sequence * model.heads / cut.tensor
        return Load(attention=2 * work / c.matmul_flops, flops=2 * work).plus(_traffic(moved, True, c))
    slower = cut.attention_time * _padded(model.head_dim) / model.head_dim
    if cut.context > 1 and not engine.exchanges_heads:
        slower *= engine.gathered_attention
    return Load(attention=slower * work / c.attention_flops, flops=work)


def _padded(width: int) -> int:
    """The width of a head that kernels really have."""
    return width if width % 8 == 0 else next((wide for wide in HEAD_WIDTHS if wide >= width), width)


def _values(cut: Cut, model: ModelShape) -> float:
    """Values that the kernels between the products of a block read and write for a token, forward."""
    hidden, inner, heads, keys = _shares(cut, model)
    outside = hidden / (cut.tensor if cut.sequence_parallel else 1)
    chosen = model.experts_per_token if model.num_experts else 1
    rotary = 0 if model.family == "gpt" else 2 if cut.compile else EAGER_ROTARY
    # Norms and sums with what came in, fused into three passes or not; the activation function, with its gate.
    values = (9 if cut.compile else 10) * outside + rotary * (heads + keys) + 2 * heads
    values += chosen * inner * (2 if model.family == "gpt" else 3 if cut.compile else 5)
    if model.num_experts:
        values += 6 * chosen * hidden  # sorted by expert, and back
    if cut.context > 1 and not (cut.engine.exchanges_heads or cut.engine.rings_keys):
        values += 2 * cut.context * (keys + 2 * heads)  # keys and values put in order, and once for each head
    if cut.autocast and not cut.compile:
        values += AUTOCAST_NORMS * hidden
    if cut.precision == "fp8" and cut.compile:
        values += 2 * (2 * (outside if cut.gathers_fp8 else hidden) + heads + chosen * inner)
    return values


def _tensor_sums(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> tuple[Load, Load]:
    """Two sums over tensor-parallel ranks forward, and backward (Shoeybi et al. 2019), each a scatter and a gather
    (Korthikanti et al. 2022), or backward one of the gradients of what goes into each product apart."""
    if cut.tensor == 1:
        return Load(), Load()
    if cut.sequence_parallel:
        sums = _gathers(cut, model, tokens, c).plus(
            _messages(Collective.REDUCE_SCATTER, cut.width, cut, model, tokens, c)
        )
    else:
        sums = _messages(Collective.ALL_REDUCE, cut.width, cut, model, tokens, c)
    inputs = 4 if model.family == "gpt" else 5
    more = inputs / 2 if cut.engine.sums_inputs_apart else 1.0
    return sums, sums.times(more)


def _gathers(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> Load:
    """Of hidden states that sequence parallelism splits, before attention and before the feed-forward network."""
    return _messages(Collective.ALL_GATHER, 1 if cut.gathers_fp8 else cut.width, cut, model, tokens, c)


def _messages(kind: Collective, width: int, cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> Load:
    """Two, of hidden states in so many bytes each, over tensor-parallel ranks."""
    seconds, sent = communicate(kind, 2.0 * width * tokens * model.hidden, 2, cut.tensor, 1, cut.places, c)
    return Load(tensor=c.contention * seconds if cut.async_tensor_parallel else seconds, sent=sent)


def _shares(cut: Cut, model: ModelShape) -> tuple[int, int, int, int]:
    """The width of hidden states, and a GPU's share of that of the feed-forward network, of queries, and of keys."""
    keys = model.kv_heads * model.head_dim
    return model.hidden, model.ffn_hidden // cut.tensor, model.hidden // cut.tensor, keys // cut.tensor


def _traffic(moved: float, compiled: bool, c: Coefficients) -> Load:
    """Kernels that move so many bytes and hardly compute."""
    return Load(elementwise=moved / (c.memory_bytes_per_s if compiled else c.eager_bytes_per_s), moved=moved)


def _speed(cut: Cut, c: Coefficients, fp8: bool = True) -> float:
    """Of matrix products, in that of bf16; attention and the head are not computed in fp8."""
    if cut.precision == "fp32":
        return c.fp32_speed
    return c.fp8_speed if cut.precision == "fp8" and fp8 else 1.0
