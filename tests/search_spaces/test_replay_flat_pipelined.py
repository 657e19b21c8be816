"""A rank of DeepSpeed's pipeline has its stage's states, and reserves what such ranks did."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import DATA
from benchmarks.judge.earlier import reserved_then
from benchmarks.judge.search import Table
from benchmarks.measure.blind import read
from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from search_spaces.replay import replayed
from search_spaces.replay.flat_pipelined import FlatPipelined
from search_spaces.workload import Workload
from service.spec import load_spec
from tests.search_spaces.test_replay import work_of

GPT = PRESETS["gpt3-1.3b"]
WORKSPACES = 2 * 2**25
ENGINES_NOW = ("blind2_2xh200", "blind5_2xh200", "blind6_2xh100", "blind8_2xh200", "blind9_2xh200", "blind_node_4xh200")


def pipeline(stages: int = 2, replicas: int = 1, **settings: Any) -> Layout:
    settings = {"pipeline_parallel_size": stages, "zero_stage": int(replicas > 1)} | settings
    return replace(Layout("deepspeed", stages * replicas, 8 * replicas), **settings)


def reserved(layout: Layout, rank: int) -> float:
    found = replayed(layout, Workload(GPT, 2048, layout.global_batch_size), rank)
    assert found is not None
    assert found.most <= found.reserved
    return found.reserved


def measured() -> Iterator[tuple[Layout, int, float]]:
    """Layouts, ranks, and by how much the replay is off."""
    for name in ENGINES_NOW:
        for row in read(DATA / f"{name}.measured.jsonl.xz"):
            layout = Layout.from_dict(row["config"])
            if layout.engine != "deepspeed" or layout.pipeline_parallel_size == 1:
                continue
            if (work := work_of(row["spec"])).shape.num_experts:
                continue
            for rank in row["full"]["ranks"]:
                found = replayed(layout, work, stage := rank["coordinates"]["pp"])
                assert found is not None
                yield layout, stage, found.reserved / 2**30 / rank["peak_memory_gib"] - 1


@pytest.mark.slow
def test_ranks_that_were_measured() -> None:
    errors = list(measured())
    eager = [abs(error) for layout, _, error in errors if not layout.compile]
    compiled = [abs(error) for layout, _, error in errors if layout.compile]
    assert (len(eager), len(compiled)) == (4, 16)
    assert max(eager) < 0.0025
    assert statistics.fmean(compiled) < 0.006
    assert max(compiled) < 0.018


@pytest.mark.parametrize("name", ["llama3_12l_2xh200", pytest.param("llama3_12l_4xh200", marks=pytest.mark.slow)])
def test_a_sweep_of_the_earlier_engine(name: str) -> None:
    table = DATA / f"{name}.csv"
    work, errors = load_spec(table.with_suffix(".yaml")).workload.run, list[float]()
    for layout, result in Table(table).results.items():
        if layout.engine == "deepspeed" and layout.pipeline_parallel_size > 1 and result.status == "ok":
            ranks = range(layout.pipeline_parallel_size)
            then = max(reserved_then(layout, work, rank) for rank in ranks)
            errors.append(abs(then / 2**30 / (result.metrics["peak_memory_gib"] or 0.0) - 1))
    assert len(errors) >= 4
    assert statistics.fmean(errors) < 0.02
    assert max(errors) < 0.055


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("stages", "rank"), [(2, 0), (2, 1), (4, 2)])
def test_between_steps_a_rank_has_its_states_its_buffer_and_the_last_logits_with_what_it_sent_for_them(
    recompute: str, stages: int, rank: int
) -> None:
    layout = pipeline(stages, recompute=recompute)
    training = FlatPipelined(GPT, 2048, layout, rank)
    values = sum(sum(parameters.values()) for parameters in training.groups.values())
    last = 2 * 2 * 2048 * (GPT.vocab + GPT.hidden) if rank == stages - 1 else 0  # logits, and gradients sent for them
    for _ in range(3):
        training.step()
        states = (2 + 4 + 4 + 8) * values + 2 * 2048 * GPT.hidden + last
        assert training.allocator.used == pytest.approx(states + WORKSPACES, abs=16 * 2**21)


def test_replicas_share_the_optimizer_s_states_alone() -> None:
    alone, shared = pipeline(), pipeline(replicas=2)
    training = FlatPipelined(GPT, 2048, alone, 0)
    values = sum(sum(parameters.values()) for parameters in training.groups.values())
    assert reserved(alone, 0) - reserved(shared, 0) == pytest.approx(12 * values / 2, rel=0.02)


def test_earlier_ranks_have_more_passes_in_flight() -> None:
    layout = pipeline(4)
    assert reserved(layout, 1) > reserved(layout, 2)


def test_experts_and_parts_of_sequences_are_left_to_the_formula() -> None:
    work = Workload(PRESETS["tiny-moe"], 2048, 8)
    assert replayed(pipeline(), work) is None
    assert replayed(pipeline(context_parallel_size=2, num_gpus=4), Workload(GPT, 2048, 8)) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_compiled_blocks_that_are_computed_again_hold_gradients_beside_what_they_come_from(rank: int) -> None:
    """All six that are as wide as a network within, where eager ones of a Llama let go of some before they have others:
    one was measured with each half of a model of long sequences."""
    errors = []
    for row in read(DATA / "blind10_2xh200.measured.jsonl.xz"):
        layout = Layout.from_dict(row["config"])
        if layout.engine == "deepspeed" and layout.pipeline_parallel_size > 1 and layout.recompute == "full":
            found = replayed(layout, work_of(row["spec"]), rank)
            assert found is not None
            errors.append(found.reserved / 2**30 / row["full"]["ranks"][rank]["peak_memory_gib"] - 1)
    assert len(errors) == 1
    assert abs(errors[0]) < 0.005


def test_what_a_last_stage_sent_is_in_the_way_of_its_next_logits() -> None:
    """Four pipelines of a Llama, of which one was short of a whole tensor of logits."""
    errors = {}
    for row in read(DATA / "slices_again_2xh200.measured.jsonl.xz"):
        layout = Layout.from_dict(row["config"])
        if layout.engine == "deepspeed" and layout.pipeline_parallel_size > 1:
            found = replayed(layout, work_of(row["spec"]), rank=1)
            assert found is not None
            errors[layout.label] = abs(found.reserved / 2**30 / row["full"]["ranks"][1]["peak_memory_gib"] - 1)
    assert len(errors) == 4
    assert max(errors.values()) < 0.001, errors
