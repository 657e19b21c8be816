"""Predicted peak memory of a layout on the GPUs of each pipeline rank, part by part; see docs/memory.md.

The peak is at the start of a step's last backward pass: what ZeRO (Rajbhandari et al. 2020, section 3) and Korthikanti
et al. 2022 (section 4) count is all there then. What torch's allocator reserves is more, as some of what this pass
makes does not fit the pieces of what it gives free. Of many layouts `search_spaces.replay` says by how much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

from search_spaces.engines import facts_of
from search_spaces.engines.base import EngineFacts
from search_spaces.hardware import Accelerator
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.parameters import held
from search_spaces.replay import Replayed, replayed
from search_spaces.workload import Workload

Band = Literal["fits", "borderline", "too big"]

SAFE_SHARE = 0.8
"""Share of what torch can reserve from which on a layout may run out after all."""

MEASURED_SHARE = 1.03
"""Share above which a layout is taken not to fit: one, and the mean error of the formula."""

UNMEASURED_SHARE = 1.15
"""Share above which a layout is taken not to fit that is of a kind by which no part of the formula was set."""

CLEAR_SHARE = 0.6
"""Share by the formula up to which a layout fits whatever a replay says: the formula was at most 23% too low where it
was measured, by which such a layout needs 78%."""

HOPELESS_SHARE = 1.3
"""Share above which it is not looked at more closely how little a layout fits, which takes a tenth of a second."""

NEAR_SHARES = 0.95, 1.05
"""Shares by the formula between which alone ranks of several kinds of parallelism at once, and those that have experts
computed one after the other, are looked at more closely where layouts are many: their replays take longer, and are as
many as there are such layouts."""

GUESSED_SHARE = 0.5
"""What a layout is taken to need of a GPU's memory before a trial tells, where nothing is known of the model."""

PRIOR_TRIALS = 3
"""Trials for which the formula counts beside those of a search."""

CONSTANT_BYTES = 2**28
"""Reserved whatever the layout: workspaces of cuBLAS, rotary tables, pools of small tensors."""

OUTSIDE_BYTES = 1.8 * 2**30
"""Of the memory in `ACCELERATORS`, what torch cannot reserve: the driver's, CUDA's context and modules, NCCL's.

On H200 torch finds 0.6 GiB less than NVML, and out-of-memory errors name 1.2 GiB that are not torch's.
"""

SPARE_LOSS_BYTES = 10
"""A logit, of a loss that is not compiled, that the backward passes of the blocks use again. Fitted."""

IMBALANCE = 2.8
"""Tokens that come to the experts of the fullest rank, in those of an even share, while routers are young. Fitted."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each GPU of one pipeline rank.

    `parameters` are master copies and what is gathered of them. `logits` is with the loss and gradients of both.
    `constant` has, where allocations were replayed, all that is none of the others: what backward passes make, and
    pieces between tensors that are too small for others. `slack` is reserved and not used, and given back where memory
    is short.
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


def usable_bytes(accelerator: Accelerator) -> float | None:
    """What torch can reserve of a GPU's memory; None where that is not known."""
    return None if accelerator.memory_gib is None else accelerator.memory_gib * 2**30 - OUTSIDE_BYTES


def estimate(layout: Layout, work: Workload, ranks: Iterable[int] | None = None) -> MemoryEstimate:
    """For a legal layout of the whole model of `work`.

    `ranks`: pipeline ranks to look at, if not just those of which one is the fullest.
    """
    return _looked_at(layout, work, _by_formula(layout, work, _fullest(layout) if ranks is None else ranks))


def glance(layout: Layout, work: Workload) -> MemoryEstimate:
    """`estimate`, so that many are soon told: by the formula alone where they clearly fit or do not, or the memory is
    unknown."""
    by_formula = _by_formula(layout, work, _fullest(layout))
    kinds = (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.shard_ranks)
    one_by_one = work.shape.num_experts > 0 and facts_of(layout, work).fills_experts
    takes_long = one_by_one or sum(ranks > 1 for ranks in kinds) > 1
    least, most = NEAR_SHARES if takes_long else (CLEAR_SHARE, math.inf)
    is_clear = by_formula.share is None or not least < by_formula.share <= most
    return by_formula if is_clear else _looked_at(layout, work, by_formula)


