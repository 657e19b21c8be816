"""Layers go where they take least, slow GPUs where there is least to do, and nothing moves where GPUs are alike."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from search_spaces.placement import ALIKE, layers_by_speed, order_by_speed, placements, stage_times
from search_spaces.rules import refusal
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
