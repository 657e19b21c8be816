"""The arguments of Megatron-LM's training scripts for a layout of the `megatron` engine. Needs no torch.

Names and meanings are those of `megatron/training/arguments.py` and `megatron/core/transformer/transformer_config.py`
at github.com/NVIDIA/Megatron-LM, commit d98e8a6.
"""

from __future__ import annotations

from search_spaces.layout import Layout
from service.answers.exports import Export


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
        otherwise["rank_order"] = "the order of the hosts and of CUDA_VISIBLE_DEVICES says which GPU takes which rank"
    if layout.expandable_segments:
        otherwise["expandable_segments"] = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
    return otherwise


def _pipeline(layout: Layout) -> list[str]:
    if layout.stage_layers is not None:
        stages = ["t" if layers == 1 else f"t*{layers}" for layers in layout.stage_layers]
        return ["--pipeline-model-parallel-layout", "E" + "|".join(stages) + "L"]
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


EXPORT = Export(("megatron",), "megatron_lm", arguments, not_expressible)
