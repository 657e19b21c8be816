"""Layers go where they take least, slow GPUs where there is least to do, and nothing moves where GPUs are alike."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from search_spaces.placement import (
    ALIKE,
    layers_by_passes,
    layers_by_speed,
    order_by_speed,
    placements,
    stage_times,
    step_by_cut,
)
from search_spaces.rules import refusal
from search_spaces.schedules import Pass, PassTime
from search_spaces.workload import Workload

AXES = ("rank_order", "stage_layers")
WORK = Workload(PRESETS["llama3-8b"], 4096, 32, gpus_per_node=4)
PIPE = Layout("megatron", 8, 32, pipeline_parallel_size=2, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("times", "cut"),
    [
        ((1.0, 1.0), (32, 32)),
        ((1.05, 1.0), (31, 33)),
        ((1.0, 1.1), (34, 30)),
        ((1.2, 1.0), (29, 35)),
        ((1.02, 1.0), (32, 32)),
    ],
)
def test_layers_in_proportion_to_speed(times: tuple[float, float], cut: tuple[int, int]) -> None:
    assert layers_by_speed(64, times) == cut


@given(times=st.lists(st.floats(1, 3), min_size=2, max_size=3), layers=st.integers(3, 14))
def test_no_other_division_is_faster(times: list[float], layers: int) -> None:
    def longest(cut: tuple[int, ...]) -> float:
        return max(count * seconds for count, seconds in zip(cut, times, strict=True))

    found = layers_by_speed(layers, times)
    assert sum(found) == layers
    cuts = itertools.product(range(1, layers + 1), repeat=len(times))
    best = min(longest(cut) for cut in cuts if sum(cut) == layers)
    assert longest(found) <= (1 + ALIKE) * best * (1 + 1e-9)


def test_slow_gpus_share_a_stage_within_their_node() -> None:
    """Stages of a node each: the node with the slowest GPU has no head to compute."""
    assert order_by_speed(PIPE, WORK, [1, 1, 1, 1, 1, 1.1, 1, 1]) == (5, 4, 6, 7, 0, 1, 2, 3)
    four = replace(PIPE, pipeline_parallel_size=4, tensor_parallel_size=2)
    order = order_by_speed(four, WORK, [1, 1, 1, 1.1, 1, 1, 1, 1.2])
    assert {frozenset(order[:4]), frozenset(order[4:])} == {frozenset(range(4)), frozenset(range(4, 8))}
    assert stage_times(replace(four, rank_order=order), [1, 1, 1, 1.1, 1, 1, 1, 1.2]) == [1.2, 1, 1.1, 1]


def test_candidates_are_legal_and_differ_from_the_plain_layout() -> None:
    found = placements(PIPE, WORK, {5: 1.2}, AXES)
    assert len(found) == 3
    assert PIPE not in found
    assert all(refusal(one, WORK) is None for one in found)
    assert [one.stage_layers for one in found] == [None, (17, 15), (15, 17)]
    assert [one.rank_order is None for one in found] == [False, True, False]
    assert placements(PIPE, WORK, {5: 1.2}, ("stage_layers",)) == [replace(PIPE, stage_layers=(17, 15))]


def test_nothing_is_tried_where_gpus_are_alike_or_all_do_the_same() -> None:
    assert placements(PIPE, WORK, {}, AXES) == []
    assert placements(PIPE, WORK, {worker: 1 + 0.0005 * worker for worker in range(8)}, AXES) == []
    assert placements(replace(PIPE, pipeline_parallel_size=1), WORK, {5: 1.2}, AXES) == []


HEADLESS = replace(WORK.shape, vocab=1)
TWO = Layout("megatron", 2, 4, pipeline_parallel_size=2, pipeline_schedule="gpipe")
FORWARD_S, BACKWARD_S = 0.1, 0.3


def passes_of(*times: float, first: tuple[float, float] = (1.0, 1.0)) -> list[PassTime]:
    """By stage, how many times as long as usual its passes take, and those of the first microbatch, forward and
    backward, beside the others."""
    usual = ((Pass.FORWARD, FORWARD_S, first[0]), (Pass.BACKWARD, BACKWARD_S, first[1]))
    return [
        PassTime(stage, step, seconds * times[stage] * more, seconds * times[stage])
        for stage in range(len(times))
        for step, seconds, more in usual
    ]


def test_a_step_of_gpipe_by_the_layers_of_its_stages() -> None:
    """With a slow first stage the second waits for each of its passes; with fewer layers there it is the other way."""
    step_s = step_by_cut(TWO, HEADLESS, passes_of(1.2, 1.0, first=(1.1, 0.9)))
    first = {stage: 1.1 * FORWARD_S * more for stage, more in enumerate((1.2, 1.0))}
    slow_first = first[0] + 3 * 1.2 * FORWARD_S + FORWARD_S + 0.9 * BACKWARD_S + (0.9 + 3) * 1.2 * BACKWARD_S
    assert step_s((16, 16)) == pytest.approx(slow_first)
    less, more = 1.2 * 12 / 16, 20 / 16
    slow_last = (
        1.1 * FORWARD_S * less + (1.1 + 3) * FORWARD_S * more + (0.9 + 3) * BACKWARD_S * more + BACKWARD_S * less
    )
    assert step_s((12, 20)) == pytest.approx(slow_last)


@given(
    times=st.lists(st.floats(1, 1.5), min_size=2, max_size=2),
    first=st.tuples(st.floats(0.9, 1.3), st.floats(0.9, 1.1)),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
def test_no_other_cut_is_faster_by_passes(times: list[float], first: tuple[float, float], schedule: str) -> None:
    layout = replace(TWO, pipeline_schedule=schedule)
    passes = passes_of(*times, first=first)
    step_s = step_by_cut(layout, HEADLESS, passes)
    found = layers_by_passes(layout, HEADLESS, passes)
    assert sum(found) == 32
    best = min(step_s((count, 32 - count)) for count in range(1, 32))
    assert step_s(found) <= (1 + ALIKE) * best * (1 + 1e-9)


def test_a_heavy_head_is_worth_layers_and_stages_that_are_alike_none() -> None:
    assert layers_by_passes(TWO, HEADLESS, passes_of(1.0, 1.0)) == (16, 16)
    assert layers_by_passes(TWO, HEADLESS, passes_of(1.002, 1.0)) == (16, 16)
    blocks = 16 * WORK.shape.block_parameters
    head = WORK.shape.vocab * WORK.shape.hidden
    found = layers_by_passes(TWO, WORK.shape, passes_of(1.0, (blocks + head) / blocks))
    assert found == (17, 15), "the head is as much as 2.4 of its layers"


def test_stages_keep_a_layer_each() -> None:
    shape = replace(HEADLESS, layers=2)
    assert layers_by_passes(TWO, shape, passes_of(3.0, 1.0)) == (1, 1)


def test_more_stages_give_their_layers_to_those_that_have_time() -> None:
    four = replace(TWO, num_gpus=4, pipeline_parallel_size=4, global_batch_size=16, pipeline_schedule="1f1b")
    found = layers_by_passes(four, HEADLESS, passes_of(1.0, 1.3, 1.0, 1.0))
    assert sum(found) == 32
    assert found[1] == min(found) < 8 < max(found)


def test_passes_decide_where_they_were_measured_and_go_with_the_gpus_that_take_them() -> None:
    """The second stage is slow by its worker; in the order that puts it first, the first stage is."""
    axes = ("stage_layers", "rank_order")
    work = Workload(HEADLESS, 4096, 32, gpus_per_node=4)
    found = placements(TWO, work, {}, axes, passes_of(1.2, 1.0))
    assert [(one.rank_order, one.stage_layers) for one in found] == [(None, (14, 18))]
    (turned, cut, both) = placements(TWO, work, {1: 1.2}, axes, passes_of(1.0, 1.2))
    assert (turned.rank_order, turned.stage_layers) == ((1, 0), None)
    assert (cut.rank_order, cut.stage_layers) == (None, (18, 14))
    assert (both.rank_order, both.stage_layers) == ((1, 0), (14, 18))
