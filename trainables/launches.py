"""The program that times how long the CPU takes to launch a block, mode by mode. Needs no torch until it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from search_spaces.layout import Layout
from search_spaces.operators import Operator
from trainables.program import Place, Progress, RankProgram, RankReport, TrialRequest
from trainables.slice import Slice


@dataclass(frozen=True)
class Launches(RankProgram):
    """Measures `launches`, of `search_spaces.launches`, on one device: so many at once as the host has processors get
    ready, and then take turns at being timed.

    What has not begun to get ready after `budget_s` seconds is left out. So is, with a line in the report's `problems`,
    what fails.
    """

    launches: tuple[Operator, ...]
    budget_s: float

    @staticmethod
    def preload(layouts: Iterable[Layout]) -> list[str]:
        """What measures, and what a training of the layouts needs."""
        return ["trainables.specimens", *Slice.preload(layouts)]

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        """Measure. What is measured is handed over as it comes: whatever ends the process, that stands."""
        from trainables.specimens import measure

        return measure(self, request, place, on_progress)
