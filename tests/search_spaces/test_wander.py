"""What the last of several ranks is late by, against what is known of normal variables and against draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from search_spaces.layout import Layout
from search_spaces.wander import meeting, waited


@pytest.mark.parametrize(
    ("ranks", "largest"), [(2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (8, 1.4236)]
)
def test_the_last_of_ranks_alike_is_late_by_the_mean_of_the_largest(ranks: int, largest: float) -> None:
    assert waited([0.0] * ranks, 0.02) == pytest.approx(0.02 * largest, rel=1e-5)


@pytest.mark.parametrize("ahead", [(0.0, 0.01), (0.0, 0.0, 0.03, 0.05), (0.0, 0.02, 0.02, 0.02, 0.02)])
def test_ranks_that_are_ahead_are_waited_for_less(ahead: Sequence[float]) -> None:
    drawn = np.random.default_rng(0).normal(0.0, 0.02, (200_000, len(ahead))) - np.array(ahead)
    assert waited(ahead, 0.02) == pytest.approx(drawn.max(axis=1).mean(), abs=2e-4)
    assert waited(ahead, 0.02) < waited([0.0] * len(ahead), 0.02)


def test_nobody_is_waited_for_alone_or_where_nothing_wanders() -> None:
    assert waited([0.0], 0.02) == 0.0
    assert waited([0.0, 0.01], 0.0) == 0.0


def test_ranks_of_tensors_sequences_and_experts_meet_in_every_block_and_replicas_and_stages_do_not() -> None:
    whole = Layout("megatron", 16, 16, tensor_parallel_size=2, context_parallel_size=2, expert_parallel_size=4)
    assert meeting(whole) == 8
    assert meeting(Layout("megatron", 16, 16, tensor_parallel_size=2, pipeline_parallel_size=4)) == 2
    assert meeting(Layout("megatron", 16, 16)) == 1
