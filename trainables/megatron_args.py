"""The arguments of Megatron-LM's training scripts for a layout of the `megatron` engine. Needs no torch.

Names and meanings are those of `megatron/training/arguments.py` and `megatron/core/transformer/transformer_config.py`
at github.com/NVIDIA/Megatron-LM, commit d98e8a6.
"""

from __future__ import annotations

from search_spaces.config import TrialConfig


def arguments(config: TrialConfig) -> list[str]:
    """All of the layout that Megatron-LM has arguments for; the rest is `not_expressible`."""
    args = [
        *("--tensor-model-parallel-size", str(config.tensor_parallel_size)),
        *("--pipeline-model-parallel-size", str(config.pipeline_parallel_size)),
        *("--context-parallel-size", str(config.context_parallel_size)),
        *("--expert-model-parallel-size", str(config.expert_parallel_size)),
        *("--micro-batch-size", str(config.micro_batch_size)),
        *("--global-batch-size", str(config.global_batch_size)),
    ]
    if config.sequence_parallel:
        args += ["--sequence-parallel"]
    if config.async_tensor_parallel:
        args += ["--tp-comm-overlap"]
    if config.context_parallel_size > 1:
        args += ["--cp-comm-type", "all_gather"]
    if config.expert_parallel_size > 1:
        args += ["--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"]
    return args + _pipeline(config) + _sharding(config) + _recompute(config) + _precision(config)


def not_expressible(config: TrialConfig) -> dict[str, str]:
    """What of the layout Megatron-LM does otherwise: field of `TrialConfig` -> how."""
    otherwise = {}
    if config.pipeline_parallel_size > 1 and config.pipeline_schedule not in ("1f1b", "interleaved_1f1b"):
        otherwise["pipeline_schedule"] = (
            f"Megatron-LM has 1F1B and its interleaved form, not {config.pipeline_schedule}"
        )
    if config.recompute == "selective":
        otherwise["recompute"] = "Megatron-LM recomputes norms, and of experts activations, but not rotary positions"
    if config.compile:
        otherwise["compile"] = "Megatron-LM fuses kernels with Transformer Engine instead"
    if config.rank_order is not None:
        otherwise["rank_order"] = "the order of the hosts and of CUDA_VISIBLE_DEVICES says which GPU takes which rank"
    return otherwise


def _pipeline(config: TrialConfig) -> list[str]:
    if config.stage_layers is not None:
        stages = ["t" if layers == 1 else f"t*{layers}" for layers in config.stage_layers]
        return ["--pipeline-model-parallel-layout", "E" + "|".join(stages) + "L"]
    if config.virtual_pipeline_stages > 1:
        return ["--num-virtual-stages-per-pipeline-rank", str(config.virtual_pipeline_stages)]
    return []


def _sharding(config: TrialConfig) -> list[str]:
    args = []
    if config.zero_stage:
        args += ["--use-distributed-optimizer"]
    if config.zero_stage > 1:
        strategy = "optim_grads" if config.zero_stage == 2 else "optim_grads_params"
        args += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy, "--ckpt-format", "fsdp_dtensor"]
    if config.data_parallel_replicate_size > 1:
        args += ["--num-distributed-optimizer-instances", str(config.data_parallel_replicate_size)]
    if config.overlap_grad_reduce:
        args += ["--overlap-grad-reduce"]
        if config.overlap_param_gather and config.zero_stage:
            args += ["--overlap-param-gather"]
    return args


def _recompute(config: TrialConfig) -> list[str]:
    if config.recompute == "full":
        return ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    if config.recompute == "selective":
        experts = ["moe_act"] if config.expert_parallel_size > 1 else []
        return ["--recompute-granularity", "selective", "--recompute-modules", "layernorm", *experts]
    return []


def _precision(config: TrialConfig) -> list[str]:
    if config.precision == "fp32":
        return []
    fp8 = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"] if config.precision == "fp8" else []
    reduce = ["--grad-reduce-in-bf16"] if config.reduce_precision == "bf16" else []
    return ["--bf16", *fp8, *reduce]
