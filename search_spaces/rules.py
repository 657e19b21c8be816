"""Why a layout is illegal. Each rule looks at one point and answers with its reason, or None where it is legal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from search_spaces.config import TrialConfig
from search_spaces.models import ModelShape


@dataclass(frozen=True)
class Workload:
    """What every trial of one search has in common. `memory_gib` is one device's; None where it is not bounded."""

    model: ModelShape
    sequence_length: int
    global_batch_size: int
    memory_gib: float | None = None


Rule = Callable[[TrialConfig, Workload], str | None]


def gpus_divide(config: TrialConfig, work: Workload) -> str | None:
    group = config.tensor_parallel_size * config.pipeline_parallel_size
    if config.num_gpus % group:
        return f"{config.num_gpus} GPUs are no multiple of tensor x pipeline parallel size {group}"
    return None


def heads_divide(config: TrialConfig, work: Workload) -> str | None:
    size, model = config.tensor_parallel_size, work.model
    if model.heads % size or model.kv_heads % size:
        return f"{model.heads} heads and {model.kv_heads} key-value heads cannot be split over {size} GPUs"
    return None


def width_divides(config: TrialConfig, work: Workload) -> str | None:
    size, model = config.tensor_parallel_size, work.model
    if model.ffn_hidden % size or model.vocab % size:
        return f"ffn_hidden {model.ffn_hidden} and vocab {model.vocab} cannot be split over {size} GPUs"
    return None


def sequence_divides(config: TrialConfig, work: Workload) -> str | None:
    if config.sequence_parallel and work.sequence_length % config.tensor_parallel_size:
        return f"sequence of {work.sequence_length} cannot be split over {config.tensor_parallel_size} GPUs"
    return None


def layers_divide(config: TrialConfig, work: Workload) -> str | None:
    if work.model.layers % config.pipeline_parallel_size:
        return f"{work.model.layers} layers cannot be split evenly over {config.pipeline_parallel_size} stages"
    return None


def batch_divides(config: TrialConfig, work: Workload) -> str | None:
    per_round = config.data_parallel_size * config.micro_batch_size
    if per_round == 0 or config.global_batch_size % per_round:
        return f"global batch {config.global_batch_size} is no multiple of data parallel x microbatch {per_round}"
    return None


def pipeline_fills(config: TrialConfig, work: Workload) -> str | None:
    """1F1B (Narayanan et al. 2021) needs at least as many microbatches as stages to have a steady phase."""
    stages, rounds = config.pipeline_parallel_size, config.gradient_accumulation_steps
    if stages > 1 and rounds < stages:
        return f"{rounds} microbatches do not fill {stages} pipeline stages"
    return None


def zero_with_pipeline(config: TrialConfig, work: Workload) -> str | None:
    """Stages keep the gradients of all microbatches in flight, and would gather their parameters once a microbatch."""
    if config.pipeline_parallel_size > 1 and config.zero_stage > 1:
        return f"ZeRO-{config.zero_stage} shards what a pipeline stage must keep whole between its microbatches"
    return None


def tied_embeddings_in_one_stage(config: TrialConfig, work: Workload) -> str | None:
    if work.model.tie_embeddings and config.pipeline_parallel_size > 1:
        return "tied embeddings would lie on the first and the last pipeline stage"
    return None


def deepspeed_pipeline_alone(config: TrialConfig, work: Workload) -> str | None:
    """DeepSpeed's automatic tensor parallelism replaces layers of whole models, not of pipeline modules."""
    if config.engine == "deepspeed" and config.tensor_parallel_size > 1 and config.pipeline_parallel_size > 1:
        return "DeepSpeed's pipeline module does not take its automatic tensor parallelism"
    return None


def states_fit(config: TrialConfig, work: Workload) -> str | None:
    """Parameters, gradients and Adam's states alone, in mixed precision (ZeRO, section 3.1).

    Their 2 + 2 + 12 bytes a parameter are the least that either engine holds, at either precision.
    """
    if work.memory_gib is None:
        return None
    stage, dp = config.zero_stage, config.data_parallel_size
    held = 2 / (dp if stage == 3 else 1) + 2 / (dp if stage >= 2 else 1) + 12 / (dp if stage >= 1 else 1)
    local = work.model.parameters / (config.tensor_parallel_size * config.pipeline_parallel_size)
    needed = local * held / 2**30
    if needed > work.memory_gib:
        return f"model states alone need {needed:.0f} GiB of {work.memory_gib:.0f} GiB"
    return None


RULES: tuple[Rule, ...] = (
    gpus_divide,
    heads_divide,
    width_divides,
    sequence_divides,
    layers_divide,
    batch_divides,
    pipeline_fills,
    zero_with_pipeline,
    tied_embeddings_in_one_stage,
    deepspeed_pipeline_alone,
    states_fit,
)


def refusal(config: TrialConfig, work: Workload) -> tuple[str, str] | None:
    """Name and reason of the first rule that refuses `config`, or None where all allow it."""
    for rule in RULES:
        if (reason := rule(config, work)) is not None:
            return rule.__name__, reason
    return None
