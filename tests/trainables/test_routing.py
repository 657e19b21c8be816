"""Of how many tokens DeepSpeed's experts make room in a slice, against the whole gang of the same layout."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from search_spaces.layout import Layout
from search_spaces.network import Collective
from tests.trainables.conftest import RunRanks
from tests.trainables.ledgers import Written, calls_of
from tests.trainables.test_parity import MIXTURE, SEQUENCE_LENGTH, deepspeed, reports, request
from trainables.program import RankReport

CLOSE = 0.15
"""By how much what is exchanged in a slice and in a gang may differ: hidden states in a slice are not the model's."""


def run(run_ranks: RunRanks, layout: Layout, program: Written) -> list[RankReport]:
    trial = request(layout, MIXTURE)
    return reports(run_ranks(replace(trial, trial_id=f"routed {program} {trial.trial_id}", program=program)))


@pytest.mark.parametrize(
    "layout",
    [
        deepspeed(2, ep=2, zero=1, mbs=1),
        *[
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in (
                deepspeed(2, ep=2),
                deepspeed(4, ep=2, zero=2, recompute="full"),
                deepspeed(4, ep=4, zero=2, precision="bf16", compile=True),
            )
        ],
    ],
    ids=lambda layout: layout.label,
)
def test_deepspeed_makes_as_much_room_for_each_expert_as_in_a_gang(layout: Layout, run_ranks: RunRanks) -> None:
    (alone,) = run(run_ranks, layout, Written(MIXTURE, SEQUENCE_LENGTH, 0))
    among = run(run_ranks, layout, Written(MIXTURE, SEQUENCE_LENGTH))[0]
    sizes = [
        fmean(call.size for step in calls_of(report) for call in step if call.kind is Collective.ALL_TO_ALL)
        for report in (alone, among)
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=CLOSE)
