"""The axes that follow from model and cluster hold what was published, and nothing that cannot be tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.judge.auto import Published, read
from search_spaces.expert import choose
from search_spaces.hardware import ACCELERATORS
from search_spaces.hopeless import hopeless
from search_spaces.layout import AXES
from search_spaces.models import PRESETS
from search_spaces.space import enumerate_space
from search_spaces.workload import Workload

H100 = ACCELERATORS["h100"]
PUBLISHED = read()


def work_of(model: str, length: int, batch: int, **changes: Any) -> Workload:
    return replace(Workload(PRESETS[model], length, batch, H100), **changes)


def axes_of(work: Workload, num_gpus: int) -> dict[str, list[Any]]:
    chosen = choose(work, num_gpus)
    defaults = {name: [axis.default] for name, axis in AXES.items()} | {"num_gpus": [num_gpus]}
    return defaults | {name: list(choice.values) for name, choice in chosen.items()}


def work_as(one: Published, **changes: Any) -> Workload:
    return work_of(one.model, one.sequence_length, one.global_batch_size, **changes)


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: f"{one.model}-{one.global_batch_size}")
def test_what_was_published_is_among_it(one: Published) -> None:
    # Whether it fits is a question to the memory model.
    roomy = work_as(one, accelerator=replace(H100, memory_gib=None))
    wanted = one.layout("megatron", roomy, one.settings.get("recompute", "none"))
    assert wanted in set(enumerate_space(axes_of(roomy, one.gpus), roomy).layouts)


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, id=one.model, marks=[pytest.mark.slow] * (one.model in ("llama3-8b", "llama3-70b")))
        for one in PUBLISHED[1::2]
    ],
)
def test_each_value_may_be_legal_and_all_are_soon_told(one: Published) -> None:
    work = work_as(one)
    axes = axes_of(work, one.gpus)
    assert not list(hopeless(axes, work))
    space = enumerate_space(axes, work)
    assert space.layouts
    assert space.distinct < 50_000


def test_tensor_parallelism_stays_within_a_node_and_divides() -> None:
    sizes = choose(work_of("llama3-70b", 8192, 256), 64)["tensor_parallel_size"].values
    assert sizes == (1, 2, 4, 8)
    assert choose(work_of("llama3-70b", 8192, 256, gpus_per_node=4), 64)["tensor_parallel_size"].values == (1, 2, 4)
    few = replace(work_of("llama3-70b", 8192, 256), model=replace(PRESETS["llama3-70b"], kv_heads=2))
    assert choose(few, 64)["tensor_parallel_size"].values == (1, 2)


def test_tensor_parallel_ranks_send_beside_their_products_where_they_can() -> None:
    name, work = "async_tensor_parallel", work_of("llama3-70b", 8192, 256)
    assert choose(work, 64)[name].values == (False, True)
    assert name not in choose(work, 64, alone=True)
    assert name not in choose(replace(work, accelerator=ACCELERATORS["mi300x"]), 64)
    assert name not in choose(work_of("mixtral-8x7b", 4096, 64), 64)
    assert name not in choose(work, 1)


def test_long_sequences_are_split_and_short_ones_are_not() -> None:
    assert "context_parallel_size" not in choose(work_of("llama3-8b", 4096, 64), 64)
    assert choose(work_of("llama3-8b", 131_072, 16), 64)["context_parallel_size"].values == (1, 2, 4, 8, 16, 32)


def test_experts_are_spread_where_there_are_any() -> None:
    assert choose(work_of("mixtral-8x7b", 4096, 64), 4)["expert_parallel_size"].values == (1, 2, 4)
    assert "expert_parallel_size" not in choose(work_of("llama3-8b", 4096, 64), 64)


def test_proxies_have_equal_stages_at_every_depth() -> None:
    chosen = choose(work_of("llama3-405b", 8192, 512, depths=(6, 12)), 512)
    assert chosen["pipeline_parallel_size"].values == (1, 2)
    assert "stage_layers" not in chosen


def test_one_gpu_and_processors_are_enough() -> None:
    alone = choose(work_of("llama3-8b", 8192, 4), 1)
    assert not {"tensor_parallel_size", "pipeline_parallel_size", "stage_layers", "pipeline_schedule"} & set(alone)
    assert "compile" not in choose(work_of("tiny-llama", 128, 16, accelerator=ACCELERATORS["cpu"]), 4)
