"""The arguments of Megatron-LM's training scripts for a layout of the `megatron` engine. Needs no torch.

Names and meanings are those of `megatron/training/arguments.py` and `megatron/core/transformer/transformer_config.py`
at github.com/NVIDIA/Megatron-LM, tag core_v0.16.1 and commit d98e8a6.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from service.answers.exports import (
    EXPANDABLE_SEGMENTS,
    LEARNING_RATE,
    RANK_ORDER,
    TRAIN_STEPS,
    Export,
    Program,
    Variable,
    memory_environment,
    power_limit,
)
from trainables.data import SYNTHETIC

if TYPE_CHECKING:
    from trainables.launch import Launch


def arguments(layout: Layout) -> list[str]:
    """All of the layout that Megatron-LM has arguments for; the rest is `not_expressible`."""
    args = [
        *("--tensor-model-parallel-size", str(layout.tensor_parallel_size)),
        *("--pipeline-model-parallel-size", str(layout.pipeline_parallel_size)),
        *("--context-parallel-size", str(layout.context_parallel_size)),
        *("--expert-model-parallel-size", str(layout.expert_parallel_size)),
        *("--micro-batch-size", str(layout.micro_batch_size)),
        *("--global-batch-size", str(layout.global_batch_size)),
    ]
    if layout.splits_sequence:
        args += ["--sequence-parallel"]
    if layout.async_tensor_parallel:
        args += ["--tp-comm-overlap"]
    if layout.context_parallel_size > 1:
        args += ["--cp-comm-type", "all_gather"]
    if layout.expert_parallel_size > 1:
        args += ["--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"]
    return args + _pipeline(layout) + _sharding(layout) + _recompute(layout) + _precision(layout)


def not_expressible(layout: Layout) -> dict[str, str]:
    """What of the layout Megatron-LM does otherwise: field of `Layout` -> how."""
    otherwise = {}
    if layout.pipeline_parallel_size > 1 and layout.pipeline_schedule not in ("1f1b", "interleaved_1f1b"):
        otherwise["pipeline_schedule"] = (
            f"Megatron-LM has 1F1B and its interleaved form, not {layout.pipeline_schedule}"
        )
    if layout.recompute == "selective":
        otherwise["recompute"] = "Megatron-LM recomputes norms, and of experts activations, but not rotary positions"
    if layout.compile:
        otherwise["compile"] = "Megatron-LM fuses kernels with Transformer Engine instead"
    if layout.rank_order is not None:
        otherwise["rank_order"] = RANK_ORDER
    if layout.expandable_segments:
        otherwise["expandable_segments"] = EXPANDABLE_SEGMENTS
    return otherwise | power_limit(layout)


def stages(layers: Sequence[int]) -> str:
    """So many blocks in each stage, in Megatron-Core's own words: `Et*7|t*9L` has the embedding and the loss at the
    ends."""
    return "E" + "|".join("t" if count == 1 else f"t*{count}" for count in layers) + "L"


def _pipeline(layout: Layout) -> list[str]:
    if layout.stage_layers is not None:
        return ["--pipeline-model-parallel-layout", stages(layout.stage_layers)]
    if layout.virtual_pipeline_stages > 1:
        return ["--num-virtual-stages-per-pipeline-rank", str(layout.virtual_pipeline_stages)]
    return []


def _sharding(layout: Layout) -> list[str]:
    args = []
    if layout.zero_stage:
        args += ["--use-distributed-optimizer"]
    if layout.zero_stage > 1:
        strategy = "optim_grads" if layout.zero_stage == 2 else "optim_grads_params"
        args += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy, "--ckpt-format", "fsdp_dtensor"]
    if layout.data_parallel_replicate_size > 1:
        args += ["--num-distributed-optimizer-instances", str(layout.data_parallel_replicate_size)]
    if layout.overlap_grad_reduce:
        args += ["--overlap-grad-reduce"]
        if layout.overlap_param_gather and layout.zero_stage:
            args += ["--overlap-param-gather"]
    return args


def _recompute(layout: Layout) -> list[str]:
    if layout.recompute == "full":
        return ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    if layout.recompute == "selective":
        experts = ["moe_act"] if layout.expert_parallel_size > 1 else []
        return ["--recompute-granularity", "selective", "--recompute-modules", "layernorm", *experts]
    return []


def _precision(layout: Layout) -> list[str]:
    if layout.precision == "fp32":
        return []
    fp8 = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"] if layout.precision == "fp8" else []
    reduce = ["--grad-reduce-in-bf16"] if layout.reduce_precision == "bf16" else []
    return ["--bf16", *fp8, *reduce]


def settings(launch: Launch) -> list[str]:
    """The arguments of the model, of its sequences and of the layout."""
    length = launch.training.sequence_length
    return [*_model(launch.training.model), "--seq-length", str(length), *arguments(launch.layout)]


def render(arguments: list[str]) -> str:
    """An argument with its values a line, as a shell takes them."""
    lines: list[str] = []
    for word in arguments:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return "".join(f"{line}\n" for line in lines)


def environment(launch: Launch) -> dict[str, str]:
    """On GPUs before Blackwell Megatron-LM asks for a single queue to the device where tensor or context parallelism
    is to overlap with products, and for several where Megatron-FSDP is."""
    layout = launch.layout
    needed = memory_environment(launch)
    if layout.zero_stage < 2 and max(layout.tensor_parallel_size, layout.context_parallel_size) > 1:
        needed["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return needed


def program(launch: Launch) -> Program:
    """Megatron-LM's own `pretrain_gpt.py`, on the tokens of the search if it trained on any."""
    source, vocab = launch.training.data, launch.training.model.vocab
    data: tuple[str | Variable, ...] = ("--mock-data",)
    if source != SYNTHETIC:
        prefix = source.removesuffix(".bin").removesuffix(".idx")
        known = None if source.endswith(".npy") else prefix
        data = ("--data-path", Variable("DATA", "the prefix of a Megatron-LM indexed dataset", known))
    return Program(
        (
            Variable("PRETRAIN_GPT", "the path of pretrain_gpt.py in a checkout of Megatron-LM"),
            *settings(launch),
            *data,
            # The tokens are there already, and the tokenizer adds one that ends a document.
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab - 1)),
            *("--lr", LEARNING_RATE, "--train-iters", TRAIN_STEPS),
        )
    )


