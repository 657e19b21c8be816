"""DeepSpeed's JSON configuration (deepspeed.ai/docs/config-json) of a layout. Needs neither torch nor DeepSpeed."""

from __future__ import annotations

from typing import Any

from search_spaces.config import TrialConfig


def configuration(config: TrialConfig) -> dict[str, Any]:
    """All of the layout that `deepspeed.initialize(config=...)` takes; the rest is `not_expressible`."""
    bf16 = config.precision == "bf16"
    # Without ZeRO, DeepSpeed sums the microbatches' gradients in bf16 and takes a first step of Adam on no gradients.
    # Torch's autocast has fp32 weights and gradients instead.
    autocast = bf16 and config.zero_stage == 0 and config.shard_ranks > 1
    stage = config.zero_stage
    if bf16 and config.shard_ranks == 1:
        stage = 1  # one shard, which is all: for the sake of its fp32 sums
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "bf16": {"enabled": bf16 and not autocast},
        "communication_data_type": config.reduce_precision,
        "zero_optimization": _zero(config, stage),
    }
    if autocast:
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif bf16:
        settings["data_types"] = {"grad_accum_dtype": config.reduce_precision}
    if config.offload_optimizer:
        settings["zero_force_ds_cpu_optimizer"] = False  # torch's own AdamW has a fused form for CPUs, too
    if config.tensor_parallel_size > 1:
        settings["tensor_parallel"] = {"autotp_size": config.tensor_parallel_size}
    return settings


def not_expressible(config: TrialConfig) -> dict[str, str]:
    """What of the layout the training program itself must say: field of `TrialConfig` -> how."""
    said = {
        "pipeline_parallel_size": f"deepspeed.pipe.PipelineModule(num_stages={config.pipeline_parallel_size})",
        "context_parallel_size": "deepspeed.sequence.layer.DistributedAttention over a process group of "
        f"{config.context_parallel_size} ranks, which DeepSpeed itself must take for data-parallel ones",
        "expert_parallel_size": f"deepspeed.moe.layer.MoE(ep_size={config.expert_parallel_size}, drop_tokens=False)",
        "recompute": f"torch.utils.checkpoint around each block ({config.recompute})",
        "compile": "module.compile() on each block",
        "rank_order": "the order of the hosts and of CUDA_VISIBLE_DEVICES",
    }
    plain = TrialConfig(config.engine, config.num_gpus, config.global_batch_size)
    return {field: how for field, how in said.items() if getattr(config, field) != getattr(plain, field)}


def _zero(config: TrialConfig, stage: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"stage": stage}
    if stage == 0:
        return settings
    settings |= {
        "overlap_comm": config.overlap_grad_reduce,
        "contiguous_gradients": True,
        "reduce_bucket_size": config.bucket_size,
    }
    if stage == 3:
        settings["stage3_prefetch_bucket_size"] = config.bucket_size if config.overlap_param_gather else 0
    else:
        settings["allgather_bucket_size"] = config.bucket_size
    if config.offload_optimizer:
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return settings
