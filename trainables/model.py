"""Decoder-only transformers in plain torch, built whole or as one pipeline stage, with a layout-independent start.

Every parameter is drawn from a generator seeded by its own name, so that each layout trains the very same model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from search_spaces.models import MOST_LOGITS, ModelShape
from trainables.moe import ONE_PROCESS, ExpertLayout, Experts, MoE, swiglu

Part = TypeVar("Part", bound=nn.Module)

INIT_STD = 0.02


def rotary_table(head_dim: int, positions: Tensor, theta: float) -> Tensor:
    """Cosines and sines of rotary positions (Su et al. 2021), fp32, shape (2, len(positions), head_dim)."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = torch.outer(positions.float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Apply rotary positions to x of shape (batch, heads, sequence, head_dim)."""
    cos, sin = table[0], table[1]
    left, right = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-right, left), dim=-1) * sin).type_as(x)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of whole sequences. q: (batch, heads, sequence, head_dim); k and v may have fewer heads."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """Causal self-attention, grouped-query where `kv_heads` is below `heads`. Heads may be a tensor-parallel share.

    `attend` may be replaced by attention over a sequence of which this rank holds only a part.
    """

    def __init__(self, shape: ModelShape, rotary: Tensor | None) -> None:
        super().__init__()
        bias = shape.family == "gpt"
        self.head_dim = shape.head_dim
        self.rotary = rotary  # a plain attribute: dtype casts of the module must leave it in fp32
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention
        self.wq = nn.Linear(shape.hidden, shape.query_width, bias=bias)
        self.wk = nn.Linear(shape.hidden, shape.key_width, bias=bias)
        self.wv = nn.Linear(shape.hidden, shape.key_width, bias=bias)
        self.wo = nn.Linear(shape.query_width, shape.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.wo(self.mixed(self.wq(x), self.wk(x), self.wv(x)))
        return output

    def mixed(self, *projected: Tensor) -> Tensor:
        """All between the products: queries, keys and values (batch, sequence, width of the heads) to the shape of the
        first."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected)
        if self.rotary is not None:
            q, k = rotate(q, self.rotary), rotate(k, self.rotary)
        return self.attend(q, k, v).transpose(1, 2).flatten(-2)


class SwiGLU(nn.Module):
    """Gated feed-forward network (Shazeer 2020)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn_hidden, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn_hidden, bias=False)
        self.down = nn.Linear(shape.ffn_hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(swiglu(self.gate(x), self.up(x)))
        return output


class GELU(nn.Module):
    """Feed-forward network of GPT-2 and GPT-3."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn_hidden)
        self.down = nn.Linear(shape.ffn_hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return output


def make_norm(shape: ModelShape) -> nn.Module:
    return nn.RMSNorm(shape.hidden, eps=1e-5) if shape.family == "llama" else nn.LayerNorm(shape.hidden)


def make_ffn(shape: ModelShape, expert_layout: ExpertLayout) -> nn.Module:
    if shape.num_experts:
        return MoE(shape, expert_layout)
    return SwiGLU(shape) if shape.family == "llama" else GELU(shape)


class Block(nn.Module):
    """One pre-norm transformer block: (batch, sequence, hidden) to the same shape."""

    def __init__(self, shape: ModelShape, rotary: Tensor | None, expert_layout: ExpertLayout) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape, rotary)
        self.ffn_norm = make_norm(shape)
        self.ffn = make_ffn(shape, expert_layout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.ffn(self.ffn_norm(x))
        return output


class Embedding(nn.Module):
    """Token ids (batch, sequence) to hidden states, with learned positions for `gpt`.

    `where`: positions of these tokens in their sequence, int64 (sequence,).
    """

    def __init__(self, shape: ModelShape, where: Tensor) -> None:
        super().__init__()
        self.where = where
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.max_sequence_length, shape.hidden) if shape.family == "gpt" else None

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(self.where.unsqueeze(0))
        return x


