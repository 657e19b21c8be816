"""The `megatron` engine: Megatron-style layouts on torch's own primitives, DTensor and FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from search_spaces.attention import CUDNN_IN_PARTS, Kernel
from search_spaces.coefficients import Coefficients
from search_spaces.engines.base import Condition, EngineFacts, Rule, Same, States, flash_2
from search_spaces.hardware import Accelerator
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.parameters import Held
from search_spaces.workload import Workload


def _always(layout: Layout) -> bool:
    return True


def _zero_stage(value: int, layout: Layout) -> int:
    """With a single microbatch, reducing gradients once a step is reducing them every microbatch."""
    once = layout.gradient_accumulation_steps == 1 and layout.pipeline_parallel_size == 1
    return 2 if value == 1 and once else value


def megatron_overlaps_no_casts(layout: Layout, work: Workload) -> str | None:
    """The compiler splits products beside a gather of what they multiply, or a scatter of what they give."""
    if layout.async_tensor_parallel and layout.precision == "fp8":
        return "asynchronous tensor parallelism has products in bf16 or fp32 alone: it was never tried with fp8's casts"
    return None


class Megatron(EngineFacts):
    """See `EngineFacts`, whose facts of torch's own primitives are this engine's."""

    name = "megatron"
    unused: ClassVar[Mapping[str, Condition]] = {"offload_optimizer": _always, "bucket_size": _always}
    same: ClassVar[Mapping[str, Same]] = {"zero_stage": _zero_stage}
    rules: ClassVar[Mapping[str, tuple[Rule, ...]]] = {"async_tensor_parallel": (megatron_overlaps_no_casts,)}
    fp8 = True
    routes_evenly = True
    allocates = "sharded"
    gathers_beside = True
    copies_one_sequence = False
    eager_copies = (
        8  # a gather's pieces joined, or a scatter's, read and written once each (`trainables/tensor_ranks.py`)
    )
    beside_messages: ClassVar[Mapping[str, float]] = {
        "gpipe": 0.05,
        "interleaved_1f1b": 0.25,
        "interleaved_zero_bubble": 0.24,
        "zbv_zero_bubble": 0.21,
    }
    """torch's schedules post messages ahead. The medians of pipelines of two ranks that were measured, as
    `search_spaces.composition` plays them; played with passes of one length, four to sixteen ranks have 0 to 0.17
    more."""

    def attention(self, accelerator: Accelerator, is_square: bool) -> Kernel:
        """torch leaves attention that is not square to FlashAttention-2; from Hopper on, ranks have it in parts
        (`trainables/merged.py`)."""
        if is_square:
            return super().attention(accelerator, is_square)
        return CUDNN_IN_PARTS if accelerator.fp8 else flash_2(accelerator)

    def launch_s(self, layout: Layout, calibration: Coefficients) -> float:
        """Casts to fp8 take their time in eager blocks."""
        return calibration.fp8_launch_s if layout.precision == "fp8" and not layout.compile else 0.0

    def leaves_out_last(self, layout: Layout) -> bool:
        """A compiled block is computed again as a whole, and a product in fp8 keeps its casts only once it is done."""
        return not layout.compile and layout.precision != "fp8"

    def memory_is_measured(self, layout: Layout, model: ModelShape) -> bool:
        return True

    def states(self, layout: Layout, held: Held) -> States:
        """FSDP2 has parameters and sharded gradients in fp32, gathers parameters in the width of matrix products, and
        sums whole gradients of microbatches in that in which they are reduced."""
        zero, shards = layout.zero_stage, held.sharded(layout)
        gathered = min(held.whole, held.largest + held.block) if zero == 3 else held.whole
        parameters = 4 * shards + layout.width * gathered
        several = layout.gradient_accumulation_steps > 1
        if several and zero < 2:
            return States(parameters, self.sum_width(layout) * held.whole, 8 * shards, 4 * shards)
        if several:
            return States(parameters, 4 * shards, 8 * shards, 0.0)
        return States(parameters, 0.0, 8 * shards, 4 * shards)
