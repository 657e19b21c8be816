"""Why a layout is illegal. Each rule looks at one layout and answers with its reason, or None where it is legal.

Rules of single engines are with their other facts in `search_spaces.engines`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache

from search_spaces import memory
from search_spaces.engines import ENGINES, facts_of
from search_spaces.engines.base import EngineFacts, Rule
from search_spaces.layout import ONE_STAGE_SCHEDULES, SETTLING, Layout
from search_spaces.workload import Workload


def gpus_divide(layout: Layout, work: Workload) -> str | None:
    group = layout.model_parallel_size
    if layout.num_gpus % group:
        return f"{layout.num_gpus} GPUs are no multiple of tensor x context x pipeline parallel size {group}"
    return None


def heads_divide(layout: Layout, work: Workload) -> str | None:
    size, model = layout.tensor_parallel_size, work.shape
    if model.heads % size or model.kv_heads % size:
        return f"{model.heads} heads and {model.kv_heads} key-value heads cannot be split over {size} GPUs"
    return None


def width_divides(layout: Layout, work: Workload) -> str | None:
    size, model = layout.tensor_parallel_size, work.shape
    if model.ffn_hidden % size or model.vocab % size:
        return f"ffn_hidden {model.ffn_hidden} and vocab {model.vocab} cannot be split over {size} GPUs"
    return None


def sequence_divides(layout: Layout, work: Workload) -> str | None:
    # Each context-parallel rank takes an early and a late piece of the sequence, so that causal attention is even.
    pieces = 2 * layout.context_parallel_size if layout.context_parallel_size > 1 else 1
    if work.sequence_length % pieces:
        return f"sequence of {work.sequence_length} cannot be cut into {pieces} pieces"
    if layout.splits_sequence and work.sequence_length // layout.context_parallel_size % layout.tensor_parallel_size:
        return f"sequence of {work.sequence_length} cannot be split over {layout.tensor_parallel_size} GPUs"
    return None


def layers_divide(layout: Layout, work: Workload) -> str | None:
    layers, stages = work.shape.layers, layout.pipeline_stages
    if layout.stage_layers is None:
        for depth in (layers, *work.depths):
            if depth % stages:
                return f"{depth} layers cannot be split evenly over {stages} stages"
        return None
    least = layout.stage_layers[1:-1] if facts_of(layout, work).empty_ends else layout.stage_layers
    if len(layout.stage_layers) != stages or sum(layout.stage_layers) != layers or min(least, default=1) < 1:
        return f"stage_layers must be {stages} numbers above 0 that sum to {layers}"
    return None


def batch_divides(layout: Layout, work: Workload) -> str | None:
    per_round = layout.data_parallel_size * layout.micro_batch_size
    if per_round == 0 or layout.global_batch_size % per_round:
        return f"global batch {layout.global_batch_size} is no multiple of data parallel x microbatch {per_round}"
    return None


def pipeline_fills(layout: Layout, work: Workload) -> str | None:
    """1F1B (Narayanan et al. 2021) needs at least as many microbatches as stages to have a steady phase."""
    stages, rounds = layout.pipeline_parallel_size, layout.gradient_accumulation_steps
    if stages > 1 and rounds < stages and facts_of(layout, work).fills_pipelines:
        return f"{rounds} microbatches do not fill {stages} pipeline stages"
    return None


def virtual_stages_fit_schedule(layout: Layout, work: Workload) -> str | None:
    virtual, schedule = layout.virtual_pipeline_stages, layout.pipeline_schedule
    if schedule in ONE_STAGE_SCHEDULES and virtual > 1:
        return f"{schedule} has one stage a rank, not {virtual}"
    if schedule == "zbv_zero_bubble" and virtual != 2:
        return f"{schedule} has two stages a rank, not {virtual}"
    if schedule.startswith("interleaved") and virtual < 2:
        return f"{schedule} has two or more stages a rank, not {virtual}"
    return None


def interleaving_rounds_divide(layout: Layout, work: Workload) -> str | None:
    """Interleaved schedules run as many microbatches at a time as there are ranks."""
    rounds, ranks = layout.gradient_accumulation_steps, layout.pipeline_parallel_size
    if layout.pipeline_schedule.startswith("interleaved") and rounds % max(1, rounds // ranks):
        return f"{rounds} microbatches are no whole number of rounds of {ranks} or more"
    return None


def zero_bubble_is_not_compiled(layout: Layout, work: Workload) -> str | None:
    """A compiled backward pass gives the gradients of inputs and of weights at once; zero bubble has them apart."""
    if layout.compile and layout.splits_backward:
        return f"{layout.pipeline_schedule} splits the backward pass, which a compiled block has as one"
    return None


def zero_bubble_keeps_no_selection(layout: Layout, work: Workload) -> str | None:
    """A split backward pass goes through a block twice; torch gives out what selective recomputation kept once."""
    if layout.recompute == "selective" and layout.splits_backward:
        return f"{layout.pipeline_schedule} needs twice what selective recomputation keeps for one backward pass"
    return None


def experts_compile_no_selection(layout: Layout, work: Workload) -> str | None:
    """The compiler takes selective recomputation as part of its graph, which ends at the experts: it would leave the
    whole block alone (seen with torch 2.11 and 2.13), at a third more of the CPU's time than an eager one."""
    if layout.compile and layout.recompute == "selective" and work.shape.num_experts:
        return "a block with experts is compiled without recomputation or with full, not with selective"
    return None