def _model(shape: ModelShape) -> list[str]:
    """The shape; nothing is dropped out at random, and the vocabulary is not padded."""
    args = [
        *("--num-layers", str(shape.layers)),
        *("--hidden-size", str(shape.hidden)),
        *("--num-attention-heads", str(shape.heads)),
        *("--ffn-hidden-size", str(shape.ffn_hidden)),
        *("--max-position-embeddings", str(shape.max_sequence_length)),
        *("--make-vocab-size-divisible-by", "1"),
        *("--attention-dropout", "0.0"),
        *("--hidden-dropout", "0.0"),
    ]
    if shape.query_width != shape.hidden:
        args += ["--kv-channels", str(shape.head_dim)]
    if shape.kv_heads < shape.heads:
        args += ["--group-query-attention", "--num-query-groups", str(shape.kv_heads)]
    if not shape.tie_embeddings:
        args += ["--untie-embeddings-and-output-weights"]
    if shape.family == "gpt":
        return [*args, "--position-embedding-type", "learned_absolute", "--normalization", "LayerNorm"]
    args += ["--position-embedding-type", "rope", "--rotary-base", f"{shape.rope_theta:.0f}"]
    args += ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"]
    if shape.num_experts:
        args += ["--num-experts", str(shape.num_experts), "--moe-router-topk", str(shape.experts_per_token)]
        args += ["--moe-router-load-balancing-type", "seq_aux_loss"]
        args += ["--moe-aux-loss-coeff", str(shape.router_aux_loss)]
    return args


EXPORT = Export(
    "megatron-lm",
    ("megatron",),
    settings,
    render,
    lambda launch: not_expressible(launch.layout),
    environment=environment,
    program=program,
)
