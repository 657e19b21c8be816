"""What one GPU does for a microbatch in each part of the model, in seconds, FLOPs and bytes; see docs/cost.md.

Each operator of which a part consists takes the seconds that it was measured to take, or else those of the roofline
(Williams et al. 2009); collectives those of `search_spaces.network`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from operator import mul
from typing import NamedTuple

from search_spaces.attention import MERGED, PARTED
from search_spaces.blocks import Cut, Places, Used, last_product, parts_of, selected_of
from search_spaces.coefficients import Coefficients
from search_spaces.models import ModelShape
from search_spaces.network import Collective, Group, Network, group_of, sent_bytes
from search_spaces.operators import Kind, Operator

COMPILED_LOSS_TRAFFIC = 10
"""Bytes a logit with one kernel each way."""

HEAD_WIDTHS = (32, 64, 96, 128, 192, 256)
"""Of heads that attention has kernels for; others than multiples of 8 are padded to the next of them (Dao 2023)."""

MERGING, PARTING = 38, 46
"""Bytes that kernels move to merge a value of what comes of another rank's keys with what there is, and to add up its
gradients and those of its key and value (`_SDPAMerger` and `_templated_ring_attention_backward` of
`torch.distributed.tensor.experimental._attention`, PyTorch 2.6)."""

FUSED_MERGING, FUSED_PARTING = 10, 30
"""The same where one compiled kernel does it: a value in bf16 is read, one in fp32 read and written, and likewise of
three gradients."""

ROUTED = 8
"""Values that kernels around filled experts read and write for one of the hidden states, once for each expert that its
token has: a copy with a row for what is empty, one from it, the product with the gate, in fp32, and the sum
(`_sparse_encode` and `_sparse_decode` of `deepspeed/moe/sharded_moe.py`, release 0.19.8). Four more are of what each
expert has room for."""

COUNTED_S = 0.21e-6
"""Seconds in which a GPU finds a token's place among those of one of its experts, where these are filled: sums along
the tokens, one after the other (`torch.cumsum` in `deepspeed/moe/sharded_moe.py`). On H100 and H200 alike, of 4,096 to
32,768 tokens."""

ADDED_S = 8e-12
"""Seconds in which a GPU adds up a value of the gradients of what was copied to filled experts and back, one at a time
(`index_put_` of autograd), beyond what it moves. On H100 and H200 alike, of 4,096 to 65,536 tokens."""

APART_S = 60e-6
"""Seconds that each filled expert takes a GPU backward beyond what is counted, as one comes after the other. On H100
and H200 alike, of 4,096 to 65,536 tokens."""

PRODUCT_S = 4e-6
"""Seconds of a product beyond its roofline, in which its first and last tiles leave most of a GPU idle. Fitted to what
products took alone on H100 and H200, which is 2.6% off by that forward and was 4.3%."""

AUTOCAST_NORMS = 25
"""Values that autocast's kernels read and write for one of the hidden states of a block: norms, which are in fp32, and
copies in bf16 for each product."""

EXCHANGE_COPIES = 2
"""Copies of what context-parallel ranks exchange for heads, one each to order it by rank before and by token after
(`single_all_to_all` of `deepspeed/sequence/layer.py`); of a single sequence one of the two leaves all where it is."""

INDEXED = 2.4
"""How many times as long as other eager kernels those of torch take that find each value by its index: that reorder
what they copy, or add a bias to each row. The median of 39 layouts on two to four H200 that exchange heads, eager and
compiled, with and without recomputation."""


class Load(NamedTuple):
    """Work of one GPU: seconds at the full clock by kind, FLOPs as bf16 would have them for the same time, and bytes
    that it moves in its memory and sends to others. `still`: of `elementwise`, the seconds in which a few threads work
    for milliseconds."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    flops: float = 0.0
    moved: float = 0.0
    sent: float = 0.0
    still: float = 0.0

    @property
    def seconds(self) -> float:
        return self.matmul + self.attention + self.elementwise + self.tensor + self.context + self.experts

    def plus(self, other: Load, times: float = 1.0) -> Load:
        return Load._make([mine + times * theirs for mine, theirs in zip(self, other, strict=True)])

    def times(self, factor: float) -> Load:
        return Load._make([factor * mine for mine in self])

    def lasting(self, seconds: float) -> Load:
        """The same work in so many seconds."""
        slower = seconds / self.seconds
        return self._replace(
            matmul=slower * self.matmul,
            attention=slower * self.attention,
            elementwise=slower * self.elementwise,
            still=slower * self.still,
        )


