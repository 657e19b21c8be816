"""Predicted peak memory of a layout on the GPUs of each pipeline rank, part by part; see docs/memory.md.

The peak is at the start of a step's last backward pass: what ZeRO (Rajbhandari et al. 2020, section 3) and Korthikanti
et al. 2022 (section 4) count is all there then. What torch's allocator reserves is more, as some of what this pass
makes does not fit the pieces of what it gives free.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.workload import Workload

Band = Literal["fits", "borderline", "too big"]

SAFE_SHARE = 0.8
"""Share of what torch can reserve from which on a layout may run out after all."""

MEASURED_SHARE = 1.03
"""Share above which a layout is taken not to fit: one, and the mean error of the formula."""

UNMEASURED_SHARE = 1.15
"""The same of kinds of layouts by which no part of the formula was set."""

PRIOR_TRIALS = 3
"""Trials for which the formula counts beside those of a search."""

CONSTANT_BYTES = 2**28
"""Reserved whatever the layout: workspaces of cuBLAS, rotary tables, pools of small tensors."""

OUTSIDE_BYTES = 1.8 * 2**30
"""Of the memory in `ACCELERATORS`, what torch cannot reserve: the driver's, CUDA's context and modules, NCCL's.

On H200 torch finds 0.6 GiB less than NVML, and out-of-memory errors name 1.2 GiB that are not torch's.
"""

EAGER_LOSS_BYTES = {"megatron": 20, "deepspeed": 19}
"""A logit, where the loss is not compiled, which has log-probabilities and two gradients in fp32 besides, and what the
allocator loses to tensors of such a size. Fitted."""

SHARED_LOSS_BYTES = 24
"""A logit, where tensor-parallel ranks share the loss, which has exponentials besides. Fitted."""

DEEPSPEED_PIPELINE_LOSS_BYTES = 4
"""A logit, where the loss is not compiled: what DeepSpeed's pipeline has left of the microbatch before. Fitted."""

DEEPSPEED_ZERO3_BYTES = 18
"""A parameter of the largest part, which DeepSpeed's ZeRO-3 holds besides what it gathers. Fitted."""

SPARE_LOSS_BYTES = 10
"""A logit, of a loss that is not compiled, that the backward passes of the blocks use again. Fitted."""

