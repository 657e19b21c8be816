"""Transformers' `TrainingArguments`, with FSDP, DeepSpeed or Accelerate's parallelism as a layout needs it.

Names and meanings are those of Transformers 5.23 and Accelerate 1.15. Beside the fields of `TrainingArguments`,
`parallelism_config` holds those of `accelerate.parallelism_config.ParallelismConfig`, of which the arguments take an
object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from search_spaces.layout import Layout
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
from service.answers.exports.deepspeed import render as as_json
from service.answers.programs import source
from service.answers.transformers_model import BLOCK_CLASSES, configuration_of, tokens_of
from trainables.engines.deepspeed import configuration as deepspeed
from trainables.launch import Launch


def settings(launch: Launch) -> dict[str, Any]:
    """The fields that the layout decides."""
    layout = launch.layout
    fields: dict[str, Any] = {
        "per_device_train_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "max_grad_norm": 1.0,
        "torch_compile": layout.compile,
    }
    return fields | FORMS[layout.engine].fields(launch)


def refusal(launch: Launch) -> str | None:
    layout = launch.layout
    if layout.pipeline_parallel_size > 1:
        return "the Trainer has no pipeline parallelism"
    if layout.expert_parallel_size > 1:
        return "the Trainer has no expert parallelism"
    return FORMS[layout.engine].refusal(layout)


def not_expressible(launch: Launch) -> dict[str, str]:
    layout = launch.layout
    otherwise = FORMS[layout.engine].otherwise(layout)
    if layout.recompute == "full":
        otherwise.pop("recompute", None)
    elif layout.recompute == "selective":
        otherwise["recompute"] = "the Trainer computes all of a block again, or nothing: here nothing"
    if layout.compile:
        otherwise["compile"] = "the Trainer compiles the whole model, not each block"
    return otherwise


def program(launch: Launch) -> Program:
    """A script around the Trainer, on a model that is drawn at random unless weights are given."""
    made = {"sequence_length": launch.training.sequence_length, **settings(launch)}
    split = made.get("parallelism_config", {}).get("tp_size", 1) > 1
    weights = "a folder with a model and its weights, which is how the Trainer splits tensors"
    chosen = Variable("MODEL", weights if split else "a folder with weights, nothing for random ones")
    model = chosen if split else Variable(chosen.name, chosen.meaning, "")
    return Program(
        ("train.py",),
        {
            "model.json": as_json(configuration_of(launch.training.model)),
            "training.yaml": render(made),
            "train.py": source("huggingface"),
            "tokens.py": source("tokens"),
        },
        (LEARNING_RATE, TRAIN_STEPS, tokens_of(launch), model, Variable("OUTPUT", "a folder for results", "output")),
    )


def render(settings: dict[str, Any]) -> str:
    return yaml.safe_dump(settings, sort_keys=False)


def _deepspeed(launch: Launch) -> dict[str, Any]:
    layout = launch.layout
    made = deepspeed.configuration(layout)
    fields: dict[str, Any] = {
        "bf16": made["bf16"]["enabled"],
        "activation_checkpointing": layout.recompute == "full",
        "deepspeed": made | {"gradient_clipping": 1.0},
    }
    if layout.context_parallel_size > 1:
        fields["parallelism_config"] = {"sp_size": layout.context_parallel_size, "sp_backend": "deepspeed"}
    return fields


def _deepspeed_otherwise(layout: Layout) -> dict[str, str]:
    said = ("context_parallel_size", "compile")
    return {name: how for name, how in deepspeed.not_expressible(layout).items() if name not in said}


def _torch(launch: Launch) -> dict[str, Any]:
    layout, block = launch.layout, BLOCK_CLASSES[configuration_of(launch.training.model)["model_type"]]
    fields: dict[str, Any] = {"bf16": layout.precision != "fp32"}
    if not layout.zero_stage:
        fields["activation_checkpointing"] = layout.recompute == "full"
    else:
        fields["fsdp"] = True
        fields["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": layout.zero_stage == 3,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [block],
            "activation_checkpointing": layout.recompute == "full",
        }
    copies = layout.shard_ranks // layout.shard_group_size if layout.zero_stage else 1
    sizes = {
        "dp_replicate_size": copies,
        "dp_shard_size": layout.shard_group_size // layout.context_parallel_size if layout.zero_stage else 1,
        "tp_size": layout.tensor_parallel_size,
        "cp_size": layout.context_parallel_size,
    }
    if max(copies, layout.tensor_parallel_size, layout.context_parallel_size) > 1:
        fields["parallelism_config"] = sizes
    return fields


def _torch_otherwise(layout: Layout) -> dict[str, str]:
    otherwise = {}
    if layout.zero_stage in (1, 2):
        otherwise["zero_stage"] = (
            "FSDP keeps parameters whole from the forward to the backward pass, and not between microbatches"
        )
    if layout.splits_sequence:
        otherwise["sequence_parallel"] = "the plan of the model's class decides; that of Llama does without"
    if layout.async_tensor_parallel:
        otherwise["async_tensor_parallel"] = "torch._inductor.config._micro_pipeline_tp in the program"
    if layout.precision == "fp8":
        otherwise["precision"] = "the Trainer is left at bf16; Accelerate has fp8 by torchao or Transformer Engine"
    if layout.precision != "fp32" and layout.reduce_precision == "bf16":
        otherwise["reduce_precision"] = "Accelerate's FSDP sums gradients as its mixed_precision_policy says"
    if not layout.overlap_grad_reduce:
        otherwise["overlap_grad_reduce"] = "DDP and FSDP always overlap"
    if layout.zero_stage and not layout.overlap_param_gather:
        otherwise["overlap_param_gather"] = "FSDP always gathers ahead"
    if layout.expandable_segments:
        otherwise["expandable_segments"] = EXPANDABLE_SEGMENTS
    if layout.rank_order is not None:
        otherwise["rank_order"] = RANK_ORDER
    return otherwise | power_limit(layout)


def _torch_refusal(layout: Layout) -> str | None:
    if layout.zero_stage == 0 and layout.shard_ranks > 1:
        if layout.context_parallel_size > 1:
            return "Accelerate has context parallelism with FSDP alone, which shards"
        if layout.tensor_parallel_size > 1:
            return "Accelerate does not join tensor parallelism and replicas that are not sharded"
    if layout.shard_group_size % layout.context_parallel_size:
        return "Accelerate shards over all GPUs of a sequence"
    return None


@dataclass(frozen=True)
class Form:
    """How the layouts of one engine are said: as `Export` has it, but for what goes for all of them."""

    fields: Callable[[Launch], dict[str, Any]]
    otherwise: Callable[[Layout], dict[str, str]]
    refusal: Callable[[Layout], str | None]


FORMS = {
    "megatron": Form(_torch, _torch_otherwise, _torch_refusal),
    "deepspeed": Form(_deepspeed, _deepspeed_otherwise, lambda layout: None),
}

EXPORT = Export(
    "huggingface",
    tuple(FORMS),
    settings,
    render,
    not_expressible,
    refusal,
    environment=memory_environment,
    program=program,
)
