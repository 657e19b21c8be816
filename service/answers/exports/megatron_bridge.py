"""A layout of the `megatron` engine as overrides of a Megatron-Bridge recipe: `SECTION.FIELD=VALUE`, as Hydra reads it.

Names are those of Megatron-Bridge 0.3.1's `ConfigContainer` and, for `model`, of Megatron-Core 0.16's
`TransformerConfig`. The recipe brings the model.
"""

from __future__ import annotations

import json
from typing import Any

from search_spaces.layout import Layout
from service.answers.exports import Export, megatron_lm
from trainables.launch import Launch

RECIPES = {"bf16": "bf16_mixed", "fp8": "bf16_with_fp8_current_scaling_mixed", "fp32": "null"}


def settings(launch: Launch) -> dict[str, dict[str, Any] | str]:
    """Sections of the configuration, and `mixed_precision`, which is the name of a recipe."""
    layout, length = launch.layout, launch.training.sequence_length
    sections: dict[str, dict[str, Any] | str] = {
        "model": {"seq_length": length, **_model(layout)},
        "dataset": {"sequence_length": length},
        "train": {"micro_batch_size": layout.micro_batch_size, "global_batch_size": layout.global_batch_size},
        "ddp": _sharding(layout),
    }
    if layout.zero_stage > 1:
        sections["dist"] = {"use_megatron_fsdp": True}
        sections["checkpoint"] = {"ckpt_format": "fsdp_dtensor"}
    sections["optimizer"] = {"use_distributed_optimizer": layout.zero_stage > 0}
    sections["mixed_precision"] = RECIPES[layout.precision]
    return sections


def render(settings: dict[str, dict[str, Any] | str]) -> str:
    lines = []
    for section, values in settings.items():
        if isinstance(values, str):
            lines.append(f"{section}={values}")
        else:
            lines += [f"{section}.{name}={_value(value)}" for name, value in values.items()]
    return "".join(f"{line}\n" for line in lines)


def not_expressible(launch: Launch) -> dict[str, str]:
    layout = launch.layout
    otherwise = megatron_lm.not_expressible(layout)
    if layout.precision != "fp32" and layout.reduce_precision == "bf16":
        # The recipe of the precision says so itself, after all overrides.
        otherwise["reduce_precision"] = "Megatron-Bridge sums as the recipe of the precision has it: in fp32 for bf16"
    return otherwise


def _model(layout: Layout) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tensor_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_parallel_size,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_parallel_size,
        "sequence_parallel": layout.splits_sequence,
        "tp_comm_overlap": layout.async_tensor_parallel,
    }
    if layout.stage_layers is not None:
        fields["pipeline_model_parallel_layout"] = megatron_lm.stages(layout.stage_layers)
    elif layout.virtual_pipeline_stages > 1:
        fields["virtual_pipeline_model_parallel_size"] = layout.virtual_pipeline_stages
    if layout.context_parallel_size > 1:
        fields["cp_comm_type"] = "all_gather"
    if layout.expert_parallel_size > 1:
        fields |= {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
    if layout.recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif layout.recompute == "selective":
        experts = ["moe_act"] if layout.expert_parallel_size > 1 else []
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["layernorm", *experts]}
    return fields


def _sharding(layout: Layout) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "use_distributed_optimizer": layout.zero_stage > 0,
        "overlap_grad_reduce": layout.overlap_grad_reduce,
        "overlap_param_gather": layout.overlap_grad_reduce and layout.overlap_param_gather and layout.zero_stage > 0,
    }
    if layout.zero_stage > 1:
        strategy = "optim_grads" if layout.zero_stage == 2 else "optim_grads_params"
        fields |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
    if layout.data_parallel_replicate_size > 1:
        fields["num_distributed_optimizer_instances"] = layout.data_parallel_replicate_size
    return fields


def _value(value: Any) -> str:
    """As Hydra's grammar of overrides has it; text that it would read otherwise in quotes."""
    if isinstance(value, str) and not value.isidentifier():
        return f"'{value}'"
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


EXPORT = Export(
    "megatron-bridge", ("megatron",), settings, render, not_expressible, environment=megatron_lm.environment
)
