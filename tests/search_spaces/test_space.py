"""The enumerated space: each layout once, all counts add up, every legal point obeys the arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.config import TrialConfig
from search_spaces.models import PRESETS
from search_spaces.rules import RULES, Workload
from search_spaces.space import canonical, enumerate_space

VALUES: dict[str, list[Any]] = {
    "engine": ["megatron", "deepspeed"],
    "num_gpus": [1, 2, 3, 4, 8],
    "tensor_parallel_size": [1, 2, 4],
    "pipeline_parallel_size": [1, 2, 4],
    "zero_stage": [0, 1, 2, 3],
    "micro_batch_size": [1, 2, 3, 4],
    "recompute": ["none", "full"],
    "sequence_parallel": [True, False],
    "compile": [False, True],
    "precision": ["bf16", "fp32"],
}
axes = st.fixed_dictionaries(
    {name: st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True) for name, values in VALUES.items()}
)
workloads = st.builds(
    Workload,
    model=st.builds(
        replace, st.sampled_from([PRESETS["tiny-llama"], PRESETS["tiny-gpt"]]), tie_embeddings=st.booleans()
    ),
    sequence_length=st.sampled_from([127, 128]),
    global_batch_size=st.sampled_from([4, 6, 16]),
    memory_gib=st.sampled_from([None, 0.001, 1.0]),
)


@settings(max_examples=80, deadline=None)
@given(axes, workloads)
def test_legal_points(axes: dict[str, list[Any]], work: Workload) -> None:
    space = enumerate_space(axes, work)
    for point in space.points:
        dp, tp, pp = point.data_parallel_size, point.tensor_parallel_size, point.pipeline_parallel_size
        assert dp * tp * pp == point.num_gpus
        assert dp * point.micro_batch_size * point.gradient_accumulation_steps == work.global_batch_size
        assert work.model.kv_heads % tp == work.model.ffn_hidden % tp == work.model.vocab % tp == 0
        assert work.model.layers % pp == 0
        assert pp == 1 or (point.gradient_accumulation_steps >= pp and point.zero_stage <= 1)
        # Settings without effect are all written the same way, so that no two points are the same layout.
        assert point.zero_stage == 0 or dp > 1
        assert not point.sequence_parallel or (tp > 1 and point.engine == "megatron")
        one_round = point.gradient_accumulation_steps == 1
        assert not (point.engine == "megatron" and point.zero_stage == 1 and one_round)
    assert len(set(space.points)) == len(space.points)


@settings(max_examples=80, deadline=None)
@given(axes, workloads)
def test_counts_add_up(axes: dict[str, list[Any]], work: Workload) -> None:
    space = enumerate_space(axes, work)
    product = [
        TrialConfig(global_batch_size=work.global_batch_size, **dict(zip(axes, values, strict=True)))
        for values in itertools.product(*axes.values())
    ]
    distinct = {canonical(point) for point in product}
    assert space.combinations == len(product)
    assert space.distinct == len(distinct)
    assert len(space.points) + sum(space.refused.values()) == space.distinct
    assert set(space.reasons) == set(space.refused) <= {rule.__name__ for rule in RULES}
    assert set(space.points) == {p for p in distinct if all(rule(p, work) is None for rule in RULES)}


@settings(max_examples=30, deadline=None)
@given(axes, workloads)
def test_order_is_fixed(axes: dict[str, list[Any]], work: Workload) -> None:
    assert enumerate_space(axes, work).points == enumerate_space(axes, work).points


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in VALUES.items()}))
def test_canonical_form_is_its_own(fields: dict[str, Any]) -> None:
    point = canonical(TrialConfig(global_batch_size=16, **fields))
    assert canonical(point) == point
    assert replace(point, zero_stage=0, sequence_parallel=False) == replace(
        TrialConfig(global_batch_size=16, **fields), zero_stage=0, sequence_parallel=False
    )


def test_a_space_counted_by_hand() -> None:
    """On two GPUs: dp2 with ZeRO 0 and 1, tp2, pp2, and tp2 x pp2, which wants four; one replica has no ZeRO."""
    one_each = {name: values[:1] for name, values in VALUES.items()}
    axes = one_each | {
        "num_gpus": [2],
        "tensor_parallel_size": [1, 2],
        "pipeline_parallel_size": [1, 2],
        "zero_stage": [0, 1],
    }
    space = enumerate_space(axes, Workload(PRESETS["tiny-llama"], 128, 4))
    assert (space.combinations, space.distinct, len(space.points)) == (8, 5, 4)
    assert space.refused == {"gpus_divide": 1}
    assert [point.label for point in space.points] == [
        "megatron 2gpu dp2 tp1 pp1 zero0 mbs1",
        "megatron 2gpu dp2 tp1 pp1 zero1 mbs1",
        "megatron 2gpu dp1 tp1 pp2 zero0 mbs1",
        "megatron 2gpu dp1 tp2 pp1 zero0 mbs1 sp",
    ]
