"""torchtitan's configuration of a layout of the `megatron` engine: since 0.3 a Python module with a function.

Names and meanings are those of torchtitan 0.3.0, `torchtitan/config/configs.py`.
"""

from __future__ import annotations

from typing import Any

from search_spaces.layout import Layout
from service.answers.exports import (
    LEARNING_RATE,
    RANK_ORDER,
    TRAIN_STEPS,
    Export,
    Program,
    Variable,
    memory_environment,
    power_limit,
)
from trainables.launch import Launch

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
}
RECOMPUTATION = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
MODULE = "wattune_run"

TEXT = '''"""A run of torchtitan: --module {module} --config run."""

import os
from functools import partial

from torch import nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import (
    decoder_vocab_size,
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
)
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

MODEL = {model}
DRAWN = {{"weight": partial(nn.init.trunc_normal_, std=0.02)}}
ONES = {{"weight": nn.init.ones_}}


def norm():
    return RMSNorm.Config(normalized_shape=MODEL["dim"], param_init=ONES)


def block():
    dim = MODEL["dim"]
    rope = ComplexRoPE.Config(
        dim=MODEL["head_dim"], max_seq_len=MODEL["positions"], theta=MODEL["rope_theta"], scaling="none"
    )
    return Llama3TransformerBlock.Config(
        attention_norm=norm(),
        ffn_norm=norm(),
        attention=make_gqa_config(
            dim=dim,
            n_heads=MODEL["heads"],
            n_kv_heads=MODEL["kv_heads"],
            head_dim=MODEL["head_dim"],
            wqkv_param_init=DRAWN,
            wo_param_init=DRAWN,
            inner_attention=get_attention_config("flex"),
            fuse_qkv=True,
            rope=rope,
        ),
        feed_forward=make_ffn_config(
            dim=dim, hidden_dim=MODEL["hidden_dim"], w1_param_init=DRAWN, w2w3_param_init=DRAWN
        ),
    )


def model():
    dim, vocab = MODEL["dim"], MODEL["vocab_size"]
    return ModelSpec(
        name="llama3",
        flavor="wattune",
        model=Llama3Model.Config(
            dim=dim,
            vocab_size=vocab,
            enable_weight_tying=MODEL["enable_weight_tying"],
            tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=DRAWN),
            norm=norm(),
            lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=DRAWN),
            layers=[block() for _ in range(MODEL["layers"])],
        ),
        parallelize_fn=parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=Llama3StateDictAdapter,
    )


def run():
    spec = model()
    vocab = decoder_vocab_size(spec)
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocab)),
        hf_assets_path=os.environ.get("HF_ASSETS", "./assets"),
        dataloader=HuggingFaceTextDataLoader.Config(dataset=os.environ.get("DATASET", "c4")),
        optimizer=default_adamw(lr=float(os.environ.get("LEARNING_RATE", "3e-4"))),
        training=TrainingConfig(
            {training},
            steps=int(os.environ.get("TRAIN_STEPS", "1000")),
        ),
        parallelism=ParallelismConfig(
            {parallelism},
        ),
        activation_checkpoint={activation_checkpoint},
        compile=CompileConfig({compile}),
    )
'''


def settings(launch: Launch) -> dict[str, Any]:
    """Sections of the configuration, and the sizes of the model."""
    layout, shape = launch.layout, launch.training.model
    micro, accumulated = layout.micro_batch_size, layout.gradient_accumulation_steps
    pipelined = layout.pipeline_parallel_size > 1
    precision = "float32" if layout.precision == "fp32" else "bfloat16"
    return {
        "model": {
            "layers": shape.layers,
            "dim": shape.hidden,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_dim": shape.ffn_hidden,
            "vocab_size": shape.vocab,
            "positions": shape.max_sequence_length,
            "rope_theta": shape.rope_theta,
            "enable_weight_tying": shape.tie_embeddings,
        },
        "training": {
            # A pipeline cuts the local batch into its microbatches.
            "local_batch_size": micro * accumulated if pipelined else micro,
            "global_batch_size": layout.global_batch_size,
            "seq_len": launch.training.sequence_length,
            "mixed_precision_param": precision,
            "disable_cuda_graphs": True,  # as trials run
        },
        "parallelism": _degrees(layout) | (_pipeline(layout, shape.layers) if pipelined else {}),
        "activation_checkpoint": layout.recompute,
        "compile": {"enable": layout.compile, "enable_async_tensor_parallel": layout.async_tensor_parallel},
    }