def _looked_at(layout: Layout, work: Workload, by_formula: MemoryEstimate) -> MemoryEstimate:
    """As replayed, but what is far too big."""
    if by_formula.share is not None and by_formula.share > HOPELESS_SHARE:
        return by_formula
    found = {rank: _as_replayed(memory, replayed(layout, work, rank)) for rank, memory in by_formula.ranks.items()}
    return MemoryEstimate(found, by_formula.usable_bytes)


def _by_formula(layout: Layout, work: Workload, ranks: Iterable[int]) -> MemoryEstimate:
    tokens = layout.microbatch_tokens(work.sequence_length)
    engine, model = facts_of(layout, work), work.shape
    in_parts = engine.attention(work.accelerator, is_square=False).in_parts
    block = _block_activations(layout, model, engine, tokens, work.sequence_length, in_parts)
    found = {rank: _rank(layout, model, engine, tokens, block, rank) for rank in ranks}
    return MemoryEstimate(found, usable_bytes(work.accelerator))


def band(layout: Layout, work: Workload) -> Band | None:
    """Whether a legal layout fits, as it is really run: of proxies the deeper. None where memory is not known."""
    return band_of(layout, work, glance(layout, work.run).share)


def band_of(layout: Layout, work: Workload, share: float | None) -> Band | None:
    """What it means that a layout needs `share` of what torch can reserve."""
    if share is None:
        return None
    if share > (MEASURED_SHARE if _is_measured(layout, work) else UNMEASURED_SHARE):
        return "too big"
    return "borderline" if share >= SAFE_SHARE or facts_of(layout, work).follows_router(layout) else "fits"


class Needed(NamedTuple):
    """What a trial tells of the share of a GPU's memory that its layout needs: `before`, what was estimated, and
    `after`; None where it is known only whether it `fits`."""

    before: float
    after: float | None
    fits: bool


class MemoryModel:
    """The estimates of one search, corrected by what its trials took.

    Layouts of an engine are scaled by the median of measured over predicted memory, drawn towards one as long as there
    are few of them.
    """

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.needed: dict[Layout, Needed] = {}
        self._shares: dict[Layout, float | None] = {}
        self._ratios: dict[str, list[float]] = {}
        self._factors: dict[str, float] = {}

    @property
    def is_doubtful(self) -> bool:
        """Whether the estimates are of another program than the one that trains: a trainer's."""
        return self.work.trainer is not None

    def observe(self, layout: Layout, measured_gib: float | None, fits: bool) -> None:
        """What a trial reserved on its fullest GPU (`peak_memory_gib`), None where that is not known, and whether it
        fitted."""
        share, usable = self.prior(layout), usable_bytes(self.work.accelerator)
        if self.work.model is None:
            if share is not None and usable is not None:
                measured = None if measured_gib is None else measured_gib * 2**30 / usable
                self.needed[layout] = Needed(share, measured, fits)
            return
        if measured_gib is not None:
            ratio = measured_gib * 2**30 / estimate(layout, self.work).peak_bytes
        elif share is not None and share < 1 and not fits:
            ratio = 1 / share  # at least
        else:
            ratio = None
        if share is not None:
            after = share * ratio if ratio is not None and measured_gib is not None else None
            self.needed[layout] = Needed(share, after, fits)
        if ratio is None:
            return
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
        return band_of(layout, self.work, self.share(layout))

    def prior(self, layout: Layout) -> float | None:
        """`estimated`, or a guess where nothing is known of the model; None where a GPU's memory is not known."""
        if self.work.model is not None:
            return self.estimated(layout)
        return None if usable_bytes(self.work.accelerator) is None else GUESSED_SHARE

    def estimated(self, layout: Layout) -> float | None:
        """`share` before any correction."""
        if self.work.model is None:
            return None
        if layout not in self._shares:
            self._shares[layout] = estimate(layout, self.work.run).share
        return self._shares[layout]


