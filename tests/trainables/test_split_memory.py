"""What a tensor-parallel rank holds, as `search_spaces.replay` has it and as the engine does, on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.replay import training
from search_spaces.replay.split import Split
from tests.trainables.conftest import RunRanks
from tests.trainables.live_bytes import LiveBytes
from tests.trainables.test_parity import reports, request
from tests.trainables.test_slice import NETWORK
from trainables.program import Place, Progress, RankReport, TrialRequest
from trainables.slice import Slice
from trainables.slice_rank import SliceRank
from trainables.training import Training

LOGITS = ModelShape("gpt", 2, 256, 4, 4, 1024, 2048, 64)
"""Whose loss is the fullest moment."""

BLOCKS = ModelShape("gpt", 4, 128, 4, 4, 512, 256, 256)
"""Whose blocks are; norms of a Llama are others on a CPU than on a GPU."""

SEQUENCES = 2


@dataclass(frozen=True)
class SecondStep(Slice):
    """A rank alone, whose peak of memory is that of its second step. In the first one DTensor asks, by tensors that
    have no memory and are counted all the same, what each operator's result looks like."""

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        gc.disable()  # or when tensors in cycles go would depend on what else there is
        with LiveBytes() as live:
            rank = SliceRank(self, request, place, on_progress)
            rank.step()
            live.most = 0
            rank.step()
        return RankReport(0, {}, None, {}, (), (), live.most / 2**30, {})


def layout(tensor: int = 2, **settings: object) -> Layout:
    split = Layout("megatron", tensor, 2 * SEQUENCES, micro_batch_size=SEQUENCES, tensor_parallel_size=tensor)
    return replace(split, **{"sequence_parallel": True} | settings)  # type: ignore[arg-type]


def held_in_replay(model: ModelShape, split: Layout) -> int:
    rank = Split(model, SEQUENCES * model.max_sequence_length, split.gradient_accumulation_steps, split)
    for _ in range(2):
        rank.step()
    return rank.allocator.most


@pytest.mark.parametrize(
    ("model", "split"),
    [
        (LOGITS, layout()),
        (BLOCKS, layout(recompute="selective")),
        *[
            pytest.param(model, split, marks=pytest.mark.slow)
            for model in (LOGITS, BLOCKS, replace(BLOCKS, tie_embeddings=True))
            for split in (
                layout(),
                layout(recompute="selective"),
                layout(recompute="full"),
                layout(sequence_parallel=False),
                layout(sequence_parallel=False, recompute="full"),
                layout(tensor=4),
                layout(global_batch_size=SEQUENCES),
            )
        ],
    ],
)
def test_a_tensor_rank_holds_what_is_replayed(
    model: ModelShape, split: Layout, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "WORKSPACE", 0)
    trial = request(split, model)
    assert isinstance(trial.program, Training)
    program = replace(trial.program, sequence_length=model.max_sequence_length)
    trial = replace(trial, program=SecondStep(program, 0, NETWORK))
    (report,) = reports(run_ranks(trial))
    assert report.peak_memory_gib is not None
    assert held_in_replay(model, split) == pytest.approx(report.peak_memory_gib * 2**30, rel=0.01)
