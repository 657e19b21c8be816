"""Programs of others, of which layouts were measured and published, and the `megatron` engine as it was when layouts of
it were measured: no engine runs them. A trainer says if its program is one of them (`Trainer.predicted_as`).

Each says only in what it differs from the `megatron` engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from search_spaces.attention import Kernel
from search_spaces.coefficients import Coefficients
from search_spaces.engines.base import Condition, EngineFacts, Rule, Same, States, flash_2
from search_spaces.engines.megatron import Megatron
from search_spaces.experts import FUSED, Around
from search_spaces.hardware import Accelerator
from search_spaces.layout import Layout
from search_spaces.parameters import Held

TRITON_FLASH = 1.4, 2.0
"""Time of FlashAttention in Triton in that of FlashAttention-2: 1.3 to 1.5 forward, "around" 2 backward (Dao 2023,
section 4.1)."""

FP8_ALONE = 1.8 / 1.5
"""Speed of products in fp8 alone, 1.8 times that in bf16 (benchmarks/results/products_1xh100.txt), in what the
`megatron` engine attains with its casts, each microbatch's of weights among them. Transformer Engine casts these in a
step's first microbatch, and torchao once a step, before they are gathered."""

FLASH_1 = 2.0, 2.0
"""Time of the first FlashAttention in that of the second, which is "around 2x" as fast (Dao 2023, abstract)."""

FUSED_LOSS_TRAFFIC = 6
"""Bytes that FlashAttention's cross-entropy moves for a logit in bf16: it is read forward and backward, and its
gradient takes its place (`flash_attn/losses/cross_entropy.py`)."""

COMPLEX_ROTARY = 20 / 3
"""Values of rotary positions as complex numbers, for which torch compiles nothing (pytorch/torchtitan, issue 15): each
way 20 bytes, of a copy in fp32, the product, and a copy in bf16."""

OF_DTENSORS = {"tensor": (0.0, 3.9), "sequence": (0.0, 0.0)}
"""Milliseconds of the CPU more for a block that computes with DTensors, eager and compiled, as `launched_more_ms`."""

EAGER_DTENSORS_S = 8.5e-3
"""Seconds of the CPU more for an eager one, whose recomputation takes as much more as that of fp8 does."""

BUCKET = 2**29
"""Gradients of one of InternEvo's sums."""

TENSORS = 9
"""Of a block of InternLM: two products of attention with biases, three of the feed-forward network, two norms."""


def _of_dtensors_s(layout: Layout) -> float:
    eager = layout.tensor_parallel_size > 1 and not layout.compile and layout.precision != "fp8"
    return EAGER_DTENSORS_S if eager else 0.0


def _in_8_bits(whole: float, layout: Layout, layers: int, held: Held) -> float:
    """Gathered bytes, where blocks are cast to fp8 before they are gathered."""
    return whole - (layout.width - 1) * layers * held.block if layout.precision == "fp8" else whole


class EarlierMegatron(Megatron):
    """The `megatron` engine as it was. Before 2026-11-24 context-parallel ranks had FlashAttention-2 and, for it, a key
    and a value for each head of queries, on Hopper, too, and their blocks were compiled in parts. Before 2026-11-27
    blocks that ranks split computed with DTensors. Before 2026-11-29 tokens went to the experts that routers chose."""

    name = "megatron-earlier"
    routes_evenly = False
    copies_one_sequence = True
    gathers_beside = False
    eager_copies = EngineFacts.eager_copies
    launched_more_ms: ClassVar[Mapping[str, tuple[float, float]]] = {
        **Megatron.launched_more_ms,
        "context": (2.0, 2.9),
        **OF_DTENSORS,
    }

    def launch_s(self, layout: Layout, calibration: Coefficients) -> float:
        return super().launch_s(layout, calibration) + _of_dtensors_s(layout)

    def attention(self, accelerator: Accelerator, is_square: bool) -> Kernel:
        return super().attention(accelerator, is_square) if is_square else flash_2(accelerator)


