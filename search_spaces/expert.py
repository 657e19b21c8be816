"""The axes that somebody with experience would give a search, from model and cluster: `space: auto`.

The rules of thumb are those of Narayanan et al. 2021 (section 3: tensor parallelism within a node, pipelines between
nodes, the rest to data parallelism), of Korthikanti et al. 2022 (sequence parallelism always, and as little
recomputation as memory allows) and of Grattafiori et al. 2024 (section 3.3: context parallelism for long sequences, and
ends of the pipeline with a layer less). That tensor-parallel ranks send beside their products is tried too: NVIDIA's
recipes for H100 have it (`tp_comm_overlap` of Megatron-Bridge), and it took torchtitan 8 to 9% off a step of Llama-3-8B
and 70B over 8 ranks in bf16 (benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, commit 5ecb74e). What changes the
numbers that training comes to, such as fp8, is left to those who train.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from search_spaces.layout import AXES
from search_spaces.workload import Workload

FEWEST_TOKENS = 4096
"""Tokens of a sequence that a context-parallel rank should have at least: with fewer, kernels are too small to hide
what the ranks exchange."""

MOST_CONTEXT = 64

MOST_TOKENS = 65_536
"""Tokens of a microbatch on a replica beyond which larger ones do not make kernels any faster."""

LARGEST_MICROBATCH = 32

MOST_STAGES = 64
"""Pipeline ranks: longer pipelines were published, and of far larger clusters alone."""


@dataclass(frozen=True)
class Choice:
    """Values to try of an axis, and why these."""

    values: tuple[Any, ...]
    why: str


def choose(work: Workload, num_gpus: int, alone: bool = False) -> dict[str, Choice]:
    """The axes of which a layout of `num_gpus` GPUs may have other than default values, in the order of `AXES`.

    `alone`: whether ranks are to run by themselves, without GPUs beside them whose memory they could reach.
    """
    choices = {
        "micro_batch_size": _microbatches(work),
        "tensor_parallel_size": _tensor(work, num_gpus),
        "context_parallel_size": _context(work, num_gpus),
        "expert_parallel_size": _experts(work, num_gpus),
        "zero_stage": Choice((1, 2, 3), "optimizer states at least are sharded, which costs nothing"),
        "data_parallel_replicate_size": _copies(work, num_gpus),
        "async_tensor_parallel": _asynchronous(work, 1 if alone else num_gpus),
        "recompute": Choice(("none", "selective", "full"), "as little as memory allows"),
        "compile": _compile(work),
        **_pipelines(work, num_gpus),
    }
    return {name: choices[name] for name in AXES if name in choices and choices[name].values != (AXES[name].default,)}


def _microbatches(work: Workload) -> Choice:
    most = max(1, min(LARGEST_MICROBATCH, work.global_batch_size, MOST_TOKENS // work.sequence_length))
    return Choice(_powers(most), f"powers of two, up to {MOST_TOKENS:,} tokens")


def _tensor(work: Workload, num_gpus: int) -> Choice:
    model, most = work.shape, min(num_gpus, work.gpus_per_node)
    common = math.gcd(model.heads, model.kv_heads, model.ffn_hidden, model.vocab)
    sizes = tuple(size for size in _powers(most) if num_gpus % size == 0 and common % size == 0)
    return Choice(sizes, f"within a node of {work.gpus_per_node} GPUs, as far as heads and widths can be split")


def _asynchronous(work: Workload, num_gpus: int) -> Choice:
    splits = len(_tensor(work, num_gpus).values) > 1 and not work.shape.num_experts  # whose blocks are several graphs
    can = splits and work.accelerator.peer_memory and _compile(work).values == (True,)
    return Choice((False, True) if can else (False,), "tensor-parallel ranks send before their products or beside them")


def _context(work: Workload, num_gpus: int) -> Choice:
    length = work.sequence_length
    most = max(1, min(MOST_CONTEXT, num_gpus, length // FEWEST_TOKENS))
    sizes = tuple(size for size in _powers(most) if num_gpus % size == 0 and (size == 1 or length % (2 * size) == 0))
    return Choice(sizes, f"{FEWEST_TOKENS:,} tokens of a sequence or more for each GPU")


def _experts(work: Workload, num_gpus: int) -> Choice:
    experts = work.shape.num_experts
    if not experts:
        return Choice((1,), "no experts")
    sizes = tuple(size for size in _powers(experts) if experts % size == 0 and num_gpus % size == 0)
    return Choice(sizes, f"{experts} experts, apart or together")


def _pipelines(work: Workload, num_gpus: int) -> dict[str, Choice]:
    """How many ranks pipelines have, how their stages are cut, and how they are run."""
    depths = (work.shape.layers, *work.depths)
    most = min(num_gpus, work.global_batch_size, MOST_STAGES)
    sizes, virtual, cuts = [1], {1}, dict[tuple[int, ...], None]()
    for size in (size for size in range(2, most + 1) if num_gpus % size == 0):
        for each in range(1, depths[0] // size + 2):
            if any(depth % (size * each) for depth in depths):
                if (cut := _uneven(work, size * each)) is None:
                    continue
                cuts[cut] = None
            sizes.append(size)
            virtual.add(each)
    divisors = f"divisors of {' and '.join(map(str, depths))} layers" + (", or of two more" if cuts else "")
    bubble = "the more stages a rank has, the smaller the bubble, and the more messages there are"
    schedules = ("1f1b", "interleaved_1f1b") if len(virtual) > 1 else ("1f1b",)
    return {
        "pipeline_parallel_size": Choice(tuple(dict.fromkeys(sizes)), divisors),
        "virtual_pipeline_stages": Choice(tuple(sorted(virtual)), bubble),
        "pipeline_schedule": Choice(schedules, "one stage a rank, or several; zero bubble cannot be compiled"),
        "stage_layers": Choice((None, *cuts), "equal, or with a layer less at both ends of the model"),
    }


def _uneven(work: Workload, stages: int) -> tuple[int, ...] | None:
    """Stages of which the first and the last have a layer less than the others, for embedding and head (Grattafiori et
    al. 2024, section 3.3); None where layers do not come to that, and for proxies, whose stages are equal."""
    each, left = divmod(work.shape.layers + 2, stages)
    return None if left or each < 2 or work.depths else (each - 1, *[each] * (stages - 2), each - 1)


def _copies(work: Workload, num_gpus: int) -> Choice:
    nodes = num_gpus // work.gpus_per_node
    sizes = tuple(size for size in _powers(nodes) if num_gpus % size == 0)
    return Choice(sizes or (1,), "one copy over all ranks, or several over fewer nodes each, down to one")


def _compile(work: Workload) -> Choice:
    if work.accelerator.platform == "cpu":
        return Choice((False,), "compiling takes long on a CPU")
    if work.shape.num_experts:
        return Choice((True, False), "compiled blocks are faster, but with experts not if recomputed in part")
    return Choice((True,), "compiled blocks are faster")


def _powers(most: int) -> tuple[int, ...]:
    """Powers of two from 1 to `most`."""
    return tuple(2**power for power in range(most.bit_length()))
