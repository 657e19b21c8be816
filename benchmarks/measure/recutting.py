"""What cuts a pipeline anew while it trains, and measures what that saves: a program for the ranks of a trial.

In each window it sees how long computing takes each rank with as many layers, has `search_spaces.placement` cut the
layers by that, and trains by turns with the plain stages and with these, if they differ.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmarks.measure.slowing import Board, Draws, introduce
from search_spaces.placement import layers_by_speed
from trainables.engines.build import build_engine
from trainables.program import InvalidTrial, Place, Progress, RankReport, TrialRequest
from trainables.rank import Rank, settle
from trainables.training import Training
from trainables.world import GangWorld

if TYPE_CHECKING:
    from trainables.engines.base import TrainingEngine

Cut = tuple[int, ...]

SETTLING = 3
"""Steps before the first pair, of each of the two: the first two of an engine take up to a tenth longer."""


@dataclass(frozen=True)
class Recut(Training):
    """Trains, and after its own window by turns with the layout's stages and uneven ones; told in `folder`.

    A window for each of the first `draws.first` and each of `draws.listed`, of as many `pairs` of steps, as far as
    `seconds` go: none is begun that would take longer if it took as long as the longest so far.
    """

    folder: str
    draws: Draws
    pairs: int
    seconds: float

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        """Raises `InvalidTrial` where a step cannot be profiled, and what `Training.run` does."""
        return RecutRank(self, request, place, on_progress, GangWorld).recut(place)


class RecutRank(Rank):
    """One rank of a pipeline whose stages change."""

    training: Recut

    def recut(self, place: Place) -> RankReport:
        """What `Rank.report` is, and FOLDER/RANK.jsonl: a line for each window. Collective."""
        folder, rank, draws = Path(self.training.folder), self.world.rank, self.training.draws
        introduce(folder, rank, place)
        report = super().report()
        layers, stages = self.training.model.layers, self.layout.pipeline_stages
        self.plain: Cut = (layers // stages,) * stages
        self.engines: dict[Cut, TrainingEngine] = {self.plain: self.engine}
        board, began, longest_s = Board(folder), time.monotonic(), 0.0
        self.enter("recut")
        with (folder / f"{rank}.jsonl").open("w", buffering=1) as file:  # a line at once
            for window in range(draws.first + len(draws.listed)):
                window_began = time.monotonic()
                if self.world.slowest(window_began - began + longest_s) > self.training.seconds:
                    break
                if rank == 0:
                    board.begin(window)
                compute_s = self.computing(f"window {window}")
                told: dict[str, object] = {"window": window, "compute_s": compute_s}
                if window >= draws.first:
                    seconds = self.of_all(compute_s)
                    cut = layers_by_speed(layers, [one / min(seconds) for one in seconds])
                    told["cut"] = cut
                    if cut != self.plain:
                        told["plain_s"], told["other_s"] = self.in_turns(cut)
                        self.use(cut)
                        told["other_compute_s"] = self.computing(f"window {window}, cut")
                        self.use(self.plain)
                file.write(json.dumps(told) + "\n")
                board.tell(rank, window, compute_s)
                longest_s = max(longest_s, time.monotonic() - window_began)
        self.world.slowest(0.0)
        if rank == 0:
            board.end()
        return report

    def computing(self, occasion: str) -> float:
        """Seconds of a step in which this rank computes. Collective.

        Raises `InvalidTrial` where it cannot be profiled.
        """
        self.step()  # partly as it was before
        self.platform.synchronize()
        profile = self.profiled(occasion)
        if profile.breakdown is None:
            raise InvalidTrial(profile.problem or "another rank's profiler failed")
        return profile.breakdown.compute_s

    def of_all(self, number: float) -> list[float]:
        """The numbers of all ranks. Collective."""
        numbers = torch.zeros(self.world.size, device=self.world.device, dtype=torch.float64)
        numbers[self.world.rank] = number
        dist.all_reduce(numbers)
        return [float(one) for one in numbers]

    def in_turns(self, cut: Cut) -> tuple[list[float], list[float]]:
        """Seconds of steps with the plain stages and with those of `cut`, in pairs. Collective."""
        for each in (self.plain, cut):
            self.use(each)
            for _ in range(SETTLING):
                self.seconds()
        settle()
        taken: dict[bool, list[float]] = {False: [], True: []}
        for number in range(self.training.pairs):
            for other in (False, True) if number % 2 else (True, False):
                self.use(cut if other else self.plain)
                taken[other].append(self.seconds())
        self.use(self.plain)
        return taken[False], taken[True]

    def use(self, cut: Cut) -> None:
        """Train with these stages from now on. Collective where there is no engine for them: besides the plain one, the
        last is kept."""
        if cut not in self.engines:
            self.engine = self.engines[self.plain]
            self.engines = {self.plain: self.engine}
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()
            self.layout = replace(self.request.layout, stage_layers=cut)
            self.engines[cut] = build_engine(self.job())
        self.engine = self.engines[cut]

    def seconds(self) -> float:
        """Of a step, on the slowest rank. Collective."""
        self.platform.synchronize()
        began = time.monotonic()
        self.step()
        self.platform.synchronize()
        return self.world.slowest(time.monotonic() - began)