def zero_with_pipeline(layout: Layout, work: Workload) -> str | None:
    """Stages keep the gradients of all microbatches in flight, and would gather their parameters once a microbatch."""
    if layout.pipeline_parallel_size > 1 and layout.zero_stage > 1:
        return f"ZeRO-{layout.zero_stage} shards what a pipeline stage must keep whole between its microbatches"
    return None


def tied_embeddings_meet(layout: Layout, work: Workload) -> str | None:
    """Both copies of a tied table are kept equal by a sum of their gradients between two ranks."""
    if work.shape.tie_embeddings and layout.pipeline_schedule == "zbv_zero_bubble":
        return "the V schedule would hold both copies of the tied embeddings on one rank"
    return None


def replicas_divide(layout: Layout, work: Workload) -> str | None:
    copies, ranks = layout.data_parallel_replicate_size, layout.data_parallel_size
    if ranks % copies:
        return f"{ranks} data-parallel ranks cannot hold {copies} copies of the ZeRO shards"
    if copies > 1 and copies == layout.shard_ranks:
        return f"{copies} copies on {copies} ranks leave ZeRO nothing to shard: that is ZeRO-0"
    return None


def there_are_experts(layout: Layout, work: Workload) -> str | None:
    """The part of `experts_divide` that the model alone decides."""
    size, model = layout.expert_parallel_size, work.shape
    if size > 1 and not model.num_experts:
        return "a dense model has no experts to spread"
    if model.num_experts % size:
        return f"{model.num_experts} experts cannot be spread over {size} GPUs"
    return None


