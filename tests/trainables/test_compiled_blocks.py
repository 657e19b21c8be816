"""Blocks that are alike are compiled once and as a whole, whatever engines do to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from torch._dynamo.utils import counters

from search_spaces.layout import Layout
from tests.trainables.conftest import RunRanks
from tests.trainables.test_deepspeed_memory import MANY_SMALL_PARTS
from tests.trainables.test_parity import deepspeed, megatron, reports, request
from trainables.program import Place, Progress, RankReport, TrialRequest
from trainables.rank import Rank
from trainables.training import Training
from trainables.world import GangWorld

MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class Graphs(Training):
    """A rank whose `problems` are how many graphs two of its steps are compiled to."""

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        rank = Rank(self, request, place, on_progress, GangWorld)
        for _ in range(2):
            rank.step()
        return RankReport(0, {}, None, {}, (), (), None, {}, problems=(str(counters["stats"]["unique_graphs"]),))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        deepspeed(2, zero=2, mbs=1),
        deepspeed(2, zero=3, mbs=1),
        *(make(2, cp=2, zero=1, recompute=mode) for make in (deepspeed, megatron) for mode in MODES),
    ],
    ids=lambda layout: layout.label,
)
def test_there_is_a_graph_of_a_block_and_one_of_the_loss(layout: Layout, run_ranks: RunRanks) -> None:
    """With torch 2.11 too, where DeepSpeed's own linear layers were a graph for each block. Blocks that were computed
    again, and whose graph ended at attention between ranks, were not compiled at all."""
    trial = request(replace(layout, precision="bf16", compile=True), MANY_SMALL_PARTS)
    for report in reports(run_ranks(replace(trial, program=Graphs(**vars(trial.program))))):
        assert report.problems == ("2",)
