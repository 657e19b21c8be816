"""What a training has torch's allocator reserve on a GPU, by replaying what it allocates, in order.

The sum of what is there at once is less than what is reserved, as tensors do not fit each other's places: the moments
of Adam, which `megatron` makes at the end of the first step, lie where activations and logits were; what cuBLAS works
in may lie where the first logits were, and the next find no room there. So a few microbatches of a few steps are run
through `search_spaces.replay.allocator`, tensor by tensor, as autograd, torch's compiler and FSDP2 make and drop them
(`trainables`, PyTorch 2.11).

Sizes are in values of the width that is given, 2 bytes if none is. A block keeps what `docs/memory.md` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from search_spaces.engines import ENGINES
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.replay.context import ContextFullySharded, ContextPipelined, ContextSharded
from search_spaces.replay.flat import Flat
from search_spaces.replay.flat_pipelined import FlatPipelined
from search_spaces.replay.flat_split import FlatSplit
from search_spaces.replay.fully_sharded import FullySharded
from search_spaces.replay.pipelined import Pipelined
from search_spaces.replay.replicas import Replicas
from search_spaces.replay.sharded import Sharded
from search_spaces.replay.shards import GatheredWhole, Shards, SummedShare, SummedWhole
from search_spaces.replay.split import FullySplit, PipelinedSplit, Split
from search_spaces.replay.training import Training
from search_spaces.workload import Workload

STEPS = 3
"""After which no more is reserved: the second is the first with moments, the third has them where they stay."""

ROUNDS = 2
"""Microbatches of a step that differ: the first finds no gradients, the last sums them up."""

FULL, LEAST = 2, 8
"""Microbatches of a step, in the pipeline's ranks, and in any case, after which all further ones are like the last."""

BETWEEN = 1
"""One more between both changes what room the last finds where FSDP2 gathers anew in each, as what one sends for in
vain the next one has, and where ranks split products or share a sequence."""

MOST = 16
"""Microbatches of a step of GPipe, which has all of them at once, beyond which a replay takes too long."""

MOST_EXPERTS = 128
"""That a rank holds, of all blocks, beyond which a replay of those that are computed one after the other takes too
long."""

MOST_BLOCKS = 128
"""Blocks that a pipeline's rank goes through in a step, beyond which those that share their stages with others are not
replayed: there are many such layouts of a big model."""

RUNS: dict[str, type[Training]] = {"sharded": Sharded, "flat": Flat}
"""By what engines say of themselves (`EngineFacts.allocates`)."""

SPLIT: dict[str, type[Split] | type[FlatSplit]] = {"sharded": Split, "flat": FlatSplit}
"""Of ranks that split products, likewise."""

SHARDED: dict[int, type[Shards]] = {1: SummedWhole, 2: SummedShare, 3: GatheredWhole}
"""Of DeepSpeed's data-parallel ranks, by ZeRO stage."""


@dataclass(frozen=True)
class Replayed:
    """Bytes: `reserved` by torch's allocator, `most` in use at once, and `late`, gradients made by a step's last
    backward pass in a pool of their own. `rank`: of ranks that differ within a pipeline's, the one that it is of."""

    reserved: float
    most: float
    late: float
    rank: int = 0


def replayed(layout: Layout, work: Workload, rank: int = 0) -> Replayed | None:
    """Of a pipeline rank of a legal layout; None where the order of its allocations is not known."""
    model, facts = work.shape, ENGINES.get(layout.engine)  # what is built on them may allocate otherwise
    if facts is None or facts.allocates is None or work.trainer is not None:
        return None
    if (layout.precision, layout.reduce_precision) != ("bf16", "fp32"):
        return None
    if layout.offload_optimizer or layout.expandable_segments:
        return None
    tokens, pipelined = layout.microbatch_tokens(work.sequence_length), layout.pipeline_parallel_size > 1
    if facts.allocates == "flat":
        return _flat_pipelined(layout, work, tokens, rank) if pipelined else _flat(layout, model, tokens)
    if pipelined:
        return _pipelined(layout, work, tokens, rank)
    return _sharded(layout, work, tokens)


def fullest_rank(layout: Layout, work: Workload) -> int:
    """The rank that reserves most in a legal layout without a pipeline; 0 where all are taken to be alike."""
    if len(unlike(layout, work)) == 1:
        return 0
    found = replayed(layout, work)
    return 0 if found is None else found.rank