class MegatronLM(Megatron):
    """Megatron-LM with Transformer Engine, and what is built on them.

    The last pipeline stages and the first may be without blocks, pipelines run with any number of microbatches
    (`megatron/core/pipeline_parallel/schedules.py`), and fp8 goes with all else (Transformer Engine).
    """

    name = "megatron-lm"
    routes_evenly = False
    same: ClassVar[Mapping[str, Same]] = {}
    rules: ClassVar[Mapping[str, tuple[Rule, ...]]] = {}
    fp8_experts, fp8_gain = True, FP8_ALONE
    gathers_in_place = True  # parameters are views of a buffer (megatron/core/distributed/param_and_grad_buffer.py)
    sequence_first = True  # (sequence, batch, hidden) in megatron/core/transformer
    fills_pipelines = False
    empty_ends = True
    rings_keys = True
    gathers_again = True  # Korthikanti et al. 2022, section 4.2.2
    splits_sends = True  # Narayanan et al. 2021, section 4.1
    beside_messages: ClassVar[Mapping[str, float]] = {}  # Korthikanti et al. 2022 are foretold within 4% without
    releases_gradients = False
    shared_loss_bytes = 10  # a copy in fp32, in which all is computed in place, and logits and gradients
    shared_loss_traffic = 40
    launched_more_ms: ClassVar[Mapping[str, tuple[float, float]]] = {
        **Megatron.launched_more_ms,
        "tensor": (0.0, 0.0),
        "sequence": (0.0, 0.0),
    }

    def attention(self, accelerator: Accelerator, is_square: bool) -> Kernel:
        """Around the ring, ranks compute squares."""
        return super().attention(accelerator, is_square=True)

    def around_experts(self, compiled: bool) -> Around:
        return FUSED

    def leaves_out_last(self, layout: Layout) -> bool:
        """`CheckpointFunction` of `megatron/core/tensor_parallel/random.py` runs blocks as a whole."""
        return False

    def hides_sends(self, layout: Layout) -> bool:
        """`overlap_p2p_comm`, which goes with interleaving alone."""
        return layout.virtual_pipeline_stages > 1

    def states(self, layout: Layout, held: Held) -> States:
        """Without FSDP, weights and gradients are whole, in buffers that stay."""
        if layout.zero_stage > 1:
            return super().states(layout, held)
        shards, whole = held.sharded(layout), held.whole
        return States(4 * shards + layout.width * whole, self.sum_width(layout) * whole, 8 * shards, 0.0)

    def parts_on_their_way(self, layout: Layout, held: Held) -> float:
        """Without FSDP these are in the buffers."""
        return super().parts_on_their_way(layout, held) if layout.zero_stage > 1 else 0.0


class MegatronBridge(MegatronLM):
    """Megatron-Bridge as it is benchmarked, at github.com/NVIDIA-NeMo/Megatron-Bridge: "we force-balance the token
    distribution among experts" (`docs/performance-summary-archive.md`, commit 067f987).

    Routers choose at random: `moe_router_force_load_balancing` in
    `scripts/performance/configs/qwen3/qwen3_llm_pretrain.py`, commit 7af9601, and since. Before, each expert was filled
    up to an even share, and what was more dropped: `apply_moe_token_drop` in `scripts/performance/run_script.py`,
    commit bf71eba.
    """

    name = "megatron-bridge"
    routes_evenly = True
    shared_loss_traffic = 10
    """Of Transformer Engine's cross-entropy (`cross_entropy_fusion_impl` in `scripts/performance/utils/overrides.py`,
    commit f3c9afc): a logit is read, read again with its gradient in its place, and that multiplied by the loss's."""

    def gathered_bytes(self, layout: Layout, layers: int, held: Held) -> float:
        """`fp8_param_gather` in `src/megatron/bridge/training/mixed_precision.py`, commit f3c9afc, of current
        scaling, with which its layouts in fp8 were measured."""
        return _in_8_bits(super().gathered_bytes(layout, layers, held), layout, layers, held)


