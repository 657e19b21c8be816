"""What cuts a pipeline anew while it trains, and measures what that saves: a program for the ranks of a trial.

In each window it sees how long passes take each rank, has `search_spaces.placement` cut the layers by that, and trains
by turns with the plain stages and with these, if they differ. A turn is some steps, of which the first is not counted:
at its power limit a GPU is faster after a step that left it time to wait, and slower after one that did not.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmarks.measure.slowing import Board, Draws, introduce
from search_spaces.placement import layers_by_passes
from search_spaces.schedules import PassTime
from trainables.engines.build import build_engine
from trainables.program import Place, Progress, RankReport, TrialRequest
from trainables.rank import Rank, settle
from trainables.training import Training
from trainables.world import GangWorld

if TYPE_CHECKING:
    from trainables.engines.base import TrainingEngine

Cut = tuple[int, ...]

BUILT = 3
"""Steps before the first pair, of each of the two: the first two of an engine take up to a tenth longer."""

CHANGED, COUNTED = 1, 3
"""Steps of a turn that are not counted where the stages have changed, and steps that are: of three the median is none
that the host held up, which now and then it does by 50 ms."""

LOOKED_AT = 2
"""Steps of a window by whose passes layers are cut."""


@dataclass(frozen=True)
class Recut(Training):
    """Trains, and after its own window by turns with the layout's stages and uneven ones; told in `folder`.

    A window for each of the first `draws.first` and each of `draws.listed`, of as many `pairs` of turns, as far as
    `seconds` go: none is begun that would take longer if it took as long as the longest so far.
    """

    folder: str
    draws: Draws
    pairs: int
    seconds: float

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        """Raises what `Training.run` does."""
        return RecutRank(self, request, place, on_progress, GangWorld).recut(place)


class RecutRank(Rank):
    """One rank of a pipeline whose stages change."""

    training: Recut

    def recut(self, place: Place) -> RankReport:
        """What `Rank.report` is, and FOLDER/RANK.jsonl: a line for each window. Collective."""
        folder, rank, draws = Path(self.training.folder), self.world.rank, self.training.draws
        introduce(folder, rank, place)
        report = super().report()
        model, stages = self.training.model, self.layout.pipeline_stages
        self.plain: Cut = (model.layers // stages,) * stages
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
                self.turn(CHANGED)  # partly as it was before
                self.turn(LOOKED_AT)
                passes = self.clock.computing(LOOKED_AT)
                told: dict[str, object] = {"window": window, "passes": passes}
                if window >= draws.first:
                    cut = layers_by_passes(self.request.layout, model, self.of_all(passes))
                    told["cut"] = cut
                    if cut != self.plain:
                        told |= self.in_turns(cut)
                file.write(json.dumps(told) + "\n")
                board.tell(rank, window, computing_s(passes, self.layout.gradient_accumulation_steps))
                longest_s = max(longest_s, time.monotonic() - window_began)
        self.world.slowest(0.0)
        if rank == 0:
            board.end()
        return report

    def of_all(self, passes: Sequence[PassTime]) -> list[PassTime]:
        """Those of all ranks. Collective."""
        found: list[Sequence[PassTime]] = [()] * self.world.size
        dist.all_gather_object(found, passes)
        return [one for of_rank in found for one in of_rank]

    def in_turns(self, cut: Cut) -> dict[str, object]:
        """By `plain` and `other`, seconds of the steps of each turn with the plain stages and with those of `cut`, and
        the mean of their passes. Collective."""
        seconds: dict[str, list[list[float]]] = {"plain": [], "other": []}
        passes: dict[str, list[tuple[PassTime, ...]]] = {"plain": [], "other": []}
        for each in (self.plain, cut):
            self.use(each)
            self.turn(BUILT)
        settle()
        before = cut
        for number in range(self.training.pairs):
            for each in (self.plain, cut) if number % 2 else (cut, self.plain):
                self.use(each)
                if each != before:
                    self.turn(CHANGED)
                name = "plain" if each == self.plain else "other"
                seconds[name].append(self.turn(COUNTED))
                passes[name].append(self.clock.computing(COUNTED))
                before = each
        self.use(self.plain)
        told: dict[str, object] = {f"{name}_s": turns for name, turns in seconds.items()}
        return told | {f"{name}_passes": mean(turns) for name, turns in passes.items()}

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

    def turn(self, steps: int) -> list[float]:
        """Seconds of each step, on the slowest rank. Collective."""
        taken: list[float] = []
        for _ in range(steps):
            self.platform.synchronize()
            began = time.monotonic()
            self.step()
            self.platform.synchronize()
            taken.append(self.world.slowest(time.monotonic() - began))
        return taken


def mean(turns: Sequence[Sequence[PassTime]]) -> list[PassTime]:
    """Of the passes of several turns, which are the same ones."""
    return [
        same[0]._replace(
            first_s=statistics.fmean(each.first_s for each in same),
            later_s=statistics.fmean(each.later_s for each in same),
        )
        for same in zip(*turns, strict=True)
    ]


def computing_s(passes: Sequence[PassTime], microbatches: int) -> float:
    """Seconds of a step in which a rank has passes to compute."""
    return sum(one.first_s + (microbatches - 1) * one.later_s for one in passes)
