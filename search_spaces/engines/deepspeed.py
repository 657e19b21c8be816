"""The `deepspeed` engine: DeepSpeed's ZeRO, pipelines, tensor parallelism, Ulysses and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from search_spaces.engines.base import Condition, EngineFacts, Rule, States
from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.parameters import Held
from search_spaces.workload import Workload

PIPELINE_LOSS_BYTES = 5
"""A logit, where the loss is not compiled: what DeepSpeed's pipeline has left of the microbatch before. Fitted."""

ZERO3_BYTES = 18
"""A parameter of the largest part, which DeepSpeed's ZeRO-3 holds besides what it gathers. Fitted."""


def deepspeed_has_no_such_axis(layout: Layout, work: Workload) -> str | None:
    if layout.pipeline_parallel_size > 1 and layout.pipeline_schedule != "1f1b":
        return "DeepSpeed's pipeline runs 1F1B alone"
    if layout.stage_layers is not None:
        return "DeepSpeed's pipeline module cuts its stages itself"
    if layout.data_parallel_replicate_size > 1:
        return "hybrid sharding is in the megatron engine alone"
    return None


def deepspeed_pipeline_alone(layout: Layout, work: Workload) -> str | None:
    """DeepSpeed's automatic tensor parallelism replaces layers of whole models, not of pipeline modules."""
    if layout.pipeline_parallel_size > 1 and layout.tensor_parallel_size > 1:
        return "DeepSpeed's pipeline module does not take its automatic tensor parallelism"
    return None


def deepspeed_pipeline_shards_states(layout: Layout, work: Workload) -> str | None:
    """In bf16 its optimizer is the one of ZeRO-1, at stage 0 too, and sums gradients in bf16 there."""
    pipeline = layout.pipeline_parallel_size > 1
    if pipeline and layout.precision == "bf16" and layout.zero_stage == 0 and layout.shard_ranks > 1:
        return "DeepSpeed's pipeline module in bf16 shards the optimizer states, which is ZeRO-1"
    return None


def deepspeed_tensor_parallel_sums_in_place(layout: Layout, work: Workload) -> str | None:
    """The matrix product that a sum over ranks overwrites would be summed again in the backward pass."""
    if layout.tensor_parallel_size > 1 and layout.recompute == "selective":
        return "DeepSpeed's tensor parallelism overwrites what selective recomputation keeps"
    return None


def deepspeed_ulysses_heads_divide(layout: Layout, work: Workload) -> str | None:
    size, model = layout.context_parallel_size * layout.tensor_parallel_size, work.shape
    if layout.context_parallel_size > 1 and model.kv_heads % size:
        return f"Ulysses cannot deal {model.kv_heads} key-value heads out to {size} GPUs"
    return None


def deepspeed_experts_alone(layout: Layout, work: Workload) -> str | None:
    if not work.shape.num_experts:
        return None
    if layout.zero_stage == 3:
        return "DeepSpeed's experts are not sharded by ZeRO-3"
    if layout.tensor_parallel_size > 1 or layout.pipeline_parallel_size > 1:
        return "DeepSpeed's groups of experts are of data-parallel ranks, with neither tensor nor pipeline parallelism"
    if work.shape.experts_per_token == 1:
        return "DeepSpeed weighs a single expert by its probability, not by one"
    return None


def offload_is_supported(layout: Layout, work: Workload) -> str | None:
    if layout.offload_optimizer and layout.zero_stage == 0:
        return "DeepSpeed offloads what ZeRO shards: not at stage 0"
    return None


def _reduces_late(layout: Layout) -> bool:
    """DeepSpeed reduces after the last backward pass without ZeRO, in pipelines, and where ZeRO-1 sums bf16 in fp32."""
    return layout.zero_stage == 0 or layout.pipeline_parallel_size > 1 or sums_apart(layout)


