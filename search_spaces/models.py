"""Model shapes: decoder-only transformers as the papers describe them, with exact parameter counts and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

MOST_LOGITS = 2**31
"""Beyond these kernels count in 64 bits, and a compiled loss is computed in pieces."""

FAMILIES = ("llama", "gpt")


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder-only transformer.

    `family` chooses the block: `llama` (RMSNorm, rotary positions, SwiGLU, no biases; Touvron et al. 2023) or `gpt`
    (LayerNorm, learned positions up to `max_sequence_length`, GELU, biases; Brown et al. 2020).
    `kv_heads` below `heads` is grouped-query attention (Ainslie et al. 2023). `rope_theta` is the rotary base.
    `head_dim` is the width of a head, `hidden` / `heads` if left out; a copy of the shape keeps it.
    With `num_experts` the feed-forward network is that many SwiGLU experts of width `ffn_hidden`, of which a router
    chooses `experts_per_token` for each token (Jiang et al. 2024); `router_aux_loss` weighs the loss that balances them
    (Fedus et al. 2021), computed for each sequence.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    max_sequence_length: int
    tie_embeddings: bool = False
    rope_theta: float = 10_000.0
    num_experts: int = 0
    experts_per_token: int = 2
    router_aux_loss: float = 0.02
    head_dim: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)

    @property
    def query_width(self) -> int:
        """Of all queries of a token, and of what attention gives."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Of all keys of a token, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def expert_parameters(self) -> int:
        """Parameters of one SwiGLU network."""
        return 3 * self.hidden * self.ffn_hidden

    @property
    def block_parameters(self) -> int:
        """Parameters of one transformer block."""
        attention = 2 * self.hidden * (self.query_width + self.key_width)
        if self.num_experts:
            return attention + self.num_experts * (self.expert_parameters + self.hidden) + 2 * self.hidden
        if self.family == "llama":
            return attention + self.expert_parameters + 2 * self.hidden
        biases = self.query_width + 2 * self.key_width + self.ffn_hidden + 2 * self.hidden
        return attention + 2 * self.hidden * self.ffn_hidden + biases + 4 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters outside the blocks: token and position tables, final norm, output projection if untied."""
        tables = self.vocab * self.hidden * (1 if self.tie_embeddings else 2)
        if self.family == "llama":
            return tables + self.hidden
        return tables + self.max_sequence_length * self.hidden + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that take part in the forward pass of one token."""
        idle = max(0, self.num_experts - self.experts_per_token)
        return self.parameters - self.layers * idle * self.expert_parameters

    def flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs of training on one token, forward and backward, recomputation not counted.

        PaLM (Chowdhery et al. 2022), appendix B: 6 N + 12 L H Q T, with N the parameters that take part in a token's
        matrix multiplications (the output projection does; lookup tables and experts not chosen do not), L layers, H Q
        the attention width, T the sequence length. The attention term is not halved for causality, as there.
        """
        lookups = 0 if self.tie_embeddings else self.vocab * self.hidden
        if self.family == "gpt":
            lookups += self.max_sequence_length * self.hidden
        return 6.0 * (self.active_parameters - lookups) + 12.0 * self.layers * self.query_width * sequence_length


def _gpt3(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape("gpt", layers, hidden, heads, heads, 4 * hidden, 51_200, 2048, tie_embeddings=True)


def _llama3(layers: int, hidden: int, heads: int, ffn_hidden: int, tie: bool = False) -> ModelShape:
    return ModelShape("llama", layers, hidden, heads, 8, ffn_hidden, 128_256, 131_072, tie, 500_000.0)


def _mixtral(layers: int, hidden: int, heads: int, ffn_hidden: int, positions: int, aux_loss: float) -> ModelShape:
    return ModelShape(
        "llama", layers, hidden, heads, 8, ffn_hidden, 32_000, positions, False, 1_000_000.0, 8, 2, aux_loss
    )


PRESETS: dict[str, ModelShape] = {
    # Brown et al. 2020, table 2.1; vocabulary padded to 51 200 as Megatron-LM does. The 30B shape, of no paper, is the
    # usual one between the 13B and the 175B.
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-30b": _gpt3(48, 7168, 56),
    "gpt3-175b": _gpt3(96, 12_288, 96),
    # Grattafiori et al. 2024, table 3; the 1B shape is Llama 3.2's. There is no Llama-3-30B: the study of arXiv
    # 2509.10371 scaled one down without giving its shape; here it is the 70B's width at the 8B's depth.
    "llama3-1b": _llama3(16, 2048, 32, 8192, tie=True),
    "llama3-8b": _llama3(32, 4096, 32, 14_336),
    "llama3-30b": _llama3(32, 8192, 64, 28_672),
    "llama3-70b": _llama3(80, 8192, 64, 28_672),
    "llama3-405b": _llama3(126, 16_384, 128, 53_248),
    # Jiang et al. 2024 (8x7B) and the configurations that Mistral AI published with the weights.
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14_336, 32_768, 0.02),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16_384, 65_536, 0.001),
    # Small enough to train in milliseconds on two CPU cores, with the byte tokens of `wattune data`.
    "tiny-llama": ModelShape("llama", 4, 64, 4, 2, 176, 512, 512),
    "tiny-moe": ModelShape("llama", 4, 64, 4, 2, 96, 512, 512, num_experts=4),
    "tiny-gpt": ModelShape("gpt", 4, 64, 4, 4, 256, 512, 512),
}
