"""Model shapes as Hugging Face Transformers has them."""

from __future__ import annotations

from typing import Any

from search_spaces.models import ModelShape
from service.answers.exports import Variable
from service.errors import InputError
from trainables.launch import Launch

BLOCKS = {"llama": "model.layers", "mixtral": "model.layers", "gpt2": "transformer.h"}
"""Where a model of a type keeps its blocks."""

BLOCK_CLASSES = {"llama": "LlamaDecoderLayer", "mixtral": "MixtralDecoderLayer", "gpt2": "GPT2Block"}
"""What a block of a model of a type is called."""


def configuration_of(shape: ModelShape) -> dict[str, Any]:
    """The configuration of a model with just the shape's parameters, as `AutoConfig.for_model` takes it.

    Raises `InputError` for a shape that Transformers has no model of.
    """
    if shape.family == "gpt":
        return _gpt2(shape)
    if not shape.num_experts and shape.hidden % shape.heads:
        raise InputError(
            f"the Llama of Transformers has no hidden {shape.hidden} that is no multiple of {shape.heads} heads"
        )
    model = {
        "model_type": "mixtral" if shape.num_experts else "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_hidden,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_sequence_length,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tie_embeddings,
    }
    if not shape.num_experts:
        return model
    return model | {
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "output_router_logits": True,
        "router_aux_loss_coef": shape.router_aux_loss,
    }


def tokens_of(launch: Launch) -> Variable:
    """The tokens that the program trains on: by default those of the search."""
    meaning = "synthetic, a .npy, a .bin, or the prefix of a Megatron-LM indexed dataset"
    return Variable("DATA", meaning, launch.training.data)


def _gpt2(shape: ModelShape) -> dict[str, Any]:
    if shape.kv_heads != shape.heads:
        raise InputError(f"the GPT-2 of Transformers has no grouped queries, as kv_heads {shape.kv_heads} asks for")
    if shape.query_width != shape.hidden:
        raise InputError(
            f"the GPT-2 of Transformers has heads as wide as hidden / heads, not head_dim {shape.head_dim}"
        )
    return {
        "model_type": "gpt2",
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.ffn_hidden,
        "vocab_size": shape.vocab,
        "n_positions": shape.max_sequence_length,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": shape.tie_embeddings,
    }