IMBALANCE = 2.8
"""Tokens that come to the experts of the fullest rank, in those of an even share, while routers are young. Fitted."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each GPU of one pipeline rank.

    `parameters` are master copies and what is gathered of them. `logits` is with the loss and gradients of both.
    `slack` is reserved and not used, and given back where memory is short.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    communication: float
    constant: float
    slack: float

    @property
    def needed(self) -> float:
        """Without `slack`."""
        held = self.parameters + self.gradients + self.optimizer + self.activations + self.logits
        return held + self.communication + self.constant


@dataclass(frozen=True)
class MemoryEstimate:
    """`ranks`: of pipeline ranks, the fullest among them. `usable_bytes`: what torch can reserve on a GPU, None where
    that is not known."""

    ranks: Mapping[int, RankMemory]
    usable_bytes: float | None

    @property
    def peak_bytes(self) -> float:
        """What torch will have reserved on the fullest GPU: `torch.cuda.max_memory_reserved`."""
        return max(map(self.reserved, self.ranks))

    @property
    def share(self) -> float | None:
        """What the fullest GPU needs, of what torch can reserve there. Above one the layout does not fit."""
        return None if self.usable_bytes is None else self._neediest.needed / self.usable_bytes

    @property
    def needs(self) -> str:
        """What the fullest GPU needs, and of what: ``needs 151 GiB of 139 GiB: 62 activations, 41 optimizer, ...``."""
        rank = self._neediest
        parts = {field.name: getattr(rank, field.name) / 2**30 for field in fields(rank) if field.name != "slack"}
        largest = sorted(parts.items(), key=lambda part: -part[1])
        of = "" if self.usable_bytes is None else f" of {self.usable_bytes / 2**30:.0f} GiB"
        named = ", ".join(f"{gib:.0f} {name}" for name, gib in largest if gib >= 0.5)
        return f"needs {rank.needed / 2**30:.0f} GiB{of}: {named}"

    @property
    def _neediest(self) -> RankMemory:
        return max(self.ranks.values(), key=lambda rank: rank.needed)

    def reserved(self, rank: int) -> float:
        """Bytes that torch will have reserved on the GPUs of a pipeline rank."""
        memory = self.ranks[rank]
        limit = float("inf") if self.usable_bytes is None else self.usable_bytes
        return max(memory.needed, min(memory.needed + memory.slack, limit))


@dataclass(frozen=True)
class _Held:
    """Parameters of the parts that a GPU holds, before ZeRO shards them; `largest` and `block` are of one such part."""

    dense: float
    experts: float
    largest: float
    block: float

    @property
    def whole(self) -> float:
        return self.dense + self.experts


@dataclass(frozen=True)
class _States:
    """Bytes. `late`: gradients that the last backward pass makes, one part after the other."""

    parameters: float
    gradients: float
    optimizer: float
    late: float


def estimate(layout: Layout, work: Workload, ranks: Iterable[int] | None = None) -> MemoryEstimate:
    """For a legal layout of the whole model of `work`.

    `ranks`: pipeline ranks to look at, if not just those of which one is the fullest.
    """
    memory = work.accelerator.memory_gib
    usable = None if memory is None else memory * 2**30 - OUTSIDE_BYTES
    asked = _fullest(layout) if ranks is None else ranks
    tokens = layout.micro_batch_size * work.sequence_length // layout.context_parallel_size
    block = _block_activations(layout, work.model, tokens)
    return MemoryEstimate({rank: _rank(layout, work.model, tokens, block, rank) for rank in asked}, usable)


def band(layout: Layout, work: Workload) -> Band | None:
    """Whether a legal layout fits, as it is really run: of proxies the deeper. None where memory is not known."""
    return judge(layout, work.model, estimate(layout, work.run).share)


def judge(layout: Layout, model: ModelShape, share: float | None) -> Band | None:
    """What it means that a layout needs `share` of what torch can reserve."""
    if share is None:
        return None
    if share > (MEASURED_SHARE if _is_measured(layout, model) else UNMEASURED_SHARE):
        return "too big"
    # What spread experts take follows their router.
    return "borderline" if share >= SAFE_SHARE or layout.expert_parallel_size > 1 else "fits"


class MemoryModel:
    """The estimates of one search, corrected by what its trials took.

    Layouts of an engine are scaled by the median of measured over predicted memory, drawn towards one as long as there
    are few of them.
    """

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.needed: dict[Layout, tuple[float, float]] = {}
        """Of the trials seen, the share that they were estimated to need, and what it was then; of those that ran out
        although they should have fitted, one."""
        self._shares: dict[Layout, float | None] = {}
        self._ratios: dict[str, list[float]] = {}
        self._factors: dict[str, float] = {}

    def observe(self, layout: Layout, measured_gib: float | None) -> None:
        """What a trial reserved on its fullest GPU (`peak_memory_gib`); None if it ran out of memory."""
        share = self.estimated(layout)
        if measured_gib is not None:
            ratio = measured_gib * 2**30 / estimate(layout, self.work).peak_bytes
        elif share is not None and share < 1:
            ratio = 1 / share  # at least
        else:
            return
        if share is not None:
            self.needed[layout] = share, share * ratio
        ratios = self._ratios.setdefault(layout.engine, [])
        ratios.append(ratio)
        weight = len(ratios) / (len(ratios) + PRIOR_TRIALS)
        self._factors[layout.engine] = statistics.median(ratios) ** weight

    def share(self, layout: Layout) -> float | None:
        """`MemoryEstimate.share` of what is really run, corrected. Above one it does not fit; None where that is not
        known."""
        share = self.estimated(layout)
        return None if share is None else share * self._factors.get(layout.engine, 1.0)

    def band(self, layout: Layout) -> Band | None:
        """`band` of the corrected share."""
        return judge(layout, self.work.model, self.share(layout))

    def estimated(self, layout: Layout) -> float | None:
        """`share` before any correction."""
        if layout not in self._shares:
            self._shares[layout] = estimate(layout, self.work.run).share
        return self._shares[layout]


def _is_measured(layout: Layout, model: ModelShape) -> bool:
    """Whether the formula was set by layouts of this kind; see docs/memory.md."""
    plain = (layout.precision, layout.pipeline_schedule, layout.offload_optimizer) == ("bf16", "1f1b", False)
    sharded_experts = model.num_experts > 0 and (layout.engine == "deepspeed" or layout.expert_parallel_size > 1)
    return (
        plain
        and layout.recompute != "selective"
        and layout.context_parallel_size == layout.data_parallel_replicate_size == 1
        and model.family == "llama"
        and not sharded_experts
    )


def _fullest(layout: Layout) -> Iterable[int]:
    """Pipeline ranks of which one is the fullest.

    Those between the ends differ only in the passes that they keep, no more the later they come.
    """
    ranks = range(layout.pipeline_parallel_size)
    return ranks if layout.stage_layers or len(ranks) < 3 else (ranks[0], ranks[1], ranks[-1])


def _rank(layout: Layout, model: ModelShape, tokens: int, block: tuple[float, float], rank: int) -> RankMemory:
    mine = layout.stages_of(rank)
    first, last = mine[0] == 0, mine[-1] == layout.pipeline_stages - 1
    if layout.stage_layers is None:
        layers = model.layers // layout.pipeline_parallel_size
    else:
        layers = sum(layout.stage_layers[stage] for stage in mine)
    held = _held(layout, model, layers, first, last)
    states = _deepspeed_states(layout, held) if layout.engine == "deepspeed" else _megatron_states(layout, held)
    in_flight = passes_in_flight(layout, rank)
    kept, whole = block
    logits, waiting, spare = _logits(layout, model, tokens) if last else (0.0, 0.0, 0.0)
    communication = _communication(layout, model, held, tokens, first, last, in_flight)
    again = (whole - kept) * _computed_again(layout, rank, layers // len(mine))
    # What blocks send and compute again comes after the loss, in what that has given back.
    spare, communication = max(0.0, spare - communication), max(0.0, communication - spare)
    spare, again = max(0.0, spare - again), max(0.0, again - spare)
    room = 0.0
    if (
        tokens * model.ffn_hidden * _width(layout) / layout.tensor_parallel_size
        >= states.late * held.block / held.whole
    ):
        # Gradients of a block fit where other microbatches kept the widest of their tensors.
        room = kept * layers * (in_flight / len(mine) - 1)
    alone = _copy_finds_no_room(layout)
    gradients = states.gradients
    if layout.engine == "megatron" and _forward_first(layout, in_flight):
        # The first backward pass finds no gradients of this step yet, the second one microbatch less.
        gradients -= min(gradients, kept * layers / len(mine) + waiting)
    return RankMemory(
        parameters=states.parameters,
        gradients=gradients,
        optimizer=states.optimizer,
        activations=kept * layers * in_flight / len(mine) + again,
        logits=logits,
        communication=communication,
        constant=CONSTANT_BYTES,
        slack=4 * _shards(layout, held) if alone else max(0.0, states.late - max(0.0, room) - spare),
    )


def _width(layout: Layout) -> int:
    """Bytes of what is computed with: weights and activations."""
    return 4 if layout.precision == "fp32" else 2


def _reduced_width(layout: Layout) -> int:
    """Bytes of gradients on their way between ranks."""
    return 4 if "fp32" in (layout.precision, layout.reduce_precision) else 2


def _held(layout: Layout, model: ModelShape, layers: int, first: bool, last: bool) -> _Held:
    tensor = layout.tensor_parallel_size
    cut = 1 if layout.engine == "deepspeed" else tensor  # DeepSpeed's tensor parallelism leaves tables whole
    gpt = model.family == "gpt"
    norm = model.hidden * (2 if gpt else 1)
    table = model.vocab * model.hidden / cut
    embedding = table + (model.max_sequence_length * model.hidden / cut if gpt else 0) if first else 0.0
    head = norm + (0.0 if model.tie_embeddings and first else table) if last else 0.0
    experts = model.num_experts * model.expert_parameters
    # Norms, routers, and the biases that follow sums over ranks are not split.
    unsplit = 2 * norm + model.num_experts * model.hidden + (2 * model.hidden if gpt and not experts else 0)
    dense = (model.block_parameters - experts - unsplit) / tensor + unsplit
    experts_here = experts / tensor / layout.expert_parallel_size
    return _Held(
        dense=layers * dense + embedding + head,
        experts=layers * experts_here,
        largest=max(dense, experts_here, embedding, head),
        block=dense + experts_here,
    )


def _shards(layout: Layout, held: _Held) -> float:
    """Parameters of which a GPU has the optimizer states (ZeRO, figure 1)."""
    if layout.zero_stage == 0:
        return held.whole
    ranks = layout.shard_ranks // layout.data_parallel_replicate_size
    return held.dense / ranks + held.experts / (ranks // layout.expert_parallel_size)


def _megatron_states(layout: Layout, held: _Held) -> _States:
    """FSDP2 has parameters and sharded gradients in fp32, gathers parameters in the width of matrix products, and sums
    whole gradients of microbatches in that in which they are reduced."""
    zero, shards = layout.zero_stage, _shards(layout, held)
    parameters = 4 * shards + _width(layout) * (min(held.whole, held.largest + held.block) if zero == 3 else held.whole)
    several = layout.gradient_accumulation_steps > 1
    if several and zero < 2:
        return _States(parameters, _reduced_width(layout) * held.whole, 8 * shards, 4 * shards)
    if several:
        return _States(parameters, 4 * shards, 8 * shards, 0.0)
    return _States(parameters, 0.0, 8 * shards, 4 * shards)


def _deepspeed_states(layout: Layout, held: _Held) -> _States:
    """DeepSpeed computes with weights of their own beside fp32 master copies; see
    `trainables.engines.deepspeed.configuration`."""
    zero, whole, shards = layout.zero_stage, held.whole, _shards(layout, held)
    width, summed = _width(layout), _reduced_width(layout)
    if zero == 0 and (layout.precision == "fp32" or layout.shard_ranks > 1):
        # No master copies; autocast keeps weights in bf16 for the backward pass.
        late = 0.0 if layout.gradient_accumulation_steps > 1 else 4 * whole
        return _States((4 if width == 4 else 6) * whole, 4 * whole - late, 8 * whole, late)
    weights = width * whole
    if zero == 3:
        weights = width * min(whole, shards + held.largest + held.block) + DEEPSPEED_ZERO3_BYTES * held.largest
    if layout.offload_optimizer:
        # ZeRO-1 keeps gradients whole until the update, the others hand them over as they come.
        return _States(weights, width * whole if zero == 1 else 0.0, 0.0, 0.0)
    if zero >= 2:
        return _States(weights + 4 * shards, summed * shards, 8 * shards, 4 * shards)
    # Gradients that are not summed apart from those of a microbatch are copied for the update.
    apart = summed > width or layout.pipeline_parallel_size > 1
    return _States(weights + 4 * shards, summed * whole, 8 * shards, 0.0 if apart else 4 * shards)


def passes_in_flight(layout: Layout, rank: int) -> int:
    """Passes through a stage that a rank keeps activations of at once (Narayanan et al. 2021, Qi et al. 2023)."""
    ranks, rounds, virtual = (
        layout.pipeline_parallel_size,
        layout.gradient_accumulation_steps,
        layout.virtual_pipeline_stages,
    )
    if ranks == 1:
        return 1
    if layout.pipeline_schedule == "gpipe":
        return rounds
    if layout.pipeline_schedule == "1f1b":
        return min(rounds, ranks - rank)
    if layout.pipeline_schedule == "zbv_zero_bubble":
        return min(rounds, 2 * ranks - 1 - rank) + min(rounds, rank + 1)  # down the V, and up
    # As torch's interleaved schedules count their warm-up. Zero bubble leaves the weight gradients of as many passes as
    # there are ranks before this one for later.
    together = rounds // max(1, rounds // ranks)
    ahead = 2 * (ranks - 1 - rank) if layout.pipeline_schedule == "interleaved_1f1b" else ranks - 1
    return min(rounds * virtual, (virtual - 1) * together + ahead + 1)


def _copy_finds_no_room(layout: Layout) -> bool:
    """Whether the flat copy of summed gradients that DeepSpeed's ZeRO-1 and 2 make for the update comes on top of all
    else: so it was with full recomputation in steps of several microbatches, and not otherwise."""
    several = layout.gradient_accumulation_steps > 1
    return layout.engine == "deepspeed" and layout.zero_stage in (1, 2) and layout.recompute == "full" and several


def _forward_first(layout: Layout, in_flight: int) -> bool:
    """Whether a rank has been through all microbatches of a step before its first backward pass."""
    if layout.pipeline_parallel_size == 1 or layout.splits_backward:  # then passes in flight may wait for their weights
        return False
    return in_flight == layout.gradient_accumulation_steps * layout.virtual_pipeline_stages


def _computed_again(layout: Layout, rank: int, layers: int) -> int:
    """Blocks of which a rank has what it computed again, of stages of so many layers: the one under way.

    Zero bubble goes back through whole stages, and has each until its weight gradients, of as many passes as there are
    ranks before this one later.
    """
    return layers * (rank + 1) if layout.splits_backward else 1


def hidden_between(layout: Layout, model: ModelShape) -> float:
    """Hidden values of a token that each rank has between blocks and stages: sequence parallelism splits tokens, which
    comes to the same."""
    return model.hidden / (layout.tensor_parallel_size if layout.sequence_parallel else 1)


def _block_activations(layout: Layout, model: ModelShape, tokens: int) -> tuple[float, float]:
    """Bytes that a block keeps of a microbatch for its backward pass, with and without regard to recomputation.

    Korthikanti et al. 2022, equations 1 to 6, for blocks without dropout, attention that keeps no scores, and gated
    feed-forward networks. Unlike there, inputs of split matrix products are kept whole, not gathered again. A compiled
    block computes the activation function again, not what goes into a matrix product.
    """
    tensor, context = layout.tensor_parallel_size, layout.context_parallel_size
    hidden, inner, keys = model.hidden, model.ffn_hidden / tensor, 2 * model.kv_heads * model.head_dim / tensor
    outside = hidden_between(layout, model)
    heads = hidden / tensor
    attention = 2 * heads + keys
    if context > 1 and layout.engine == "megatron":  # keys and values of whole sequences, once a head
        attention += heads + 2 * heads * context
    elif context > 1:  # before and after heads are exchanged for tokens
        attention *= 2
    masks = 0.0
    if model.num_experts:
        rows = model.experts_per_token * (IMBALANCE if layout.expert_parallel_size > 1 else 1.0)
        results = model.experts_per_token * hidden
        network, products = rows * (hidden + 4 * inner) + results, rows * (2 * inner + hidden) + results
        if layout.engine == "deepspeed":  # weights in fp32 and masks in bf16 of each token, expert, and place there
            masks = 6.0 * IMBALANCE * model.experts_per_token * tokens
    elif model.family == "llama":
        network, products = (3 if layout.compile else 4) * inner, 2 * inner
    else:
        network, products = 2 * inner, inner
    whole = tokens * (_width(layout) * (2 * outside + 2 * hidden + attention + network) + masks)
    if layout.recompute == "none":
        return whole, whole
    if layout.recompute == "full":
        return tokens * _width(layout) * outside, whole
    return min(whole, tokens * (_width(layout) * (3 * outside + attention + products) + masks)), whole


def _logits(layout: Layout, model: ModelShape, tokens: int) -> tuple[float, float, float]:
    """Bytes of logits and their gradients, those of each microbatch of GPipe, which has the logits of all before the
    first backward pass, and those that are free again before the blocks' backward passes."""
    shared = layout.engine == "megatron" and layout.tensor_parallel_size > 1
    count = tokens * model.vocab / (layout.tensor_parallel_size if shared else 1)
    if layout.compile and not shared:
        loss, later, spare = 2 * _width(layout), _width(layout), 0
    else:
        loss, later, spare = EAGER_LOSS_BYTES[layout.engine], _width(layout) + 4, SPARE_LOSS_BYTES
        if shared:
            loss = SHARED_LOSS_BYTES
        if layout.pipeline_parallel_size > 1:  # torch's pipeline holds the logits themselves until the pass comes back
            loss += DEEPSPEED_PIPELINE_LOSS_BYTES if layout.engine == "deepspeed" else _width(layout)
    waiting = 0
    if layout.pipeline_parallel_size > 1 and layout.pipeline_schedule == "gpipe":
        waiting = layout.gradient_accumulation_steps - 1
    return count * (loss + waiting * later), count * later * min(waiting, 1), count * spare