class Passes(NamedTuple):
    """A microbatch forward and backward, with what is computed again, through one part of the model each."""

    block: Load
    embedding: Load
    head: Load


@lru_cache(maxsize=4096)  # a fit of the coefficients goes through many
def passes(cut: Cut, model: ModelShape, sequence_length: int, c: Coefficients) -> Passes:
    """For a microbatch of sequences of `sequence_length` tokens."""
    parts, tokens = parts_of(cut, model, sequence_length), cut.tokens(sequence_length)
    there, back = _tensor_sums(cut, model, tokens, c)
    spread, copied = _spread(cut, model, tokens, c), _exchange_copies(cut, model, tokens, c)
    dispatched, regrouped = _dispatched(cut, model, tokens, c), _regrouped(cut, model, tokens, c)
    ways = [(priced(operator, cut, c), count) for operator, count in parts.block]
    spared, spared_back = _spared_casts(cut, model, tokens, c)
    merging, parting = _merged(cut, model, tokens, c)
    biases = _biases(cut, parts.block, c)
    either = [(spread, 1), (copied, 1), (dispatched, 1)]
    beside = [*either, (there, 1), (regrouped, 1), (biases, 1), (merging, 1), (spared, -1)]
    beside_back = [*either, (back, 1), (regrouped, 2), (parting, 1), (spared_back, -1)]
    forward = _total([*beside, *((load, count) for (load, _), count in ways)])
    backward = _total([*beside_back, *((load, count) for (_, load), count in ways)])
    block = forward.plus(backward)
    if cut.recompute == "full":
        block = block.plus(forward).plus(_left_out(cut, model, sequence_length, c), -1)
    elif cut.recompute == "selective":
        block = block.plus(Load(elementwise=forward.elementwise, moved=forward.moved, still=forward.still))
        if cut.engine.selects_products:
            block = block.plus(_total((priced(one, cut, c)[0], 1) for one in selected_of(cut, model, sequence_length)))
        if cut.sequence_parallel and not cut.engine.gathers_again:
            block = block.plus(_gathers(cut, model, tokens, c))
        if not cut.engine.rings_keys:  # nothing keeps what was exchanged
            block = block.plus(spread)
    embedding, head = (
        _total((load, count) for operator, count in part for load in priced(operator, cut, c)) for part in parts[1:]
    )
    if cut.tables > 1:
        state = cut.width * tokens * model.hidden
        seconds, sent = communicate(Collective.ALL_REDUCE, state, 1, cut.tensor, 1, cut.places, c)
        embedding, head = (part.plus(Load(tensor=seconds, sent=sent)) for part in (embedding, head))
    return Passes(block, embedding, head)


def _left_out(cut: Cut, model: ModelShape, sequence_length: int, c: Coefficients) -> Load:
    """What full recomputation of a block does not do of a forward pass: its last product, and the sum of that."""
    if model.num_experts or not cut.leaves_out_last:
        return Load()
    last, _ = priced(last_product(cut, model, sequence_length), cut, c)
    return last.plus(_sums(cut, model, cut.tokens(sequence_length), c), 0.5)


def priced(operator: Operator, cut: Cut, c: Coefficients) -> tuple[Load, Load]:
    """An operator forward and backward: by what it was measured to take, or else by the formula of its kind."""
    forward, backward = _FORMULAS[operator.kind](operator, cut, c)
    if not c.operators.rows or (timing := c.operators.of(operator)) is None:
        return forward, backward
    there, back = c.operators_in_step * timing.forward_s, c.operators_in_step * (timing.backward_s or 0.0)
    if operator.kind != Kind.EXPERTS:
        return forward.lasting(there), backward.lasting(back)
    fullest = _fullest(cut, c)
    return forward.lasting(fullest * there), backward.lasting(fullest * back)


def _total(loads: Iterable[tuple[Load, int]]) -> Load:
    """So many of each."""
    each, counts = zip(*loads, strict=True)
    return Load._make([sum(map(mul, column, counts)) for column in zip(*each, strict=True)])


def communicate(
    kind: Collective, size: float, count: int, ranks: int, stride: int, places: Places, c: Coefficients
) -> tuple[float, float]:
    """Seconds, and bytes that a GPU sends, of `count` collectives of `size` bytes together, of ranks `stride` apart."""
    if ranks == 1:
        return 0.0, 0.0
    seconds = count * network(places, c).takes(kind, size / count, spread(ranks, stride, places))
    return seconds, sent_bytes(kind, size, ranks)


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


