from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from search_spaces.models import PRESETS, ModelShape
from trainables.model import INIT_STD, Attention, Parts, Stage, compiled_loss, language_model_loss, rotary_table, rotate

CPU = torch.device("cpu")
LLAMA = ModelShape("llama", 2, 64, 4, 2, 176, 512, 64)
GPT = ModelShape("gpt", 2, 64, 4, 4, 256, 512, 64)


def whole(shape: ModelShape, sequence_length: int = 16, seed: int = 0) -> Stage:
    parts = Parts(shape, torch.arange(sequence_length), seed)
    return Stage(parts.embedding(), [parts.block(layer) for layer in range(shape.layers)], parts.head())


def test_rotary_turns_pairs_by_the_position_times_the_frequency() -> None:
    head_dim, length, theta = 8, 5, 100.0
    x = torch.randn(2, 3, length, head_dim, dtype=torch.float64).float()
    turned = rotate(x, rotary_table(head_dim, torch.arange(length), theta))
    half = head_dim // 2
    for position in range(length):
        for pair in range(half):
            angle = position * theta ** (-2 * pair / head_dim)
            a, b = x[..., position, pair], x[..., position, pair + half]
            expected = torch.stack(
                (a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle))
            )
            found = torch.stack((turned[..., position, pair], turned[..., position, pair + half]))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    table = rotary_table(16, torch.arange(32), 10_000.0)
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    rotated_q, rotated_k = rotate(q.expand(1, 1, 32, 16), table), rotate(k.expand(1, 1, 32, 16), table)
    scores = (rotated_q @ rotated_k.transpose(-1, -2))[0, 0]
    for distance in (0, 1, 7):
        along = torch.diagonal(scores, distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)


def test_rotation_keeps_low_precision_but_computes_in_fp32() -> None:
    table = rotary_table(16, torch.arange(8), 10_000.0)
    x = torch.randn(1, 1, 8, 16)
    assert rotate(x.bfloat16(), table).dtype == torch.bfloat16
    torch.testing.assert_close(rotate(x.bfloat16(), table), rotate(x.bfloat16().float(), table).bfloat16())


def attention_by_hand(attention: Attention, shape: ModelShape, x: Tensor) -> Tensor:
    """Head by head, position by position, from the definition."""
    length, width = x.shape[0], shape.head_dim
    q, k, v = (linear(x).unflatten(-1, (-1, width)) for linear in (attention.wq, attention.wk, attention.wv))
    outs = []
    for head in range(shape.heads):
        shared = head // (shape.heads // shape.kv_heads)
        query, key, value = q[:, head], k[:, shared], v[:, shared]
        if attention.rotary is not None:
            query, key = (rotate(t[None, None], attention.rotary)[0, 0] for t in (query, key))
        rows = []
        for position in range(length):
            scores = key[: position + 1] @ query[position] / math.sqrt(width)
            rows.append(torch.softmax(scores, 0) @ value[: position + 1])
        outs.append(torch.stack(rows))
    return attention.wo(torch.cat(outs, -1))


@pytest.mark.parametrize(
    "shape",
    [LLAMA, GPT, replace(LLAMA, head_dim=24), replace(GPT, head_dim=8)],
    ids=["grouped-query with rotary", "multi-head", "wide heads", "narrow heads"],
)
def test_attention_follows_its_definition(shape: ModelShape) -> None:
    attention = Parts(shape, torch.arange(12), 0).block(0).attention
    x = torch.randn(2, 12, shape.hidden)
    expected = torch.stack([attention_by_hand(attention, shape, row) for row in x])
    torch.testing.assert_close(attention(x), expected, rtol=1e-4, atol=1e-5)


def test_no_position_sees_what_follows() -> None:
    model = whole(LLAMA)
    tokens = torch.randint(512, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 512
    torch.testing.assert_close(model(tokens)[:, :9], model(changed)[:, :9])
    assert not torch.allclose(model(tokens)[:, 9], model(changed)[:, 9])


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt"])
def test_parameters_are_as_many_as_the_shape_says(name: str) -> None:
    shape = PRESETS[name]
    assert sum(parameter.numel() for parameter in whole(shape).parameters()) == shape.parameters


def test_initial_weights_depend_on_name_and_seed_alone() -> None:
    forwards = dict(whole(LLAMA).named_parameters())
    parts = Parts(LLAMA, torch.arange(16), 0)
    torch.manual_seed(99)
    backwards = Stage(None, [], parts.head())
    last = dict(parts.block(1).named_parameters())
    assert all(torch.equal(forwards[name], parameter) for name, parameter in backwards.named_parameters())
    assert all(torch.equal(forwards[f"blocks.1.{name}"], parameter) for name, parameter in last.items())

    other_seed = dict(whole(LLAMA, seed=1).named_parameters())
    drawn = [name for name in forwards if "norm" not in name]
    assert not any(torch.equal(forwards[name], other_seed[name]) for name in drawn)
    same_shape = [name for name in drawn if forwards[name].shape == (64, 64)]
    assert len(same_shape) == 4  # wq and wo of two blocks
    assert not any(torch.equal(forwards[a], forwards[b]) for a in same_shape for b in same_shape if a < b)


def test_initial_weights_have_the_spread_of_gpt2() -> None:
    model = whole(GPT)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.all(parameter == 0), name
        elif "norm" in name:
            assert torch.all(parameter == 1), name
        else:
            residual = name.endswith(("wo.weight", "down.weight"))
            std = INIT_STD / math.sqrt(2 * GPT.layers) if residual else INIT_STD
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name


def test_loss_is_the_mean_cross_entropy_in_fp32() -> None:
    logits, labels = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
    log_probabilities = torch.log_softmax(logits, -1)
    expected = -torch.stack([log_probabilities[b, t, labels[b, t]] for b in range(2) for t in range(5)]).mean()
    torch.testing.assert_close(language_model_loss(logits, labels), expected)
    assert language_model_loss(logits.bfloat16(), labels).dtype == torch.float32


@pytest.mark.parametrize("most", [*(pytest.param(most, marks=pytest.mark.slow) for most in (1000, 60)), 50])
def test_a_compiled_loss_in_pieces_is_the_whole_one(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainables.model.MOST_LOGITS", most)  # one piece of 10 tokens, two of 5, three of 4, 4 and 2
    logits, labels = torch.randn(2, 5, 11, requires_grad=True), torch.randint(11, (2, 5))
    expected = language_model_loss(logits, labels)
    (gradient,) = torch.autograd.grad(expected, logits)
    loss = compiled_loss()(logits, labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], gradient)


def test_stages_in_a_row_are_the_whole_model() -> None:
    model = whole(LLAMA)
    assert model.embedding is not None
    parts = Parts(LLAMA, torch.arange(16), 0)
    blocks: list[nn.Module] = [parts.block(layer) for layer in range(2)]
    first, last = Stage(parts.embedding(), blocks[:1], None), Stage(None, blocks[1:], parts.head())
    tokens = torch.randint(512, (2, 16))
    torch.testing.assert_close(last(first(tokens)), model(tokens))