def unlike(layout: Layout, work: Workload) -> tuple[int, ...]:
    """One of each kind of ranks that differ in memory in a legal layout without a pipeline, as far as is known."""
    facts = ENGINES.get(layout.engine)
    return apart(layout) if work.model is not None and facts is not None and facts.allocates == "flat" else (0,)


def _flat(layout: Layout, model: ModelShape, tokens: int) -> Replayed | None:
    """Of DeepSpeed: data-parallel and sequence ranks that shard states, replicas, tensor-parallel ranks, or one."""
    rounds, of_any_batch = rounds_of(layout), replace(layout, global_batch_size=0)
    if model.num_experts // layout.expert_parallel_size * model.layers > MOST_EXPERTS:
        return None
    if layout.num_gpus == 1:
        return None if layout.zero_stage else _replay("flat", model, tokens, rounds, layout.compile, layout.recompute)
    if layout.zero_stage:
        if layout.shard_ranks < layout.num_gpus:
            return None
        return _replay_shards(model, tokens, rounds, of_any_batch)
    if layout.shard_ranks > 1:
        return _replay_replicas(model, tokens, rounds, of_any_batch) if _is_replicated_as_known(layout, model) else None
    if layout.tensor_parallel_size < layout.num_gpus or not _is_split_as_known(layout, model, "flat"):
        return None
    return _replay_split("flat", model, tokens, rounds, of_any_batch)


def _flat_pipelined(layout: Layout, work: Workload, tokens: int, rank: int) -> Replayed | None:
    """Of a pipeline's rank of DeepSpeed, of dense models; replicas have shares of the optimizer's states."""
    short = shortened(layout)
    if work.shape.num_experts or layout.context_parallel_size > 1 or _is_long(layout, short, work):
        return None
    return _replay_flat_rank(work.shape, tokens, short, rank)


def _pipelined(layout: Layout, work: Workload, tokens: int, rank: int) -> Replayed | None:
    """Of a pipeline's rank of `megatron` that shards nothing; replicas sum up gradients where they are."""
    if layout.zero_stage or (_shares(layout) and work.shape.num_experts):
        return None
    if layout.pipeline_schedule == "gpipe" and layout.gradient_accumulation_steps > MOST:
        return None
    short = shortened(layout)
    if not _is_cut_as_known(layout, work) or _is_long(layout, short, work):
        return None
    return _replay_rank(work.shape, tokens, short, rank)


def _shares(layout: Layout) -> bool:
    """Whether ranks share a pipeline's stage."""
    return layout.num_gpus > layout.pipeline_parallel_size


def _is_long(layout: Layout, short: Layout, work: Workload) -> bool:
    """Whether ranks of a stage that others share go through too many blocks in a step that is shortened."""
    blocks = work.shape.layers / layout.pipeline_parallel_size * short.gradient_accumulation_steps
    return _shares(layout) and blocks > MOST_BLOCKS


def _sharded(layout: Layout, work: Workload, tokens: int) -> Replayed | None:
    """Of a rank of `megatron` without a pipeline."""
    model, rounds, of_any_batch = work.shape, rounds_of(layout), replace(layout, global_batch_size=0)
    if layout.zero_stage and layout.shard_ranks == 1:
        return None
    if not _is_cut_as_known(layout, work) or not _is_sharded_evenly(layout, model):
        return None
    if layout.tensor_parallel_size == 1:
        return _replay_ranks(model, tokens, rounds, of_any_batch)
    if layout.shard_ranks > 1 and model.num_experts:
        return None
    return _replay_split("sharded", model, tokens, rounds, of_any_batch)


def rounds_of(layout: Layout) -> int:
    """Microbatches of a step that are replayed without a pipeline."""
    is_sharded = ENGINES[layout.engine].allocates == "sharded"
    is_split = max(layout.tensor_parallel_size, layout.context_parallel_size) > 1
    between = BETWEEN if is_sharded and (layout.zero_stage == 3 or is_split) else 0
    return min(ROUNDS + between, layout.gradient_accumulation_steps)


def _is_cut_as_known(layout: Layout, work: Workload) -> bool:
    """Whether it is known what ranks of `megatron` allocate that split products, or have parts of a sequence."""
    if layout.context_parallel_size > 1:
        facts = ENGINES[layout.engine]
        return layout.tensor_parallel_size == 1 and facts.attention(work.accelerator, is_square=False).in_parts
    return layout.tensor_parallel_size == 1 or _is_split_as_known(layout, work.shape, "sharded")