def _product(operator: Operator, cut: Cut, c: Coefficients) -> tuple[Load, Load]:
    """A backward pass takes twice the products, and sums up the gradients of a bias."""
    rows, inside, outside = operator.dims
    forward = _products(rows, [(inside, outside, 1)], operator, cut, c)
    backward = forward.times(2)
    if "bias" in operator.form:
        backward = backward.plus(_traffic(1.0 * operator.width * rows * outside, operator.compiled, c))
    return _with_casts(forward, backward, rows, [(inside, outside, 1)], operator, cut, c)


def _products(rows: float, shapes: list[tuple[int, int, int]], of: Operator, cut: Cut, c: Coefficients) -> Load:
    """Products of `rows` rows with matrices (width in, width out, how many)."""
    seconds = flops = 0.0
    besides = 0.0 if "grouped" in of.form else PRODUCT_S
    speed = {"fp32": c.fp32_speed, "fp8": cut.engine.fp8_gain * c.fp8_speed}.get(of.precision, 1.0)
    for inside, outside, count in shapes:
        work = 2.0 * rows * inside * outside / speed
        traffic = of.width * (rows * inside + inside * outside + rows * outside)
        computed = work / c.matmul_flops * (1 + c.matmul_half / min(rows, inside, outside))
        seconds += count * (max(computed, traffic / c.memory_bytes_per_s) + besides)
        flops += count * work
    return Load(matmul=seconds, flops=flops)


def _with_casts(
    forward: Load,
    backward: Load,
    rows: int,
    shapes: list[tuple[int, int, int]],
    of: Operator,
    cut: Cut,
    c: Coefficients,
) -> tuple[Load, Load]:
    """Products with their casts to fp8, in a block that is not compiled: each casts what it is given for itself.

    Two bytes a value are read twice, for the scale and for the cast, and one is written. Backward that is done to
    gradients, and gradients, inputs and weights are laid out anew, a byte read and a byte written. Fused casts read
    inputs and gradients once and write them twice, and weights are cast but once a step.
    """
    if of.precision != "fp8" or of.compiled:
        return forward, backward
    if cut.engine.fuses_casts:
        inputs, outputs = (1.0 * rows * sum(count * shape[side] for *shape, count in shapes) for side in (0, 1))
        return forward.plus(_traffic(4.0 * inputs, True, c)), backward.plus(_traffic(4.0 * outputs, True, c))
    given = sum(count * (rows * inside + inside * outside) for inside, outside, count in shapes)
    gradients = sum(count * rows * outside for _, outside, count in shapes)
    casts, gradient_casts = 5.0 * given, 5.0 * gradients + 2.0 * (gradients + given)
    return forward.plus(_traffic(casts, True, c)), backward.plus(_traffic(gradient_casts, True, c))