def _communication(
    layout: Layout, model: ModelShape, held: _Held, tokens: int, first: bool, last: bool, in_flight: int
) -> float:
    """Bytes of parts of the model, and of hidden states, on their way between ranks."""
    width = _width(layout)
    hidden = _exchanged(layout, first, last, in_flight) * tokens * hidden_between(layout, model) * width
    if layout.engine == "megatron":
        # FSDP2 has of the largest part what is gathered, before and after it is taken apart, and its gradients, as they
        # come, on their way, and arrived.
        copies = 3 * width + 2 * _reduced_width(layout)
        return hidden + copies * held.largest
    buckets = 2 * min(layout.bucket_size, held.whole) if layout.zero_stage else 0
    return hidden + width * buckets


def _exchanged(layout: Layout, first: bool, last: bool, in_flight: int) -> int:
    """Hidden states of a microbatch, and gradients of them, that a pipeline rank has for or from its neighbours.

    What came forward is counted with the blocks, which keep it.
    """
    ranks = layout.pipeline_parallel_size
    if ranks == 1:
        return 0
    if layout.engine == "deepspeed":
        return (not first) + (not last)
    # torch keeps what a stage has sent forward until the pass comes back, and the last gradient that it sent. Schedules
    # of several stages a rank post receives ahead, at the ends of the pipeline up to one for each rank.
    if layout.virtual_pipeline_stages > 1:
        return in_flight + ranks + 1
    return (0 if last else in_flight) + 1 + (0 if first else 1)