def _is_measured(layout: Layout, work: Workload) -> bool:
    """Whether the formula was set by layouts of this kind; see docs/memory.md."""
    model = work.shape
    plain = (layout.precision, layout.pipeline_schedule, layout.offload_optimizer) == ("bf16", "1f1b", False)
    return (
        plain
        and layout.recompute != "selective"
        and layout.context_parallel_size == layout.data_parallel_replicate_size == 1
        and model.family == "llama"
        and not (model.num_experts and layout.expert_parallel_size > 1)
        and facts_of(layout, work).memory_is_measured(layout, model)
    )


def _fullest(layout: Layout) -> Iterable[int]:
    """Pipeline ranks of which one is the fullest.

    Those between the ends differ only in the passes that they keep, no more the later they come.
    """
    ranks = range(layout.pipeline_parallel_size)
    return ranks if layout.stage_layers or len(ranks) < 3 else (ranks[0], ranks[1], ranks[-1])


def _rank(
    layout: Layout, model: ModelShape, engine: EngineFacts, tokens: int, block: tuple[float, float], rank: int
) -> RankMemory:
    virtual = layout.virtual_pipeline_stages
    first, last = (rank == end for end in layout.end_ranks)
    layers = layout.layers_of(rank, model.layers)
    holds = held(layout, model, rank, engine.splits_tables)
    states = engine.states(layout, holds)
    in_flight = passes_in_flight(layout, rank)
    kept, whole = block
    logits, waiting, spare = _logits(layout, model, engine, tokens) if last else (0.0, 0.0, 0.0)
    communication = engine.parts_on_their_way(layout, holds)
    if layout.pipeline_parallel_size > 1:
        hidden_state = tokens * hidden_between(layout, model) * layout.width
        communication += engine.hidden_states_on_their_way(layout, first, last, in_flight) * hidden_state
    again = (whole - kept) * _computed_again(layout, rank, layers // virtual)
    # What blocks send and compute again comes after the loss, in what that has given back.
    spare, communication = max(0.0, spare - communication), max(0.0, communication - spare)
    spare, again = max(0.0, spare - again), max(0.0, again - spare)
    room = 0.0
    widest = tokens * model.ffn_hidden * layout.width / layout.tensor_parallel_size
    if widest >= states.late * holds.block / holds.whole:
        # Gradients of a block fit where other microbatches kept the widest of their tensors.
        room = kept * layers * (in_flight / virtual - 1)
    gradients = states.gradients
    if engine.releases_gradients and _forward_first(layout, in_flight):
        # The first backward pass finds no gradients of this step yet, the second one microbatch less.
        gradients -= min(gradients, kept * layers / virtual + waiting)
    return RankMemory(
        parameters=states.parameters,
        gradients=gradients,
        optimizer=states.optimizer,
        activations=kept * layers * in_flight / virtual + again,
        logits=logits,
        communication=communication,
        constant=CONSTANT_BYTES,
        slack=states.copied or max(0.0, states.late - max(0.0, room) - spare),
    )


def _as_replayed(memory: RankMemory, found: Replayed | None) -> RankMemory:
    """What is reserved as it was replayed, of which gradients that come late count as slack; as it was estimated where
    nothing was replayed. Not all gradients may be there when activations are."""
    if found is None:
        return memory
    slack = min(found.late, found.reserved - found.most)
    left = found.reserved - slack - memory.parameters - memory.optimizer
    parts = []
    for most in (memory.activations, memory.gradients, memory.logits):
        parts.append(min(left, most))
        left -= parts[-1]
    activations, gradients, logits = parts
    return replace(
        memory,
        activations=activations,
        gradients=gradients,
        logits=logits,
        communication=0.0,
        constant=left,
        slack=slack,
    )


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
    return model.hidden / (layout.tensor_parallel_size if layout.splits_sequence else 1)


def _block_activations(
    layout: Layout, model: ModelShape, engine: EngineFacts, tokens: int, sequence: int, in_parts: bool
) -> tuple[float, float]:
    """Bytes that a block keeps of a microbatch for its backward pass, with and without regard to recomputation.

    Korthikanti et al. 2022, equations 1 to 6, for blocks without dropout, mostly with attention that keeps no scores,
    and gated feed-forward networks. Unlike there, most engines keep inputs of split matrix products whole, and do not
    gather them again. A compiled block computes the activation function again, not what goes into a matrix product.
    In fp8 these inputs are kept in 8 bits, and where nothing is compiled, weights as well.
    """
    tensor, context = layout.tensor_parallel_size, layout.context_parallel_size
    hidden, inner, keys = model.hidden, model.ffn_hidden / tensor, 2 * model.key_width / tensor
    outside = hidden_between(layout, model)
    heads = model.query_width / tensor
    attention = 2 * heads + keys
    if context > 1 and engine.exchanges_heads:  # before and after the exchange
        attention *= 2
    gathered = 0.0
    if context > 1 and not (engine.exchanges_heads or engine.rings_keys):  # of whole sequences, for some kernels a head
        gathered = keys * (context - 1) if in_parts else heads + 2 * heads * context
    routing = 0.0
    if model.num_experts:
        fullest = min(IMBALANCE, layout.expert_parallel_size)  # of all tokens
        rows = model.experts_per_token * (fullest if engine.follows_router(layout) else 1.0)
        network, products = rows * (hidden + 4 * inner) + model.experts_per_token * hidden, rows * (2 * inner + hidden)
        if engine.fills_experts:  # hidden states in fp32, for the router
            routing = 4.0 * hidden
    elif model.family == "llama":
        network, products = (3 if layout.compile else 4) * inner, 2 * inner
    else:
        network, products = 2 * inner, inner
    given, cast = 2.0 * layout.width * (outside if engine.gathers_again else hidden), 0.0
    if layout.precision == "fp8" and not model.num_experts:
        # A byte a value, of attention's results in addition to them. Where products cast what they are given each for
        # itself, as they do in one piece and not compiled, they keep it each.
        given *= (5 if model.family == "llama" else 4) / 4 if tensor == 1 and not layout.compile else 1 / 2
        given += (0 if layout.compile else heads) - inner
        if layout.compile and tensor > 1:  # all is cast again, but for what was gathered
            given = layout.width * ((hidden if layout.splits_sequence else 0) - inner)
        cast = 0.0 if layout.compile else model.block_parameters / tensor
    scores = 5.0 * tokens * sequence * model.heads / tensor if engine.scores_traffic else 0.0
    whole = tokens * (layout.width * (2 * outside + attention + gathered + network) + given + routing) + scores + cast
    if layout.recompute == "none":
        return whole, whole
    if layout.recompute == "full":
        return tokens * layout.width * outside, whole
    # Autograd needs no result of a dense network's last product, which the policy keeps none the less of what is not
    # compiled into one graph; that of experts is among their products. Of what ranks sum it keeps the sums, and where
    # nothing is compiled, what they are of.
    last = 0 if model.num_experts or layout.compile else 1
    kept = (2 + last) * outside
    if tensor > 1 and not layout.compile:
        kept += (1 + last) * hidden + (outside if model.num_experts else 0)
    return min(whole, tokens * layout.width * (kept + attention + products)), whole


def _logits(layout: Layout, model: ModelShape, engine: EngineFacts, tokens: int) -> tuple[float, float, float]:
    """Bytes of logits and their gradients, those of each microbatch of GPipe, which has the logits of all before the
    first backward pass, and those that are free again before the blocks' backward passes."""
    shared = engine.splits_tables and layout.tensor_parallel_size > 1
    count = tokens * model.vocab / (layout.tensor_parallel_size if shared else 1)
    if layout.compile and engine.compiles_loss and not shared:
        loss, later, spare = 2 * layout.width, layout.width, 0
    else:
        loss = engine.shared_loss_bytes if shared else engine.eager_loss_bytes(layout)
        later, spare = layout.width + 4, min(loss, SPARE_LOSS_BYTES)
        if layout.pipeline_parallel_size > 1:
            loss += engine.pipeline_loss_bytes(layout)
    waiting = 0
    if layout.pipeline_parallel_size > 1 and layout.pipeline_schedule == "gpipe":
        waiting = layout.gradient_accumulation_steps - 1
    return count * (loss + waiting * later), count * later * min(waiting, 1), count * spare
