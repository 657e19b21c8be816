"""Blocks that are alike are compiled once, whatever DeepSpeed does to their parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from torch._dynamo.utils import counters

from tests.trainables.conftest import RunRanks
from tests.trainables.test_deepspeed_memory import MANY_SMALL_PARTS
from tests.trainables.test_parity import deepspeed, reports, request
from trainables.program import Place, Progress, RankReport, TrialRequest
from trainables.rank import Rank
from trainables.training import Training
from trainables.world import GangWorld


@dataclass(frozen=True)
class Graphs(Training):
    """A rank whose `problems` are how many graphs two of its steps are compiled to."""

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        rank = Rank(self, request, place, on_progress, GangWorld)
        for _ in range(2):
            rank.step()
        return RankReport(0, {}, None, {}, (), (), None, {}, problems=(str(counters["stats"]["unique_graphs"]),))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_there_is_a_graph_of_a_block_and_one_of_the_loss(zero: int, run_ranks: RunRanks) -> None:
    """With torch 2.11 too, where DeepSpeed's own linear layers were a graph for each block."""
    trial = request(deepspeed(2, zero=zero, mbs=1, precision="bf16", compile=True), MANY_SMALL_PARTS)
    for report in reports(run_ranks(replace(trial, program=Graphs(**vars(trial.program))))):
        assert report.problems == ("2",)