class Head(nn.Module):
    """Hidden states to logits (batch, sequence, vocab)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = make_norm(shape)
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(x))
        return logits


class Parts:
    """Makes the parts of a model of one shape on one device in fp32, each parameter drawn by its name.

    Parts are made one by one, so that an engine can shard each before it makes the next. `positions` are those of the
    tokens that the model will be given of each sequence, int64 (tokens,) on the device. Of a mixture of experts, parts
    keep the share that `expert_layout` gives this rank.
    """

    def __init__(
        self, shape: ModelShape, positions: Tensor, seed: int, expert_layout: ExpertLayout = ONE_PROCESS
    ) -> None:
        self.shape, self.positions, self.seed, self.device = shape, positions, seed, positions.device
        self.expert_layout = expert_layout
        self.rotary = rotary_table(shape.head_dim, positions, shape.rope_theta) if shape.family == "llama" else None

    def embedding(self) -> Embedding:
        return self._make("embedding", lambda: Embedding(self.shape, self.positions))

    def block(self, layer: int) -> Block:
        return self._make(f"blocks.{layer}", lambda: Block(self.shape, self.rotary, self.expert_layout))

    def head(self) -> Head:
        return self._make("head", lambda: Head(self.shape))

    def router(self, layer: int) -> nn.Linear:
        """What scores each expert of a mixture for a token: (..., hidden) to (..., num_experts)."""
        return self._make(
            f"blocks.{layer}.ffn.router", lambda: nn.Linear(self.shape.hidden, self.shape.num_experts, bias=False)
        )

    def expert(self, layer: int, expert: int) -> SwiGLU:
        """One expert of a mixture, whole."""
        return self._make(f"blocks.{layer}.ffn.experts.{expert}", lambda: SwiGLU(self.shape))

    def _make(self, name: str, build: Callable[[], Part]) -> Part:
        with self.device:
            module = build()
        for prefix, part in module.named_modules(prefix=name):
            if isinstance(part, Experts):
                self._fill(prefix, part)
                continue
            for key, parameter in part.named_parameters(recurse=False):
                self._draw(f"{prefix}.{key}", parameter)
        return module

    def _fill(self, name: str, experts: Experts) -> None:
        """Draw experts whole and one by one, and keep of each what the rank holds."""
        for index in experts.local:
            whole = self._make(f"{name}.{index}", lambda: SwiGLU(self.shape))
            experts.load(index, whole.gate.weight, whole.up.weight, whole.down.weight)

    @torch.no_grad()
    def _draw(self, name: str, parameter: Tensor) -> None:
        if name == "head.output.weight" and self.shape.tie_embeddings:
            name = "embedding.tokens.weight"  # the same table, should both ends of the model lie on different ranks
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        else:
            residual = name.endswith(("wo.weight", "down.weight"))  # scaled by depth as in GPT-2
            std = INIT_STD / math.sqrt(2 * self.shape.layers) if residual else INIT_STD
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))
            parameter.normal_(0.0, std, generator=generator)


def language_model_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in fp32 of logits (..., vocab) against labels (...)."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def compiled_loss() -> Callable[[Tensor, Tensor], Tensor]:
    """`language_model_loss`, compiled, over as few pieces of the tokens as keep each below `MOST_LOGITS`."""
    loss = torch.compile(language_model_loss)

    def in_pieces(logits: Tensor, labels: Tensor) -> Tensor:
        tokens = labels.numel()
        pieces = -(-logits.numel() // MOST_LOGITS)
        if pieces == 1:
            return loss(logits, labels)
        size = -(-tokens // pieces)
        pairs = zip(logits.flatten(0, -2).split(size), labels.flatten().split(size), strict=True)
        return torch.stack([loss(part, marks) * (marks.numel() / tokens) for part, marks in pairs]).sum()

    return in_pieces


class Stage(nn.Module):
    """A run of consecutive parts: the whole model, or what one pipeline stage holds of it."""

    def __init__(self, embedding: nn.Module | None, blocks: list[nn.Module], head: nn.Module | None) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states to hidden states; token ids (batch, sequence) on the first stage, logits from the last."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)
