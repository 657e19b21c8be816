"""The legal points of a search: the product of its axes, less what the rules refuse."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.rules import Workload, refusal


@dataclass(frozen=True)
class Space:
    """`points`: the legal layouts in a fixed order. `refused`: how many distinct points each rule refused.

    `reasons` gives one example of each rule's reason. `combinations` counts the product of the axes, of which
    `distinct` are different layouts.
    """

    points: tuple[TrialConfig, ...]
    combinations: int
    distinct: int
    refused: dict[str, int]
    reasons: dict[str, str]


def canonical(config: TrialConfig) -> TrialConfig:
    """The same layout without settings that have no effect in it, so that equal layouts are equal values."""
    # DeepSpeed's tensor parallelism has no sequence-parallel form.
    sequence_parallel = config.sequence_parallel and config.tensor_parallel_size > 1 and config.engine != "deepspeed"
    zero_stage = config.zero_stage
    if config.data_parallel_size <= 1:
        zero_stage = 0
    elif config.engine == "megatron" and zero_stage == 1 and config.gradient_accumulation_steps == 1:
        zero_stage = 2  # with a single microbatch, reducing once a step is reducing every microbatch
    return replace(config, sequence_parallel=sequence_parallel, zero_stage=zero_stage)


def enumerate_space(axes: Mapping[str, Sequence[Any]], work: Workload) -> Space:
    """All legal points of `axes` (field of `TrialConfig` -> values to try) for one workload."""
    combinations = 0
    points: dict[TrialConfig, None] = {}
    for values in itertools.product(*axes.values()):
        combinations += 1
        point = TrialConfig(global_batch_size=work.global_batch_size, **dict(zip(axes, values, strict=True)))
        points[canonical(point)] = None
    legal: list[TrialConfig] = []
    refused: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for point in points:
        if (why := refusal(point, work)) is None:
            legal.append(point)
        else:
            refused[why[0]] += 1
            reasons.setdefault(*why)
    return Space(tuple(legal), combinations, len(points), dict(refused), reasons)
