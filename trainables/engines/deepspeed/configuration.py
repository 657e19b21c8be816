"""DeepSpeed's JSON configuration (deepspeed.ai/docs/config-json) of a layout. Needs neither torch nor DeepSpeed."""

from __future__ import annotations

from typing import Any

from search_spaces.engines import engine_of
from search_spaces.layout import Layout


def configuration(layout: Layout) -> dict[str, Any]:
    """All of the layout that `deepspeed.initialize(config=...)` takes; the rest is `not_expressible`."""
    bf16 = layout.precision == "bf16"
    autocast = engine_of(layout).autocasts(layout)
    stage = layout.zero_stage
    if bf16 and layout.shard_ranks == 1:
        stage = 1  # one shard, which is all: for the sake of its fp32 sums
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "bf16": {"enabled": bf16 and not autocast},
        "communication_data_type": layout.reduce_precision,
        "zero_optimization": _zero(layout, stage),
    }
    if autocast:
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif bf16:
        settings["data_types"] = {"grad_accum_dtype": layout.reduce_precision}
        # Gradients go as soon as they are summed, rather than stay until the next ones come.
        settings["bf16"]["immediate_grad_update"] = True
    if layout.offload_optimizer:
        settings["zero_force_ds_cpu_optimizer"] = False  # torch's own AdamW has a fused form for CPUs, too
    if layout.tensor_parallel_size > 1:
        settings["tensor_parallel"] = {"autotp_size": layout.tensor_parallel_size}
    return settings


def not_expressible(layout: Layout) -> dict[str, str]:
    """What of the layout the training program itself must say: field of `Layout` -> how."""
    said = {
        "pipeline_parallel_size": f"deepspeed.pipe.PipelineModule(num_stages={layout.pipeline_parallel_size})",
        "context_parallel_size": "deepspeed.sequence.layer.DistributedAttention over a process group of "
        f"{layout.context_parallel_size} ranks, which DeepSpeed itself must take for data-parallel ones",
        "expert_parallel_size": f"deepspeed.moe.layer.MoE(ep_size={layout.expert_parallel_size}, drop_tokens=False)",
        "recompute": f"torch.utils.checkpoint around each block ({layout.recompute})",
        "compile": "module.compile() on each block",
        "expandable_segments": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment",
        "rank_order": "the order of the hosts and of CUDA_VISIBLE_DEVICES",
        "power_limit_w": f"nvidia-smi --power-limit={layout.power_limit_w}, as root, on each node before the run",
    }
    plain = Layout(layout.engine, layout.num_gpus, layout.global_batch_size)
    return {field: how for field, how in said.items() if getattr(layout, field) != getattr(plain, field)}


def _zero(layout: Layout, stage: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"stage": stage}
    if stage == 0:
        return settings
    settings |= {
        "overlap_comm": layout.overlap_grad_reduce,
        "contiguous_gradients": True,
        "reduce_bucket_size": layout.bucket_size,
    }
    if stage == 3:
        settings["stage3_prefetch_bucket_size"] = layout.bucket_size if layout.overlap_param_gather else 0
        # Its own linear layers, which keep no gathered weights for the backward pass, are another graph for each block,
        # of which torch 2.11 compiles eight. A compiled block's keep none as they are.
        settings["memory_efficient_linear"] = not layout.compile
    else:
        settings["allgather_bucket_size"] = layout.bucket_size
    if layout.offload_optimizer:
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return settings