class MegatronLM2022(MegatronLM):
    """Megatron-LM before FlashAttention: attention by products, with kernels for softmax and dropout between them."""

    name = "megatron-lm-2022"
    scores_traffic = 11  # softmax reads and writes bf16, so does dropout with its mask, and both products one of them

    def hides_sends(self, layout: Layout) -> bool:
        return False


def _gathered_once(value: int, layout: Layout) -> int:
    """By default, pipeline stages keep the parameters that FSDP gathered, and gradients are summed once a step."""
    return 1 if value and layout.pipeline_parallel_size > 1 else value


class Torchtitan02(Megatron):
    """torchtitan 0.2.2: FSDP2 as here, and scaled dot-product attention, by cuDNN where that is, around a ring, too
    (`ScaledDotProductAttentionWrapper` of torchtitan/models/attention.py)."""

    name = "torchtitan-0.2"
    routes_evenly = False
    copies_one_sequence = True
    eager_copies = EngineFacts.eager_copies
    same: ClassVar[Mapping[str, Same]] = {"zero_stage": _gathered_once}
    rules: ClassVar[Mapping[str, tuple[Rule, ...]]] = {}
    fp8_experts, fp8_gain = True, FP8_ALONE
    launched_more_ms: ClassVar[Mapping[str, tuple[float, float]]] = {**Megatron.launched_more_ms, **OF_DTENSORS}
    selects_products = True  # `_save_list` of torchtitan/parallelisms/parallelize_llama.py, commit 9dec370
    rings_keys = True
    shared_loss_traffic = 16
    """Of a compiled loss: a logit is read for the largest, for the sum, and for its log-probability, in fp32, which is
    read for its gradient (`build_cross_entropy_loss` of torchtitan/components/loss.py, commit 820504e)."""
    rotary_values = compiled_rotary_values = COMPLEX_ROTARY

    def launch_s(self, layout: Layout, calibration: Coefficients) -> float:
        return super().launch_s(layout, calibration) + _of_dtensors_s(layout)

    def attention(self, accelerator: Accelerator, is_square: bool) -> Kernel:
        return super().attention(accelerator, is_square=True)

    def gathered_bytes(self, layout: Layout, layers: int, held: Held) -> float:
        """`enable_fsdp_float8_all_gather`, with which docs/float8.md has fp8 started."""
        return _in_8_bits(super().gathered_bytes(layout, layers, held), layout, layers, held)

    def leaves_out_last(self, layout: Layout) -> bool:
        """The compiler sees what is computed again, and leaves out what nothing needs."""
        return layout.compile or layout.precision != "fp8"


class Torchtitan(Torchtitan02):
    """The same as its layouts were measured until June 2025, when torch preferred FlashAttention-2."""

    name = "torchtitan"
    rings_heads = True  # `repeat_kv` of torchtitan/models/llama/model.py, before attention

    def attention(self, accelerator: Accelerator, is_square: bool) -> Kernel:
        return flash_2(accelerator)

    def eager_loss_bytes(self, layout: Layout) -> int:
        """Log-probabilities and two gradients in fp32: logits are let go of before (`del pred` of train.py)."""
        return 12


class Torchtitan2024(Torchtitan):
    """The same in December 2024, which computes the loss operation by operation: "compiling loss function causes CUDA
    errors, turning off for now" (train.py, commit 9dec370)."""

    name = "torchtitan-2024"
    compiles_loss = False
    shared_loss_traffic = Megatron.shared_loss_traffic
    norm_values = 22
    """Forward a copy in fp32, its square, the mean of that, two products and a copy in bf16 between them, and the sum
    before the norm, 21; backward 45 (`RMSNorm` of torchtitan/models/norms.py)."""


