"""The enumerated space: each layout once, all counts add up, every legal point obeys the arithmetic."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces import space as space_module
from search_spaces.engines import ENGINES, engine_of
from search_spaces.hardware import ACCELERATORS, Accelerator
from search_spaces.layout import AXES, BUCKET_SIZE, SCHEDULES, SETTLING, Layout
from search_spaces.models import PRESETS
from search_spaces.rules import all_rules, refusal, rules_at
from search_spaces.space import canonical, enumerate_space
from search_spaces.workload import Workload

VALUES: dict[str, list[Any]] = {
    "engine": ["megatron", "deepspeed"],
    "num_gpus": [1, 2, 3, 4, 8],
    "tensor_parallel_size": [1, 2, 4],
    "context_parallel_size": [1, 2],
    "pipeline_parallel_size": [1, 2, 4],
    "micro_batch_size": [1, 2, 3, 4],
    "pipeline_schedule": list(SCHEDULES),
    "virtual_pipeline_stages": [1, 2, 3],
    "stage_layers": [None, (2, 2), (1, 3), (1, 1, 1, 1), (1, 2), (3, 3)],
    "zero_stage": [0, 1, 2, 3],
    "data_parallel_replicate_size": [1, 2, 4],
    "expert_parallel_size": [1, 2],
    "offload_optimizer": [False, True],
    "precision": ["bf16", "fp32", "fp8"],
    "compile": [False, True],
    "sequence_parallel": [True, False],
    "async_tensor_parallel": [False, True],
    "rank_order": [None, (0, 1, 2, 3), (1, 0), (3, 2, 1, 0)],
    "recompute": ["none", "selective", "full"],
    "overlap_grad_reduce": [True, False],
    "overlap_param_gather": [True, False],
    "bucket_size": [BUCKET_SIZE, 10_000_000],
    "reduce_precision": ["fp32", "bf16"],
    "expandable_segments": [False, True],
    "power_limit_w": [None, 400],
}
FIXED: dict[str, list[Any]] = {name: values[:1] for name, values in VALUES.items()}


@st.composite
def products(draw: st.DrawFn) -> dict[str, list[Any]]:
    """Axes of at most some thousand combinations, several values on a handful of them."""
    axes = {name: [draw(st.sampled_from(values))] for name, values in VALUES.items()}
    for name in draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=6, unique=True)):
        axes[name] = draw(st.lists(st.sampled_from(VALUES[name]), min_size=1, max_size=3, unique=True))
    return axes


layouts = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in VALUES.items()}).map(
    lambda values: Layout(global_batch_size=16, **values)
)
workloads = st.builds(
    Workload,
    model=st.builds(
        replace,
        st.sampled_from([PRESETS["tiny-llama"], PRESETS["tiny-gpt"], PRESETS["tiny-moe"]]),
        tie_embeddings=st.booleans(),
        layers=st.sampled_from([4, 6]),
    ),
    sequence_length=st.sampled_from([127, 128]),
    global_batch_size=st.sampled_from([4, 6, 16]),
    accelerator=st.sampled_from([*ACCELERATORS.values(), Accelerator(2.06), Accelerator(2.03, fp8=True)]),
    depths=st.sampled_from([(), (2, 4)]),
    refuse_borderline=st.booleans(),
)


def brute_force(axes: dict[str, list[Any]], work: Workload) -> list[Layout]:
    return [
        Layout(global_batch_size=work.global_batch_size, **dict(zip(axes, values, strict=True)))
        for values in itertools.product(*axes.values())
    ]


def test_every_axis_is_tried() -> None:
    assert {*VALUES, "global_batch_size", "own"} == {field.name for field in fields(Layout)}
    assert set(VALUES) == set(AXES)


@settings(max_examples=100, deadline=None)
@given(products(), workloads)
def test_legal_points(axes: dict[str, list[Any]], work: Workload) -> None:
    space = enumerate_space(axes, work)
    for point in space.layouts:
        dp, tp, pp, cp = (
            point.data_parallel_size,
            point.tensor_parallel_size,
            point.pipeline_parallel_size,
            point.context_parallel_size,
        )
        assert dp * tp * pp * cp == point.num_gpus
        assert dp * point.micro_batch_size * point.gradient_accumulation_steps == work.global_batch_size
        assert work.shape.kv_heads % tp == work.shape.ffn_hidden % tp == work.shape.vocab % tp == 0
        stages = point.layers_by_stage(work.shape.layers)
        assert len(stages) == point.pipeline_stages
        assert [*itertools.chain(*stages)] == list(range(work.shape.layers))
        assert min(map(len, stages)) >= 1
        assert pp == 1 or (point.gradient_accumulation_steps >= pp and point.zero_stage <= 1)
        shard_group = dp * cp // point.data_parallel_replicate_size
        assert point.zero_stage == 0 or shard_group > 1
        assert shard_group % point.expert_parallel_size == 0
        assert point.rank_order is None or sorted(point.rank_order) == list(range(point.num_gpus))
        assert point.stage_layers or all(depth % point.pipeline_stages == 0 for depth in work.depths)
        # Settings without effect are all written the same way, so that no two points are the same layout.
        assert not point.sequence_parallel or (tp > 1 and point.engine == "megatron")
        assert not point.async_tensor_parallel or (point.sequence_parallel and point.compile)
        assert not point.offload_optimizer or point.engine == "deepspeed"
        assert pp > 1 or (point.pipeline_schedule, point.virtual_pipeline_stages, point.stage_layers) == (
            "1f1b",
            1,
            None,
        )
        assert point.stage_layers is None or len(set(point.stage_layers)) > 1
        assert point.rank_order is None or list(point.rank_order) != sorted(point.rank_order)
        one_round = point.gradient_accumulation_steps == 1
        assert not (point.engine == "megatron" and point.zero_stage == 1 and one_round)
    assert len(set(space.layouts)) == len(space.layouts)


@settings(max_examples=100, deadline=None)
@given(products(), workloads)
def test_counts_are_those_of_looking_at_every_combination(axes: dict[str, list[Any]], work: Workload) -> None:
    space = enumerate_space(axes, work)
    product = brute_force(axes, work)
    distinct = {canonical(point, work): None for point in product}
    refusals = {point: refusal(point, work) for point in distinct}
    assert space.combinations == len(product)
    assert space.distinct == len(distinct)
    assert set(space.layouts) == {point for point, why in refusals.items() if why is None}
    assert space.refused == dict(Counter(why[0] for why in refusals.values() if why))
    assert set(space.reasons) == set(space.refused) <= {rule.__name__ for rule in all_rules(ENGINES.values())}
    assert space.layouts == enumerate_space(axes, work).layouts


def effect(layout: Layout, work: Workload) -> dict[str, Any]:
    """What a legal layout does, told by what each part of a training step sees of it."""
    megatron, pipeline = layout.engine == "megatron", layout.pipeline_parallel_size > 1
    sharded = layout.zero_stage > 0 and layout.shard_ranks > layout.data_parallel_replicate_size
    if not sharded:
        reduced = "every step"
    elif layout.zero_stage == 1 and not (megatron and layout.gradient_accumulation_steps == 1 and not pipeline):
        reduced = "every step, to shards"
    else:
        reduced = "every microbatch, to shards"
    # DeepSpeed's ZeRO-1 sums bf16 in fp32 after the last backward pass.
    in_fp32 = layout.precision == "bf16" and layout.reduce_precision == "fp32" and not layout.offload_optimizer
    early = sharded and not pipeline and not (layout.zero_stage == 1 and in_fp32)
    sequence_parallel = megatron and layout.sequence_parallel and layout.tensor_parallel_size > 1
    return {
        "engine": layout.engine,
        "gpus": layout.rank_order or tuple(range(layout.num_gpus)),
        "mesh": [layout.coordinates(rank) for rank in range(layout.num_gpus)],
        "experts": layout.expert_parallel_size,
        "microbatch": layout.micro_batch_size,
        "stages": [list(layers) for layers in layout.layers_by_stage(work.shape.layers)] if pipeline else None,
        "schedule": (layout.pipeline_schedule, layout.virtual_pipeline_stages) if pipeline else None,
        "shards": layout.shard_ranks // layout.data_parallel_replicate_size if sharded else 1,
        "parameters": sharded and layout.zero_stage == 3,
        "gradients": reduced,
        "gradients overlapped": layout.overlap_grad_reduce if layout.shard_ranks > 1 and (megatron or early) else None,
        "gathering overlapped": (
            layout.overlap_param_gather if sharded and (megatron or layout.zero_stage == 3) else None
        ),
        "bucket": layout.bucket_size if sharded and not megatron else None,
        "optimizer": "cpu" if layout.offload_optimizer and not megatron else "gpu",
        "precision": layout.precision,
        "sums": layout.reduce_precision if layout.precision != "fp32" else "fp32",
        "norms": "sharded" if sequence_parallel else "whole",
        "asynchronous": sequence_parallel and layout.compile and layout.async_tensor_parallel,
        "compiled": layout.compile,
        "recompute": layout.recompute,
        "memory in pieces": layout.expandable_segments,
        "power": layout.power_limit_w,
    }


@settings(max_examples=150, deadline=None)
@given(products(), workloads)
def test_two_points_are_one_just_where_they_have_one_effect(axes: dict[str, list[Any]], work: Workload) -> None:
    for point in enumerate_space(axes, work).layouts[:4]:
        for axis, values in VALUES.items():
            for value in values:
                other = replace(point, **{axis: value})
                settled = canonical(other, work)
                if refusal(settled, work) is None:
                    assert canonical(settled, work) == settled
                    assert effect(settled, work) == effect(other, work), (point, axis, value)
                    assert (settled == point) == (effect(other, work) == effect(point, work)), (point, axis, value)


@settings(max_examples=300, deadline=None)
@given(layouts, workloads)
def test_rules_read_only_axes_that_are_settled(layout: Layout, work: Workload) -> None:
    """A rule that read a later axis would judge its default instead of its value."""
    point = canonical(layout, work)
    settled: dict[str, Any] = {}
    for axis in [row.name for row in SETTLING]:
        rules = rules_at(axis, engine_of(layout))
        settled[axis] = getattr(point, axis)
        early = Layout(global_batch_size=layout.global_batch_size, **({"num_gpus": point.num_gpus} | settled))
        why = refusal(early, work, rules)
        assert refusal(point, work, rules) == why
        if why:
            break


@settings(max_examples=300, deadline=None)
@given(layouts, workloads)
def test_whether_an_axis_matters_is_settled_before_it(layout: Layout, work: Workload) -> None:
    point = canonical(layout, work)
    facts = engine_of(point)
    early = Layout.plain(point.engine, point.num_gpus, point.global_batch_size)
    for axis in SETTLING:
        value = getattr(point, axis.name)
        matters = axis.matters(early) and facts.has_use(axis.name, early)
        assert matters == (axis.matters(point) and facts.has_use(axis.name, point))
        assert matters or value == axis.idle
        early = replace(early, **{axis.name: value})
        if refusal(early, work, rules_at(axis.name, facts)):
            break
    assert early == point


def test_a_space_counted_by_hand() -> None:
    """On two GPUs: dp2 with ZeRO 0 and 1, tp2, pp2, and tp2 x pp2, which wants four; one replica has no ZeRO."""
    axes = FIXED | {
        "num_gpus": [2],
        "tensor_parallel_size": [1, 2],
        "pipeline_parallel_size": [1, 2],
        "pipeline_schedule": ["1f1b"],
        "zero_stage": [0, 1],
    }
    space = enumerate_space(axes, Workload(PRESETS["tiny-llama"], 128, 4))
    assert (space.combinations, space.distinct, len(space.layouts)) == (8, 5, 4)
    assert space.refused == {"gpus_divide": 1}
    assert [point.label for point in space.layouts] == [
        "megatron 2gpu dp2 zero0 mbs1",
        "megatron 2gpu dp2 zero1 mbs1",
        "megatron 2gpu dp1 pp2 zero0 mbs1",
        "megatron 2gpu dp1 tp2 zero0 mbs1 sp",
    ]


def test_what_comes_after_a_refusal_is_not_told_apart() -> None:
    """Two stages with ZeRO-2 are one refused layout, however many ways there were to go on."""
    axes = FIXED | {
        "num_gpus": [4],
        "pipeline_parallel_size": [2],
        "pipeline_schedule": ["1f1b"],
        "zero_stage": [2],
        "recompute": ["none", "selective", "full"],
        "compile": [False, True],
    }
    space = enumerate_space(axes, Workload(PRESETS["tiny-llama"], 128, 16))
    assert (space.combinations, space.distinct, space.refused) == (6, 1, {"zero_with_pipeline": 1})


def test_a_million_combinations_take_seconds() -> None:
    axes = VALUES | {"num_gpus": [8], "precision": ["bf16"], "rank_order": [None], "micro_batch_size": [1, 2]}
    axes |= {"stage_layers": [None], "bucket_size": [BUCKET_SIZE], "expert_parallel_size": [1]}
    began = time.process_time()
    space = enumerate_space(axes, Workload(PRESETS["tiny-llama"], 128, 16, ACCELERATORS["h200"]))
    assert space.combinations == math.prod(map(len, axes.values())) > 1e6
    assert len(space.layouts) > 1000
    assert time.process_time() - began < 10


def test_more_layouts_than_there_is_memory_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "MOST_LAYOUTS", 3)
    axes = FIXED | {"num_gpus": [2], "zero_stage": [0, 1], "micro_batch_size": [1, 2]}
    work = Workload(PRESETS["tiny-llama"], 128, 16)
    with pytest.raises(ValueError, match=r"^space: more than 3 layouts up to [a-z_]+: name fewer values$"):
        enumerate_space(axes, work)
    assert len(enumerate_space(axes | {"zero_stage": [1]}, work).layouts) == 2


@pytest.mark.parametrize(("depths", "legal"), [((), [1, 2, 4]), ((2, 4), [1, 2]), ((1, 2), [1])])
def test_depth_proxies_must_split_over_the_stages_too(depths: tuple[int, ...], legal: list[int]) -> None:
    axes = FIXED | {"num_gpus": [4], "pipeline_parallel_size": [1, 2, 4]}
    work = Workload(replace(PRESETS["tiny-llama"], layers=8), 128, 16, depths=depths)
    space = enumerate_space(axes, work)
    assert sorted(point.pipeline_parallel_size for point in space.layouts) == legal
