"""The program that trains one rank of a layout on one GPU, without the others. Needs no torch until it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from search_spaces.layout import Layout
from search_spaces.network import Network
from trainables.program import Place, Progress, RankProgram, RankReport, TrialRequest
from trainables.training import Training

FIRST = 3
"""Microbatches of the first step of all, without a pipeline: two for each part of a training to run as in longer steps,
and one more for a GPU to come to its power limit. Of Llama-3-8B, an H200 is above it for the first 1.9 s, and a step
then 3% too fast."""

UNNAMED = "what stands in for collectives cannot be told from other copies on this device"
"""Why a rank that runs alone has no breakdown where `Platform.names_kernels` is false."""


@dataclass(frozen=True)
class Slice(RankProgram):
    """Runs `training` as rank `rank` of a request's layout, in one process, with a stand-in for all other ranks.

    Collectives take the time that `network` says, messages between stages none. `usable_bytes` is what torch may
    reserve on the device, where that is more than a GPU of the layout's has; None leaves it all.
    """

    training: Training
    rank: int
    network: Network
    usable_bytes: float | None = None

    @staticmethod
    def preload(layouts: Iterable[Layout]) -> list[str]:
        """What a whole training needs, and the stand-in."""
        return [*Training.preload(layouts), "trainables.slice_rank", "trainables.hashed"]

    def ranks(self, layout: Layout) -> Sequence[int]:
        return (self.rank,)

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        """Train and time the one rank with each of the request's batches, and then have it wait for a while.

        Raises `InvalidTrial` if its loss or its gradient is not finite, and whatever else a training may, but for its
        loss: the gradient that comes from other ranks is not that of the model.
        """
        from trainables.slice_rank import run_slice

        return run_slice(self, request, place, on_progress)
