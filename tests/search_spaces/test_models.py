"""Parameter and FLOP counts against the papers, and against the model that is really built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.judge.published import QWEN3_30B, QWEN3_235B
from search_spaces.models import PRESETS, ModelShape
from trainables.model import Parts


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("llama3-1b", 1_235_814_400),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
    ],
)
def test_sizes_as_published(preset: str, parameters: int) -> None:
    """The numbers of parameters of the weights that Meta and Mistral AI published."""
    assert PRESETS[preset].parameters == parameters


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (ModelShape("llama", 40, 5120, 32, 8, 14_336, 131_072, 131_072, head_dim=128), 12_247_782_400),
        # Of which the norms of queries and keys, 128 wide each, are not modelled.
        (QWEN3_30B, 30_532_122_624 - 48 * 2 * 128),
        (QWEN3_235B, 235_093_634_560 - 94 * 2 * 128),
    ],
    ids=["Mistral-Nemo", "Qwen3-30B-A3B", "Qwen3-235B-A22B"],
)
def test_sizes_of_models_with_wide_heads_as_published(shape: ModelShape, parameters: int) -> None:
    assert shape.parameters == parameters


def test_heads_are_as_wide_as_is_said_or_as_share_the_model() -> None:
    plain = PRESETS["tiny-llama"]
    assert (plain.head_dim, plain.query_width, plain.key_width) == (16, 64, 32)
    assert replace(plain, head_dim=16) == plain
    assert ModelShape(**{name: value for name, value in vars(plain).items() if name != "head_dim"}) == plain
    wide = replace(plain, head_dim=24)
    assert (wide.query_width, wide.key_width) == (96, 48)


@pytest.mark.parametrize(("preset", "billions"), [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.0)])
def test_active_parameters_as_published(preset: str, billions: float) -> None:
    """Jiang et al. 2024 for 8x7B, Mistral AI's announcement for 8x22B, to their digits."""
    assert PRESETS[preset].active_parameters / 1e9 == pytest.approx(billions, abs=0.3)


def test_all_parameters_of_a_dense_model_are_active() -> None:
    for preset in ("llama3-8b", "gpt3-13b"):
        assert PRESETS[preset].active_parameters == PRESETS[preset].parameters


def test_gpt3_175b_as_megatron_lm_builds_it() -> None:
    """96 layers 12 288 wide, 51 200 rows of tokens and 2048 of positions, tied."""
    assert PRESETS["gpt3-175b"].parameters == 174_615_846_912


def test_the_30b_shapes_are_about_that() -> None:
    for preset in ("gpt3-30b", "llama3-30b"):
        assert PRESETS[preset].parameters / 1e9 == pytest.approx(30.0, rel=0.05)


@pytest.mark.parametrize("preset", ["gpt3-1.3b", "gpt3-13b", "gpt3-30b", "gpt3-175b"])
def test_gpt3_sizes(preset: str) -> None:
    """Narayanan et al. 2021, equation 2: 12 l h^2 (1 + 13 / 12h + (V + s) / 12lh); it leaves out the final norm."""
    shape = PRESETS[preset]
    layers, hidden, tables = shape.layers, shape.hidden, shape.vocab + shape.max_sequence_length
    final_norm = 2 * hidden
    assert shape.parameters == 12 * layers * hidden**2 + 13 * layers * hidden + tables * hidden + final_norm


@pytest.mark.parametrize(
    ("preset", "billions"), [("gpt3-1.3b", 1.3), ("gpt3-13b", 13.0), ("gpt3-30b", 30.0), ("gpt3-175b", 175.0)]
)
def test_gpt3_names_tell_the_size(preset: str, billions: float) -> None:
    assert PRESETS[preset].parameters / 1e9 == pytest.approx(billions, rel=0.02)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    family = draw(st.sampled_from(["llama", "gpt"]))
    experts = draw(st.sampled_from([0, 1, 4])) if family == "llama" else 0
    return ModelShape(
        family=family,
        layers=draw(st.integers(1, 3)),
        hidden=heads * 2 * draw(st.integers(1, 4)),
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=draw(st.integers(1, 40)),
        vocab=draw(st.integers(1, 50)),
        max_sequence_length=draw(st.integers(8, 20)),
        tie_embeddings=draw(st.booleans()),
        num_experts=experts,
        experts_per_token=min(2, experts or 2),
        head_dim=draw(st.sampled_from([None, 2, 4, 10])),  # type: ignore[arg-type]
    )


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_counts_equal_the_model_that_is_built(shape: ModelShape) -> None:
    parts = Parts(shape, torch.arange(8), 0)
    embedding, blocks, head = parts.embedding(), [parts.block(i) for i in range(shape.layers)], parts.head()
    if shape.tie_embeddings:
        head.output.weight = embedding.tokens.weight
    whole = nn.ModuleList([embedding, *blocks, head])
    assert shape.parameters == sum(parameter.numel() for parameter in whole.parameters())
    assert shape.block_parameters == sum(parameter.numel() for parameter in blocks[0].parameters())
    unused = shape.num_experts - shape.experts_per_token if shape.num_experts else 0
    assert shape.parameters - shape.active_parameters == shape.layers * unused * shape.expert_parameters


def test_flops_of_llama3_8b_worked_by_hand() -> None:
    """PaLM, appendix B: 6 (8 030 261 248 - 128 256 x 4096 of the token table) + 12 x 32 x 4096 x 8192."""
    assert PRESETS["llama3-8b"].flops_per_token(8192) == 45_029_548_032 + 12_884_901_888


@pytest.mark.parametrize("preset", ["gpt3-1.3b", "gpt3-13b", "gpt3-175b"])
def test_flops_agree_with_the_megatron_paper(preset: str) -> None:
    """Narayanan et al. 2021, equation 3, with 72 for 96 as nothing is recomputed; no norms, no biases."""
    shape, sequence = PRESETS[preset], 2048
    layers, hidden = shape.layers, shape.hidden
    head = shape.vocab / (12 * layers * hidden)
    expected = 72 * layers * hidden**2 * (1 + sequence / (6 * hidden) + head)
    assert shape.flops_per_token(sequence) == pytest.approx(expected, rel=1e-3)


def test_flops_of_mixtral_8x7b_worked_by_hand() -> None:
    """Of each block's eight experts of 3 x 4096 x 14 336 two count, and the router whole; the token table does not."""
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14_336 + 8 * 4096 + 2 * 4096
    matmuls = 32 * block + 32_000 * 4096 + 4096
    assert PRESETS["mixtral-8x7b"].flops_per_token(4096) == 6 * matmuls + 12 * 32 * 4096 * 4096


def test_flops_of_wide_heads_worked_by_hand() -> None:
    """Of Mistral-Nemo: the attention term goes by 32 x 128, what heads are wide together, and not by 5120."""
    nemo = ModelShape("llama", 40, 5120, 32, 8, 14_336, 131_072, 131_072, head_dim=128)
    matmuls = nemo.parameters - 131_072 * 5120
    assert nemo.flops_per_token(8192) == 6 * matmuls + 12 * 40 * 4096 * 8192


def test_tying_the_embeddings_saves_parameters_but_no_flops() -> None:
    untied = PRESETS["tiny-llama"]
    tied = ModelShape(**{**vars(untied), "tie_embeddings": True})
    assert untied.parameters - tied.parameters == untied.vocab * untied.hidden
    assert untied.flops_per_token(128) == tied.flops_per_token(128)
