"""Every pipeline rank has one kind that stands for it, and the fullest of each kind is the one to measure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import DATA
from benchmarks.measure.blind import read
from search_spaces.kinds import RankKind, kinds, others_in_memory
from search_spaces.layout import Layout
from search_spaces.memory import estimate
from search_spaces.models import PRESETS
from search_spaces.workload import Workload
from tests.search_spaces.test_replay import work_of

WORK = Workload(replace(PRESETS["tiny-llama"], layers=16), 128, 64)
PIPELINE = Layout("megatron", 16, 64, tensor_parallel_size=2, pipeline_parallel_size=4)


def test_without_a_pipeline_there_is_one_kind() -> None:
    assert kinds(Layout("megatron", 1024, 1024, tensor_parallel_size=8), WORK) == (RankKind(0, 0, (0,)),)


def test_ends_differ_from_what_is_between() -> None:
    """Of 1F1B's ranks the earlier keeps more passes; four GPUs share each pipeline rank here."""
    assert kinds(PIPELINE, WORK) == (RankKind(0, 0, (0,)), RankKind(4, 1, (1, 2)), RankKind(12, 3, (3,)))


def test_both_ends_of_a_v_are_on_one_rank() -> None:
    layout = replace(PIPELINE, pipeline_schedule="zbv_zero_bubble", virtual_pipeline_stages=2)
    assert [kind.stands_for for kind in kinds(layout, WORK)] == [(0,), (1, 2, 3)]


def test_uneven_stages_are_kinds_of_their_own() -> None:
    layout = replace(PIPELINE, stage_layers=(3, 4, 6, 3))
    assert [kind.stands_for for kind in kinds(layout, WORK)] == [(0,), (1,), (2,), (3,)]
    # As many layers in all, but in other stages.
    virtual = replace(
        PIPELINE,
        num_gpus=12,
        global_batch_size=66,
        pipeline_parallel_size=3,
        pipeline_schedule="interleaved_1f1b",
        virtual_pipeline_stages=2,
        stage_layers=(1, 2, 3, 4, 3, 3),
    )
    assert [kind.stands_for for kind in kinds(virtual, WORK)] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_ranks_that_sum_up_their_own_gradients_differ_in_memory(engine: str, zero_stage: int) -> None:
    layout = Layout(engine, 4, 32, zero_stage=zero_stage)
    (kind,) = kinds(layout, WORK)
    differ = engine == "deepspeed" and zero_stage == 2
    assert {one.rank for one in (kind, *others_in_memory(layout, WORK))} == ({0, 3} if differ else {0})
    assert others_in_memory(replace(layout, pipeline_parallel_size=2), WORK) == ()


def test_ranks_that_hold_other_experts_are_of_one_kind() -> None:
    work = replace(WORK, model=replace(PRESETS["tiny-moe"], layers=16))
    layout = replace(PIPELINE, tensor_parallel_size=1, expert_parallel_size=4)
    assert kinds(layout, work) == kinds(replace(layout, expert_parallel_size=1), work)
    assert kinds(replace(layout, pipeline_parallel_size=1), work) == (RankKind(0, 0, (0,)),)


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_zero_bubble", 2),
        ("zbv_zero_bubble", 2),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_fullest_is_measured(schedule: str, virtual: int, recompute: str) -> None:
    layout = replace(
        PIPELINE,
        pipeline_parallel_size=8,
        pipeline_schedule=schedule,
        virtual_pipeline_stages=virtual,
        recompute=recompute,
    )
    found = kinds(layout, WORK)
    assert sorted(rank for kind in found for rank in kind.stands_for) == list(range(8))
    memory = estimate(layout, WORK, range(8)).ranks
    for kind in found:
        assert layout.coordinates(kind.rank) == {"pp": kind.pipeline_rank, "dp": 0, "cp": 0, "tp": 0}
        assert memory[kind.pipeline_rank].needed == max(memory[rank].needed for rank in kind.stands_for)


@pytest.mark.parametrize(
    "name",
    [
        "blind9_2xh200",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("blind2_2xh200", "blind5_2xh200", "shards_2xh200", "zero_2xh200")
        ),
    ],
)
def test_of_ranks_that_sum_up_their_own_gradients_the_one_that_took_most_is_measured(name: str) -> None:
    differed = 0
    for row in read(DATA / f"{name}.measured.jsonl.xz"):
        layout, work = Layout.from_dict(row["config"]), work_of(row["spec"])
        if (layout.engine, layout.zero_stage, work.shape.num_experts) != ("deepspeed", 2, 0):
            continue
        peaks = {rank["rank"]: rank["peak_memory_gib"] for rank in row["full"]["ranks"]}
        (kind,) = kinds(layout, work)
        assert peaks[kind.rank] == max(peaks.values())
        differed += len(set(peaks.values())) > 1
    assert differed > 1