def sums_apart(layout: Layout) -> bool:
    """Whether gradients are summed in fp32 beside those in bf16 of a microbatch, as ZeRO-1's optimizer for bf16 does,
    which serves without ZeRO as well where nothing is sharded."""
    in_fp32 = layout.precision == "bf16" and layout.reduce_precision == "fp32" and not layout.offload_optimizer
    return in_fp32 and (layout.zero_stage == 1 or layout.shard_ranks == 1)


class DeepSpeed(EngineFacts):
    """See `EngineFacts`; how it is configured for a layout is in `trainables.engines.deepspeed.configuration`."""

    name = "deepspeed"
    routes_evenly = True
    unused: ClassVar[Mapping[str, Condition]] = {
        "sequence_parallel": lambda layout: True,
        "overlap_grad_reduce": _reduces_late,
        "overlap_param_gather": lambda layout: layout.zero_stage < 3,  # it gathers ahead at stage 3 alone
    }
    lacks: ClassVar[Mapping[str, tuple[Rule, ...]]] = {"data_parallel_replicate_size": (deepspeed_has_no_such_axis,)}
    rules: ClassVar[Mapping[str, tuple[Rule, ...]]] = {
        "pipeline_parallel_size": (deepspeed_pipeline_alone, deepspeed_ulysses_heads_divide),
        "zero_stage": (deepspeed_experts_alone,),
        "offload_optimizer": (offload_is_supported,),
        "precision": (deepspeed_pipeline_shards_states,),
        "recompute": (deepspeed_tensor_parallel_sums_in_place,),
    }
    splits_tables = False
    exchanges_heads = True
    sends_one_by_one = True
    fills_experts = True
    allocates = "flat"
    launched_ms: ClassVar[Mapping[str, Mapping[str, tuple[float, float]]]] = {
        "gpt": {"none": (2.4, 2.6), "selective": (6.0, 2.4), "full": (4.3, 3.1)},
        "llama": {"none": (3.7, 1.5), "selective": (9.3, 2.0), "full": (5.5, 2.6)},
        "experts": {"none": (10.7, 10.9), "selective": (28.8, 26.8), "full": (16.8, 16.9)},
    }
    launched_per_expert = 0.04  # they are computed one after the other: 101 launches of eleven runs
    launched_more_ms: ClassVar[Mapping[str, tuple[float, float]]] = {
        "tensor": (2.4, 0.7),
        "context": (3.2, 3.4),
        "experts": (1.4, 0.3),
        "reduces": (1.3, 1.1),
        "gathers": (4.5, 6.0),  # of 38 layouts on H200: for each parameter it asks, waits and records on two streams
    }
    sums_inputs_apart = True
    releases_gradients = False
    update_bytes = 70  # it scales and copies gradients in between

    def keeps_parameters(self, layout: Layout) -> bool:
        return layout.zero_stage < 3

    def autocasts(self, layout: Layout) -> bool:
        """Without ZeRO, DeepSpeed sums the microbatches' gradients in bf16 and takes a first step of Adam on no
        gradients. Torch's autocast has fp32 weights and gradients instead."""
        return layout.precision == "bf16" and layout.zero_stage == 0 and layout.shard_ranks > 1

    def adds_biases(self, layout: Layout) -> bool:
        """ZeRO-3 has products of its own (`LinearFunctionForZeroStage3` in `deepspeed/runtime/zero/linear.py`)."""
        return layout.zero_stage == 3

    def eager_loss_bytes(self, layout: Layout) -> int:
        """Two in bf16, three in fp32, and the logits: each in memory of its own."""
        return 16 if sums_apart(layout) else 19

    def sums_whole(self, layout: Layout) -> bool:
        return layout.zero_stage < 3

    def messages(self, layout: Layout, layers: int, parameters: float) -> int:
        """Bucket by bucket, where ZeRO sends them."""
        if layout.zero_stage:
            return round(parameters / layout.bucket_size) + 1
        return super().messages(layout, layers, parameters)

    def waits_for_gpu(self, layout: Layout, model: ModelShape) -> bool:
        """Where it drops no tokens, its routing makes as much room as the fullest expert needs, which the CPU reads,
        even if all are as full."""
        return bool(model.num_experts)

    def sent_bytes(self, layout: Layout) -> float:
        """ZeRO-2 copies a gradient to a bucket, divides it there and makes it one of fp32, which is reduced, and copied
        back where it is the rank's own; ZeRO-3 copies it to a bucket of fp32, sorts that by ranks into another one and
        divides it. Either then adds a rank's own to its sums (`deepspeed/runtime/zero`: `average_tensor` and
        `allreduce_bucket` in `stage_1_and_2.py`, `__avg_scatter_grads` and `partition_grads` in `stage3.py`)."""
        width, sums = layout.width, self.sum_width(layout)
        if layout.zero_stage == 2:
            own = (sums + width) + (width + 2 * sums)
            return 2 * width + 2 * width + (width + sums) + own / layout.shard_ranks
        if layout.zero_stage == 3:
            return (width + sums) + 2 * sums + 2 * sums + 3 * sums / layout.shard_ranks
        return super().sent_bytes(layout)

    def recomputes_in_graphs(self, layout: Layout, model: ModelShape) -> bool:
        return layout.compile and not model.num_experts

    def lead_is_short(self, layout: Layout) -> bool:
        """ZeRO-3 waits for the last gather but two (`__max_ongoing_fetch_events` in
        `deepspeed/runtime/zero/partitioned_param_coordinator.py`), so that gathered parameters do not pile up."""
        return layout.zero_stage == 3

    def memory_is_measured(self, layout: Layout, model: ModelShape) -> bool:
        return not model.num_experts

    def states(self, layout: Layout, held: Held) -> States:
        """DeepSpeed computes with weights of their own beside fp32 master copies."""
        zero, whole, shards = layout.zero_stage, held.whole, held.sharded(layout)
        width, summed = layout.width, self.sum_width(layout)
        several = layout.gradient_accumulation_steps > 1
        if self.autocasts(layout) or (zero == 0 and layout.precision == "fp32"):
            # No master copies; autocast keeps weights in bf16 for the backward pass.
            late = 0.0 if several else 4 * whole
            return States((4 if width == 4 else 6) * whole, 4 * whole - late, 8 * whole, late)
        # The flat copy of summed gradients that ZeRO-1 and 2 make for the update, where they are not summed apart,
        # comes on top of all else: so it was with full recomputation in steps of several microbatches alone.
        copies = zero in (1, 2) and not sums_apart(layout)
        copied = 4 * shards if copies and layout.recompute == "full" and several else 0.0
        weights = width * whole
        if zero == 3:
            weights = width * min(whole, shards + held.largest + held.block) + ZERO3_BYTES * held.largest
        if layout.offload_optimizer:
            # ZeRO-1 keeps gradients whole until the update, the others hand them over as they come.
            return States(weights, width * whole if zero == 1 else 0.0, 0.0, 0.0, copied)
        if zero >= 2:
            return States(weights + 4 * shards, summed * shards, 8 * shards, 4 * shards, copied)
        # Gradients that are not summed apart from those of a microbatch are copied for the update.
        apart = summed > width or layout.pipeline_parallel_size > 1
        return States(weights + 4 * shards, summed * whole, 8 * shards, 0.0 if apart else 4 * shards, copied)

    def pipeline_loss_bytes(self, layout: Layout) -> int:
        return PIPELINE_LOSS_BYTES

    def parts_on_their_way(self, layout: Layout, held: Held) -> float:
        """Two buckets, one on its way while the other is filled."""
        buckets = 2 * min(layout.bucket_size, held.whole) if layout.zero_stage else 0
        return layout.width * buckets

    def hidden_states_on_their_way(self, layout: Layout, first: bool, last: bool, in_flight: int) -> int:
        """Those of one microbatch."""
        return (not first) + (not last)
