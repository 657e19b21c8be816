"""Where the tokens of a mixture of experts go in a slice, against the whole gang of the same layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pytest
from torch import Tensor
from torch.distributed import ProcessGroup

from search_spaces.kinds import Share
from search_spaces.layout import Layout
from search_spaces.network import Collective
from tests.trainables.conftest import RunRanks
from tests.trainables.ledgers import Written, calls_of
from tests.trainables.test_parity import (
    GPIPE,
    INTERLEAVED,
    MIXTURE,
    SEQUENCE_LENGTH,
    V_SHAPED,
    deepspeed,
    megatron,
    reports,
    request,
)
from trainables import moe
from trainables.program import Place, Progress, RankReport, TrialRequest

CLOSE = 0.15
"""By how much shares of tokens in a slice and in a gang may differ: hidden states in a slice are not the model's."""


@dataclass(frozen=True)
class Routed(Written):
    """The same training. Reports, in `environment`, the tokens that came to the rank in each exchange, over those that
    it sent."""

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        shares: list[float] = []
        exchange = moe._exchange

        def noted(rows: Tensor, receives: list[int], sends: list[int], group: ProcessGroup) -> Tensor:
            shares.append(sum(receives) / sum(sends))
            return exchange(rows, receives, sends, group)

        moe._exchange = noted
        report = super().run(request, place, on_progress)
        return replace(report, environment=report.environment | {"shares": json.dumps(shares[::2])})  # there, not back


def run(run_ranks: RunRanks, layout: Layout, program: Written) -> list[RankReport]:
    trial = request(layout, MIXTURE)
    return reports(run_ranks(replace(trial, trial_id=f"routed {program} {trial.trial_id}", program=program)))


@pytest.mark.parametrize(
    "layout",
    [
        megatron(2, ep=2, zero=2, mbs=1),
        *[
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in (
                megatron(2, ep=2, mbs=1, compile=True),
                megatron(4, ep=4, zero=2, mbs=1),
                megatron(4, ep=2, zero=3, recompute="full"),
                megatron(4, ep=2, zero=3, recompute="selective", compile=True, precision="bf16"),
                megatron(4, ep=2, tp=2, sp=True, zero=1),
                megatron(4, ep=2, **GPIPE, zero=1, recompute="selective"),
                megatron(4, ep=2, **V_SHAPED),
                megatron(4, ep=2, **INTERLEAVED, recompute="full", mbs=1),
            )
        ],
    ],
    ids=lambda layout: layout.label,
)
def test_the_fullest_rank_gets_as_many_tokens_as_in_a_gang(layout: Layout, run_ranks: RunRanks) -> None:
    among: Any = [json.loads(r.environment["shares"]) for r in run(run_ranks, layout, Routed(MIXTURE, SEQUENCE_LENGTH))]
    ranks = layout.num_gpus // layout.pipeline_parallel_size
    fullest = fmean(max(shares) for shares in zip(*among[:ranks], strict=True))
    (report,) = run(run_ranks, layout, Routed(MIXTURE, SEQUENCE_LENGTH, 0, Share.FULLEST))
    found = fmean(json.loads(report.environment["shares"]))
    assert fullest > 1.05
    assert 1 + 0.4 * (fullest - 1) < found < fullest + CLOSE, "where all experts look alike it is 1"


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