class Composer(Megatron):
    """Composer with llm-foundry's MPT, as measured in October 2023: FSDP of PyTorch 2.1, whose recomputation ends early
    as here (`scripts/train/benchmarking/sweep.sh` at github.com/mosaicml/llm-foundry, commit b2a43a1), FlashAttention
    in Triton (`submit_benchmarks.py` beside it), and its cross-entropy in place."""

    name = "composer"
    routes_evenly = False
    fp8_gain = FP8_ALONE
    # By Transformer Engine, with delayed scaling (`get_precision_context` of `composer/core/precision.py`).
    fuses_casts = True
    gathers_in_place = True  # parameters are views of what is gathered (`torch/distributed/fsdp/flat_param.py`)
    update_bytes = 98
    """`DecoupledAdamW` operation by operation, without decay 80 bytes (`composer/optim/decoupled_weight_decay.py`), the
    norm and the scaling of gradients, and the copy in bf16 that is gathered."""

    def eager_loss_bytes(self, layout: Layout) -> int:
        return 6

    def attention(self, accelerator: Accelerator, is_square: bool) -> Kernel:
        return flash_2(accelerator).slower(*TRITON_FLASH)

    def leaves_out_last(self, layout: Layout) -> bool:
        return layout.precision != "fp8"  # whose casts are kept once the product is done

    def sum_width(self, layout: Layout) -> int:
        """Its mixed precision DEFAULT names a type for parameters alone (`get_mixed_precision` of
        `composer/trainer/mosaic_fsdp_utils.py`, release 0.16), and then FSDP sums gradients in that, too."""
        return layout.width


class ComposerOnTorch1(Composer):
    """The same in May 2023, on PyTorch 1.13 (`submit_benchmarks.py`, commit 300cc5c), which runs blocks as a whole."""

    name = "composer-torch-1"

    def leaves_out_last(self, layout: Layout) -> bool:
        return False


class InternEvo(Megatron):
    """InternEvo as it was when its layouts were measured (`HybridZeroOptimizer` at github.com/InternLM/InternEvo,
    commit fa7337b of July 2023), whose ZeRO-1 gives whole tensors to ranks.

    Gradients are summed in buckets, on all ranks (`_attach_reduction_hook`: `reduce_rank = None`), and each rank
    broadcasts what it updated in one piece, before the next forward pass (`broadcast_params(overlap=False)`).
    """

    name = "internevo"
    routes_evenly = False
    copies_one_sequence = True
    eager_copies = EngineFacts.eager_copies
    unused: ClassVar[Mapping[str, Condition]] = {**Megatron.unused, "overlap_param_gather": lambda layout: True}
    shards_by_tensors = True
    gathers_in_place = True  # parameters are views of a flat tensor for each rank (`sync_param`)
    loss_traffic = FUSED_LOSS_TRAFFIC
    rotary_values = 2  # FlashAttention's kernel, in place (`internlm/model/embedding.py`)
    norm_values = 29 / 3
    """Forward the sum, a copy in fp32 and Apex's norm of that; backward these again, as `dropout_selective_checkpoint`
    has it by default, and those of three gradients (`internlm/model/modeling_internlm.py`)."""
    update_bytes = 124
    """`torch.optim.AdamW` of torch 1.13 operation by operation, 88 bytes, and before it the check for overflows in
    fp32, the norm, the flat copy in fp32, its scaling, and after it the copy in bf16."""

    def attention(self, accelerator: Accelerator, is_square: bool) -> Kernel:
        """That of FlashAttention 1.0.5 (`doc/en/install.md`)."""
        return flash_2(accelerator).slower(*FLASH_1)

    def sums_whole(self, layout: Layout) -> bool:
        return True

    def leaves_out_last(self, layout: Layout) -> bool:
        """`activation_checkpoint` of `internlm/utils/checkpoint.py`, reentrant by default, runs blocks as a whole."""
        return False

    def messages(self, layout: Layout, layers: int, parameters: float) -> int:
        return round(parameters / BUCKET) + 1

    def gathers(self, layout: Layout, layers: int, parameters: float) -> int:
        return min(layout.shard_group_size, TENSORS * layers + 3)


OTHERS: dict[str, EngineFacts] = {
    facts.name: facts
    for facts in (
        EarlierMegatron(),
        MegatronLM(),
        MegatronBridge(),
        MegatronLM2022(),
        Torchtitan(),
        Torchtitan02(),
        Torchtitan2024(),
        Composer(),
        ComposerOnTorch1(),
        InternEvo(),
    )
}
"""By their names."""