def render(settings: dict[str, Any]) -> str:
    return TEXT.format(
        module=MODULE,
        model=repr(settings["model"]),
        training=_arguments(settings["training"], ",\n            "),
        parallelism=_arguments(settings["parallelism"], ",\n            "),
        activation_checkpoint=RECOMPUTATION[settings["activation_checkpoint"]],
        compile=_arguments(settings["compile"], ", "),
    )


def refusal(launch: Launch) -> str | None:
    layout, shape = launch.layout, launch.training.model
    if shape.family != "llama" or shape.num_experts:
        return "of the models that Wattune has, torchtitan has Llama alone, without experts"
    if layout.zero_stage == 0 and layout.context_parallel_size > 1:
        return "torchtitan shards over the GPUs of a sequence, which ZeRO-0 does not"
    if layout.shard_group_size % layout.context_parallel_size:
        return "torchtitan shards over all GPUs of a sequence"
    return None


def not_expressible(launch: Launch) -> dict[str, str]:
    layout = launch.layout
    otherwise = {}
    if layout.zero_stage in (1, 2) and layout.gradient_accumulation_steps > 1:
        otherwise["zero_stage"] = (
            "torchtitan gathers parameters and reduces gradients for every microbatch, and keeps parameters in between "
            "the forward and the backward pass alone"
        )
    if layout.precision == "fp8":
        otherwise["precision"] = "torchtitan is left at bf16; its Float8LinearConverter, of torchao, scales by rows"
    if layout.precision != "fp32" and layout.reduce_precision == "bf16":
        otherwise["reduce_precision"] = "torchtitan sums gradients in fp32"
    if layout.shard_ranks > 1 and not layout.overlap_grad_reduce:
        otherwise["overlap_grad_reduce"] = "torchtitan always reduces while the backward pass goes on"
    if layout.zero_stage and not layout.overlap_param_gather:
        otherwise["overlap_param_gather"] = "torchtitan always gathers ahead"
    if layout.rank_order is not None:
        otherwise["rank_order"] = RANK_ORDER
    otherwise["data"] = "torchtitan reads data sets of its own with a tokenizer: name them by DATASET and HF_ASSETS"
    return otherwise | power_limit(layout)


def program(launch: Launch) -> Program:
    return Program(
        ("-m", "torchtitan.train", "--module", MODULE, "--config", "run"),
        {f"{MODULE}.py": render(settings(launch))},
        (
            LEARNING_RATE,
            TRAIN_STEPS,
            Variable("DATASET", "a data set that torchtitan knows", "c4"),
            Variable("HF_ASSETS", "a folder with the tokenizer, as torchtitan downloads it"),
        ),
    )


def _degrees(layout: Layout) -> dict[str, Any]:
    """How often parameters are kept, over how many data-parallel ranks each copy is sharded, and the other sizes."""
    shards = layout.shard_group_size // layout.context_parallel_size if layout.zero_stage else 1
    return {
        "data_parallel_replicate_degree": layout.data_parallel_size // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if layout.zero_stage == 3 else "never",
        "tensor_parallel_degree": layout.tensor_parallel_size,
        "enable_sequence_parallel": layout.sequence_parallel,
        "context_parallel_degree": layout.context_parallel_size,
        "pipeline_parallel_degree": layout.pipeline_parallel_size,
    }


def _pipeline(layout: Layout, layers: int) -> dict[str, Any]:
    """The schedule, and by name what each stage holds."""
    parts = [[f"layers.{layer}" for layer in held] for held in layout.layers_by_stage(layers)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return {
        "pipeline_parallel_schedule": SCHEDULES[layout.pipeline_schedule],
        "pipeline_parallel_microbatch_size": layout.micro_batch_size,
        "module_fqns_per_model_part": parts,
    }


def _arguments(fields: dict[str, Any], between: str) -> str:
    return between.join(f"{name}={value!r}" for name, value in fields.items())


EXPORT = Export(
    "torchtitan",
    ("megatron",),
    settings,
    render,
    not_expressible,
    refusal,
    environment=memory_environment,
    program=program,
)