def _is_sharded_evenly(layout: Layout, model: ModelShape) -> bool:
    """Each parameter over all ranks that have it, and experts as wholes."""
    ranks = layout.shard_group_size
    uneven = model.num_experts % ranks or layout.expert_parallel_size > 1
    return ranks == (layout.shard_ranks if layout.zero_stage else 1) and not uneven


def _is_split_as_known(layout: Layout, model: ModelShape, allocates: str) -> bool:
    """Whether it is known in which order ranks allocate that split products."""
    if allocates == "flat":
        in_graph = layout.compile and layout.recompute == "selective"
        return model.family == "llama" and not model.num_experts and not in_graph
    return not (layout.async_tensor_parallel or (layout.compile and model.num_experts))


def _is_replicated_as_known(layout: Layout, model: ModelShape) -> bool:
    """Whether it is known in which order DeepSpeed's replicas allocate."""
    eager = not layout.compile and layout.recompute != "selective"
    replicas = layout.data_parallel_size * layout.tensor_parallel_size == layout.num_gpus
    return eager and replicas and model.family == "llama" and not (model.num_experts or model.tie_embeddings)


@lru_cache(maxsize=4096)
def _replay(allocates: str, model: ModelShape, tokens: int, rounds: int, compiled: bool, recompute: str) -> Replayed:
    return run(RUNS[allocates](model, tokens, rounds, compiled, recompute))


def shortened(layout: Layout) -> Layout:
    """With no more microbatches than it takes until nothing new comes, which is never in GPipe."""
    microbatches = max(LEAST, FULL * layout.pipeline_parallel_size)
    most = microbatches * layout.micro_batch_size * layout.data_parallel_size
    if layout.pipeline_schedule == "gpipe" or layout.global_batch_size <= most:
        return layout
    return replace(layout, global_batch_size=most)


@lru_cache(maxsize=4096)
def _replay_rank(model: ModelShape, tokens: int, layout: Layout, rank: int) -> Replayed:
    if layout.tensor_parallel_size > 1:
        return run(PipelinedSplit(model, tokens, layout, rank))
    kind = ContextPipelined if layout.context_parallel_size > 1 else Pipelined
    return run(kind(model, tokens, layout, rank))


@lru_cache(maxsize=4096)
def _replay_flat_rank(model: ModelShape, tokens: int, layout: Layout, rank: int) -> Replayed:
    return run(FlatPipelined(model, tokens, layout, rank))


@lru_cache(maxsize=4096)
def _replay_split(allocates: str, model: ModelShape, tokens: int, rounds: int, layout: Layout) -> Replayed:
    kind = FullySplit if allocates == "sharded" and layout.zero_stage else SPLIT[allocates]
    return run(kind(model, tokens, rounds, layout))


@lru_cache(maxsize=4096)
def _replay_shards(model: ModelShape, tokens: int, rounds: int, layout: Layout) -> Replayed:
    return fullest(SHARDED[layout.zero_stage], model, tokens, rounds, layout)


@lru_cache(maxsize=4096)
def _replay_replicas(model: ModelShape, tokens: int, rounds: int, layout: Layout) -> Replayed:
    return run(Replicas(model, tokens, rounds, layout))


@lru_cache(maxsize=4096)
def _replay_ranks(model: ModelShape, tokens: int, rounds: int, layout: Layout) -> Replayed:
    if layout.context_parallel_size > 1:
        kind = ContextFullySharded if layout.zero_stage else ContextSharded
        return run(kind(model, tokens, rounds, layout))
    if layout.zero_stage:
        return run(FullySharded(model, tokens, rounds, layout))
    return _replay("sharded", model, tokens, rounds, layout.compile, layout.recompute)


def fullest(kind: type[Shards], model: ModelShape, tokens: int, rounds: int, layout: Layout) -> Replayed:
    """Of ranks that differ, the one that reserves most."""
    found = (replace(run(kind(model, tokens, rounds, layout, rank)), rank=rank) for rank in apart(layout))
    return max(found, key=lambda one: one.reserved)


def apart(layout: Layout) -> tuple[int, ...]:
    """Of those that shard states, the ranks that differ: the first and the last, whose gradients come last and first,
    where a rank sums up its own alone."""
    return (0, layout.shard_ranks - 1) if layout.zero_stage == 2 else (0,)


def run(training: Training) -> Replayed:
    """What `STEPS` steps reserve, or as many as change what is free."""
    before = None
    for _ in range(STEPS):
        training.step()
        if (free := training.allocator.free) == before:
            break
        before = free
    return Replayed(training.allocator.reserved, training.allocator.most, training.late)