def _spared_casts(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> tuple[Load, Load]:
    """Casts of eager products, forward and backward, that tensor-parallel ranks need not do: what several products are
    given is cast once, and where tokens are split, a rank's own of them alone, as are gradients of what is summed."""
    if cut.precision != "fp8" or cut.compile or cut.tensor == 1:
        return Load(), Load()
    own = tokens / cut.tensor if cut.sequence_parallel else tokens
    # Of q, k and v, and of what goes up in a feed-forward network, unless that is of experts.
    several, inputs = (3, 1) if model.num_experts else (5 if model.family == "llama" else 4, 2)
    forward, backward = several * tokens - inputs * own, inputs * (tokens - own)
    return _traffic(5.0 * model.hidden * forward, True, c), _traffic(5.0 * model.hidden * backward, True, c)


def _attention(operator: Operator, cut: Cut, c: Coefficients) -> tuple[Load, Load]:
    """Causal attention: half of all pairs of tokens, of which context-parallel ranks have equal shares. A backward pass
    takes two and a half times as long (Dao 2023, section 3)."""
    sequences, queries, heads, keys, width, times = operator.dims
    engine, tokens, compiled = cut.engine, sequences * queries, operator.compiled
    speed = c.fp32_speed if operator.precision == "fp32" else 1.0
    work = 2.0 * tokens * queries * times * heads / speed
    gathers = times > 1 and not engine.rings_keys
    in_parts = gathers and cut.attention.in_parts
    # Rotary positions, and the output in the order of tokens; keys and values together, or in order and once a head.
    rotary = engine.compiled_rotary_values if compiled else engine.rotary_values
    values = (rotary * (heads + keys) if "rotary" in operator.form else 0) + 2 * heads
    values += 4 * keys if in_parts else 2 * times * (keys + 2 * heads) if gathers else 0
    values += 2 * heads if operator.precision == "fp8" else 0
    copies = _traffic(1.0 * operator.width * tokens * values, compiled, c)
    merging = parting = Load()
    if in_parts:  # into a square's results those for all queries, and of more than two ranks others for half of them
        merged = _traffic((1.0 if times == 2 else 1.5) * MERGED * tokens * heads, True, c)
        each = _traffic(2.0 * PARTED * tokens * keys, False, c)  # of several others, joined before
        merging, parting = merged.plus(each, times - 2), merged.plus(each, 2 * times - 2)
    if engine.scores_traffic:  # of all pairs
        moved = 1.0 * engine.scores_traffic * tokens * queries * times * heads / width
        ahead = back = Load(attention=2 * work / c.matmul_flops, flops=2 * work).plus(_traffic(moved, True, c))
    else:
        alone = _padded(width) / width * work / c.attention_flops
        times_of_both, cost = cut.attention.times(queries * times, width), cut.attention.joules * work
        ahead, back = (Load(attention=time * alone, flops=cost) for time in times_of_both)
    return ahead.plus(copies).plus(merging), back.times(2.5).plus(copies, 2).plus(parting)


def _padded(width: int) -> int:
    """The width of a head that kernels really have."""
    return width if width % 8 == 0 else next((wide for wide in HEAD_WIDTHS if wide >= width), width)


def _norm(operator: Operator, cut: Cut, c: Coefficients) -> tuple[Load, Load]:
    """A norm and the sum with what came in, fused into one and a half passes or not."""
    rows, width = operator.dims
    values = 4.5 if operator.compiled else cut.engine.norm_values
    if "autocast" in operator.form and not operator.compiled:
        values += AUTOCAST_NORMS / 2
    if operator.precision == "fp8":
        values += 2.0
    return _moving(operator, values * rows * width, c)


def _activation(operator: Operator, cut: Cut, c: Coefficients) -> tuple[Load, Load]:
    rows, width = operator.dims
    return _moving(operator, rows * width * _activated(operator), c)


def _activated(operator: Operator) -> float:
    """Values that the activation function, with its gate, reads and writes for one of its own."""
    values = 2.0 if "gpt" in operator.form else 3.0 if operator.compiled else 5.0
    return values + (2.0 if operator.precision == "fp8" and operator.compiled else 0.0)


def _fullest(cut: Cut, c: Coefficients) -> float:
    """For how many tokens the experts of the busiest rank compute, in those of an even share."""
    return c.expert_imbalance if cut.is_uneven else 1.0


def _experts(operator: Operator, cut: Cut, c: Coefficients) -> tuple[Load, Load]:
    """Tokens are copied to their experts and back, by more kernels where experts are `filled`, which add up in fp32."""
    tokens, hidden, inner, here, chosen = operator.dims
    rows = tokens * chosen * _fullest(cut, c)
    network = [(hidden, inner, 2), (inner, hidden, 1)]
    products = _products(max(1.0, rows / here), network, operator, cut, c).times(here)
    filled = "filled" in operator.form
    there, back = _around_filled(operator, rows, c) if filled else _around_grouped(operator, rows, cut, c)
    return _with_casts(products.plus(there), products.times(2).plus(back), tokens, network, operator, cut, c)


def _around_filled(operator: Operator, rows: float, c: Coefficients) -> tuple[Load, Load]:
    tokens, hidden, inner, here, chosen = operator.dims
    outside = (ROUTED * tokens * chosen + 4.0 * rows) * hidden
    there, back = _moving(operator, inner * _activated(operator) * rows + outside, c)
    counted_s = COUNTED_S * tokens * chosen
    there = there.plus(Load(elementwise=counted_s, still=counted_s))
    return there, back.plus(Load(elementwise=ADDED_S * hidden * (tokens * chosen + rows) + APART_S * here))


def _around_grouped(operator: Operator, rows: float, cut: Cut, c: Coefficients) -> tuple[Load, Load]:
    tokens, hidden, inner, here, chosen = operator.dims
    around = cut.engine.around_experts(operator.compiled)
    outside, between = 1.0 * operator.width * tokens * chosen * hidden, operator.width * rows * inner
    there = _traffic(around.hidden * outside + around.between * between, False, c)
    back = _traffic(around.hidden_back * outside + around.between_back * between, False, c)
    each_s, choosing_s = around.each_s * here, around.fixed_s + around.token_s * tokens
    there = there.plus(Load(matmul=3 * each_s, elementwise=choosing_s))
    return there, back.plus(Load(matmul=6 * each_s, elementwise=around.fixed_back_s))


def _copies(operator: Operator, cut: Cut, c: Coefficients) -> tuple[Load, Load]:
    """torch gathers and scatters along the first dimension, and copies from and to the second, four times. Asynchronous
    ranks do without of one sequence, but copy their own tokens to where others read them, and add up what products
    give piece by piece (`torch/distributed/_symmetric_memory`)."""
    rows, width = operator.dims
    values = 8.0 if operator.compiled else cut.engine.eager_copies
    if cut.async_tensor_parallel and cut.micro_batch_size == 1 and not cut.engine.copies_one_sequence:
        values = 2 + 6 / cut.tensor
    return _moving(operator, values * rows * width, c)


def _embedding(operator: Operator, cut: Cut, c: Coefficients) -> tuple[Load, Load]:
    tokens, width, _ = operator.dims
    return _moving(operator, 1.0 * tokens * width, c)


def _loss(operator: Operator, cut: Cut, c: Coefficients) -> tuple[Load, Load]:
    """A third of its traffic is forward, as that of all else."""
    tokens, entries = operator.dims
    shared = "shared" in operator.form
    alone = COMPILED_LOSS_TRAFFIC if operator.compiled else cut.engine.loss_traffic
    moved = cut.engine.shared_loss_traffic if shared else alone
    forward = _traffic(tokens * entries * moved / 3, operator.compiled, c)
    return forward, forward.times(2)


_FORMULAS: dict[Kind, Callable[[Operator, Cut, Coefficients], tuple[Load, Load]]] = {
    Kind.PRODUCT: _product,
    Kind.ATTENTION: _attention,
    Kind.NORM: _norm,
    Kind.ACTIVATION: _activation,
    Kind.EXPERTS: _experts,
    Kind.COPIES: _copies,
    Kind.EMBEDDING: _embedding,
    Kind.LOSS: _loss,
}
"""Of the kinds of which passes consist."""


def _moving(operator: Operator, values: float, c: Coefficients) -> tuple[Load, Load]:
    """Kernels that read and write so many values forward, and twice as many backward."""
    forward = _traffic(operator.width * values, operator.compiled, c)
    return forward, forward.times(2)


def _traffic(moved: float, compiled: bool, c: Coefficients) -> Load:
    """Kernels that move so many bytes and hardly compute."""
    return Load(elementwise=moved / (c.memory_bytes_per_s if compiled else c.eager_bytes_per_s), moved=moved)


def _indexed(moved: float, c: Coefficients) -> Load:
    """Eager kernels that move so many bytes and find each value by its index."""
    load = _traffic(moved, False, c)
    return load._replace(elementwise=INDEXED * load.elementwise)


def _spread(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> Load:
    """The exchanges of keys and values of a block among the ranks of a sequence, one way."""
    if cut.context == 1:
        return Load()
    # Ulysses's four exchanges, or keys and values of the whole sequence.
    _, _, heads, keys = cut.shares(model)
    keys = heads if cut.engine.rings_heads else keys
    shape = 2.0 * (heads + keys) if cut.engine.exchanges_heads else 2.0 * keys * cut.context
    kind, count = (Collective.ALL_TO_ALL, 4) if cut.engine.exchanges_heads else (Collective.ALL_GATHER, 1)
    size = cut.width * tokens * shape
    seconds, sent = communicate(kind, size, count, cut.context, cut.tensor, cut.places, c)
    hidden = 0.0
    if cut.engine.rings_keys:
        hidden = 0.0 if cut.waits_at_once else seconds
    elif cut.engine.gathers_beside and cut.compile:
        hidden = min(seconds, 2.0 * tokens * model.hidden * heads / c.matmul_flops)
    return Load(context=seconds - (1 - c.contention) * hidden, sent=sent)


def _exchange_copies(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> Load:
    """The copies before and after the exchanges of heads for tokens, one way."""
    if cut.context == 1 or not cut.engine.exchanges_heads:
        return Load()
    _, _, heads, keys = cut.shares(model)
    copies = EXCHANGE_COPIES if cut.micro_batch_size > 1 else 1
    return _indexed(2.0 * cut.width * tokens * copies * 2 * (heads + keys), c)


def _biases(cut: Cut, block: Iterable[Used], c: Coefficients) -> Load:
    """Biases that a block's products do not add themselves, forward: outputs are read and written once more."""
    if not cut.adds_biases:
        return Load()
    biased = ((one.dims, count) for one, count in block if one.kind == Kind.PRODUCT and "bias" in one.form)
    return _indexed(2.0 * cut.width * sum(count * rows * wide for (rows, _, wide), count in biased), c)


def _dispatched(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> Load:
    """The exchanges of tokens of a block among the GPUs of its experts, one way."""
    if not model.num_experts:
        return Load()
    rows = tokens * model.experts_per_token * _fullest(cut, c)
    size = 2 * cut.width * rows * model.hidden
    seconds, sent = communicate(Collective.ALL_TO_ALL, size, 2, cut.experts, cut.tensor, cut.places, c)
    return Load(experts=seconds, sent=sent)


def _regrouped(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> Load:
    """The copies of exchanged tokens from the order of their senders to that of grouped experts, and back, forward:
    each value is read and written twice (`MoE._exchanged` of `trainables/moe.py`; `sort_chunks_by_idxs` of
    Megatron-LM's `MoEAlltoAllTokenDispatcher`). Backward `megatron` makes twice as many."""
    if cut.experts == 1 or cut.engine.fills_experts:
        return Load()
    return _traffic(4.0 * cut.width * tokens * model.experts_per_token * _fullest(cut, c) * model.hidden, False, c)


def _merged(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> tuple[Load, Load]:
    """What a ring of context-parallel ranks that has keys once a head of queries does beside attention: kernels merge
    what comes of each part, and gradients of it, in fp32, in which those of keys and values go all the way around."""
    if cut.context == 1 or not cut.engine.rings_heads:
        return Load(), Load()
    own, steps = 1.0 * tokens * cut.shares(model)[2], cut.context - 1
    size = 2 * 4 * own * cut.context**2 / steps  # of a gather in which each sends as much
    seconds, sent = communicate(Collective.ALL_GATHER, size, cut.context, cut.context, cut.tensor, cut.places, c)
    back = Load(context=seconds if cut.waits_at_once else c.contention * seconds, sent=sent)
    merging, parting = (FUSED_MERGING, FUSED_PARTING) if cut.compile else (MERGING, PARTING)
    merged = _traffic(merging * own * steps, cut.compile, c)
    return merged, back.plus(_traffic(parting * own * steps, cut.compile, c))


def _tensor_sums(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> tuple[Load, Load]:
    """Two sums over tensor-parallel ranks forward, and backward (Shoeybi et al. 2019), each a scatter and a gather
    (Korthikanti et al. 2022), or backward one of the gradients of what goes into each product apart."""
    if cut.tensor == 1:
        return Load(), Load()
    sums = _sums(cut, model, tokens, c)
    if cut.sequence_parallel:
        sums = sums.plus(_gathers(cut, model, tokens, c))
    inputs = 4 if model.family == "gpt" else 5
    return sums, sums.times(inputs / 2 if cut.engine.sums_inputs_apart else 1.0)


def _sums(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> Load:
    """Of what attention and the feed-forward network give, scattered where sequence parallelism splits it."""
    kind = Collective.REDUCE_SCATTER if cut.sequence_parallel else Collective.ALL_REDUCE
    return _messages(kind, cut.width, cut, model, tokens, c)


def _gathers(cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> Load:
    """Of hidden states that sequence parallelism splits, before attention and before the feed-forward network: for
    products in fp8 in 8 bits, once their largest magnitude is agreed on."""
    if cut.precision != "fp8":
        return _messages(Collective.ALL_GATHER, cut.width, cut, model, tokens, c)
    agreeing, _ = communicate(Collective.ALL_REDUCE, 2 * 4, 2, cut.tensor, 1, cut.places, c)
    return _messages(Collective.ALL_GATHER, 1, cut, model, tokens, c).plus(Load(tensor=agreeing))


def _messages(kind: Collective, width: int, cut: Cut, model: ModelShape, tokens: int, c: Coefficients) -> Load:
    """Two, of hidden states in so many bytes each, over tensor-parallel ranks."""
    seconds, sent = communicate(kind, 2.0 * width * tokens * model.hidden, 2, cut.tensor, 1, cut.places, c)
    return Load(tensor=c.contention * seconds if cut.async_tensor_parallel else seconds, sent=sent)
