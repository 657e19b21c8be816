"""Blocks that are alike are compiled once and as a whole, whatever engines do to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from tests.trainables.conftest import RunRanks
from tests.trainables.one_rank import one_rank, tokens
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


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_products_are_computed_while_keys_are_gathered_and_their_gradients_summed(mode: str) -> None:
    model = PRESETS["tiny-llama"]
    layout = replace(megatron(2, cp=2, zero=1, recompute=mode), precision="bf16", compile=True)
    with one_rank(model, layout) as (engine, _):
        batches = iter([(tokens(layout, model),) * 2] * layout.gradient_accumulation_steps)
        _, graphs = run_and_get_code(engine.step, batches)
    sent, waited = r"(?:all_gather_into|reduce_scatter)_tensor\.default\(", r"wait_tensor\.default\("
    beside = [found.count("mm(") for graph in graphs for found in re.findall(f"{sent}.*?{waited}", graph, re.DOTALL)]
    assert len(beside) >= 2
    assert all(beside)
