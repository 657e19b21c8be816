"""Blocks with experts are compiled, and not left alone by the compiler, in every mode that rules allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from torch.profiler import ProfilerActivity, profile

from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from search_spaces.network import Network
from tests.trainables.conftest import RunRanks
from trainables.measure import Procedure
from trainables.program import Place, Progress, RankReport, TrialRequest
from trainables.slice import Slice
from trainables.slice_rank import SliceRank
from trainables.training import Training

FREE = Network("collectives that take no time", 8, 1e30, 1e30, 1e-30, 1e-30)
ONCE = Procedure(1, 9.0, 0.0, 0.0, 1)


@dataclass(frozen=True)
class Counted(Slice):
    """A rank alone, whose `problems` are how many norms one of its steps has as operators of their own."""

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        rank = SliceRank(self, request, place, on_progress)
        rank.step()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            rank.step()
        norms = sum(event.count for event in profiled.key_averages() if event.key == "aten::rms_norm")
        return RankReport(0, {}, None, {}, (), (), None, {}, problems=(str(norms),))


def norms(run_ranks: RunRanks, layout: Layout) -> int:
    program = Counted(Training(PRESETS["tiny-moe"], "synthetic", 64, seed=0), rank=0, network=FREE)
    (outcome,) = run_ranks(TrialRequest(f"counted {layout.label}", layout, program, ONCE, 240.0))
    assert outcome.report is not None, outcome.cause
    return int(*outcome.report.problems)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_norms_of_compiled_blocks_are_part_of_their_kernels(run_ranks: RunRanks, engine: str, recompute: str) -> None:
    eager, compiled = (
        norms(run_ranks, Layout(engine, 1, 1, precision="fp32", recompute=recompute, compile=compile_it))
        for compile_it in (False, True)
    )
    blocks = PRESETS["tiny-moe"].layers
    assert eager >= 2 * blocks
    assert compiled == 1, "that of the head alone"