def experts_divide(layout: Layout, work: Workload) -> str | None:
    if (reason := there_are_experts(layout, work)) is not None:
        return reason
    size, copies = layout.expert_parallel_size, layout.data_parallel_replicate_size if layout.zero_stage else 1
    if (layout.shard_ranks // copies) % size:
        return f"expert parallel size {size} does not divide the {layout.shard_ranks // copies} ranks of a shard group"
    return None


def there_are_units_for_fp8(layout: Layout, work: Workload) -> str | None:
    """The part of `fp8_is_supported` that the accelerator alone decides."""
    if layout.precision == "fp8" and not work.accelerator.fp8:
        return "the accelerator has no matrix units for fp8"
    return None


def fp8_is_supported(layout: Layout, work: Workload) -> str | None:
    model, size = work.shape, layout.tensor_parallel_size
    if layout.precision != "fp8":
        return None
    if (reason := there_are_units_for_fp8(layout, work)) is not None:
        return reason
    if not facts_of(layout, work).fp8:
        having = [name for name, engine in ENGINES.items() if engine.fp8]
        return f"fp8 is in the {' and '.join(having)} engine alone"
    if model.num_experts and not facts_of(layout, work).fp8_experts:
        return "grouped matrix products of experts have no fp8 form here"
    shares = [width / size for width in (model.query_width, model.key_width, model.ffn_hidden)]
    if any(width % 16 for width in (model.hidden, *shares)):
        return "fp8 matrix products need widths on a GPU that are multiples of 16"
    if layout.microbatch_tokens(work.sequence_length) % 16:
        return "fp8 matrix products need microbatches whose tokens on a GPU are a multiple of 16"
    return None


def async_tensor_parallel_is_supported(layout: Layout, work: Workload) -> str | None:
    if layout.async_tensor_parallel and not work.accelerator.peer_memory:
        return "asynchronous tensor parallelism needs GPUs that reach each other's memory"
    return None


def segments_expand_on_cuda(layout: Layout, work: Workload) -> str | None:
    if layout.expandable_segments and work.accelerator.platform not in (None, "cuda"):
        return "expandable segments are of torch's allocator on NVIDIA's GPUs"
    return None


def power_limit_is_of_the_accelerator(layout: Layout, work: Workload) -> str | None:
    """That a GPU takes so low a limit only its driver knows."""
    if layout.power_limit_w is None:
        return None
    if work.accelerator.platform not in (None, "cuda"):
        return "power limits are set through NVML, of NVIDIA's GPUs"
    highest = work.accelerator.power_limit_w
    if highest is not None and layout.power_limit_w > highest:
        return f"{layout.power_limit_w} W are more than the {highest:g} W of the accelerator's data sheet"
    return None


def rank_order_is_permutation(layout: Layout, work: Workload) -> str | None:
    if layout.rank_order is not None and sorted(layout.rank_order) != list(range(layout.num_gpus)):
        return f"rank_order must name each of the {layout.num_gpus} workers once"
    return None


def memory_fits(layout: Layout, work: Workload) -> str | None:
    """See `memory.band_of`. Of proxies, the deeper has to fit."""
    return _needs(layout, work, "too big")


def memory_surely_fits(layout: Layout, work: Workload) -> str | None:
    """For searches that do not want to risk it."""
    if not work.refuse_borderline or (needs := _needs(layout, work, "borderline")) is None:
        return None
    return f"borderline: {needs}"


def _needs(layout: Layout, work: Workload, band: memory.Band) -> str | None:
    """What memory a layout of this band needs; None of another band."""
    seen = memory.glance(layout, work.run)
    return seen.needs if memory.band_of(layout, work, seen.share) == band else None


RULES_BY_AXIS: dict[str, tuple[Rule, ...]] = {
    "tensor_parallel_size": (heads_divide, width_divides),
    "pipeline_parallel_size": (gpus_divide,),
    "micro_batch_size": (batch_divides, pipeline_fills),
    "pipeline_schedule": (tied_embeddings_meet,),
    "virtual_pipeline_stages": (virtual_stages_fit_schedule, interleaving_rounds_divide),
    "stage_layers": (layers_divide,),
    "zero_stage": (zero_with_pipeline,),
    "data_parallel_replicate_size": (replicas_divide,),
    "expert_parallel_size": (experts_divide,),
    "precision": (fp8_is_supported,),
    "compile": (zero_bubble_is_not_compiled,),
    "sequence_parallel": (sequence_divides,),
    "recompute": (zero_bubble_keeps_no_selection, experts_compile_no_selection),
    "bucket_size": (memory_fits, memory_surely_fits),
    "async_tensor_parallel": (async_tensor_parallel_is_supported,),
    "rank_order": (rank_order_is_permutation,),
    "expandable_segments": (segments_expand_on_cuda,),
    "power_limit_w": (power_limit_is_of_the_accelerator,),
}
"""The rules of all engines, by the axis that they are judged at: the last of those that they look at."""

FOR_ANY_PROGRAM = (
    gpus_divide,
    batch_divides,
    virtual_stages_fit_schedule,
    replicas_divide,
    rank_order_is_permutation,
    power_limit_is_of_the_accelerator,
)
"""Those that follow from what the axes mean."""


@cache
def rules_at(axis: str, engine: EngineFacts) -> tuple[Rule, ...]:
    """The rules that judge a layout of an engine once it is settled up to `axis`, in their order."""
    common = RULES_BY_AXIS.get(axis, ())
    if not engine.is_ours:
        common = tuple(rule for rule in common if rule in FOR_ANY_PROGRAM)
    return (*engine.lacks.get(axis, ()), *common, *engine.rules.get(axis, ()))


def all_rules(engines: Iterable[EngineFacts], own: Iterable[str] = ()) -> tuple[Rule, ...]:
    """All rules of some engines in the order in which they are judged, each once; `own`: axes of the user's own."""
    axes = [*(axis.name for axis in SETTLING), *own]
    each = [rules_at(axis, engine) for axis in axes for engine in engines]
    return tuple(dict.fromkeys(itertools.chain(*each)))


def refusal(layout: Layout, work: Workload, rules: Iterable[Rule] | None = None) -> tuple[str, str] | None:
    """Name and reason of the first of `rules`, by default all of the layout's engine, that refuses it; None where all
    allow it. Raises `ValueError` for an engine that there is not."""
    for rule in all_rules([facts_of(layout, work)], dict(layout.own)) if rules is None else rules:
        if (reason := rule(layout, work)) is not None:
            return rule.__name__, reason
    return None
