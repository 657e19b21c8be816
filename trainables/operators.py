"""The program that times operators of the model one by one, on one device. Needs no torch until it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from search_spaces.layout import Layout
from search_spaces.operators import Operator
from trainables.program import Place, Progress, RankProgram, RankReport, TrialRequest
from trainables.slice import Slice


@dataclass(frozen=True)
class Operators(RankProgram):
    """Measures `kernels`, what the device does, in their order, and then `launches`, of `search_spaces.launches`.

    What has not begun by `kernels_s` and `launches_s` seconds, both from the start, is left out. So is, with a line in
    the report's `problems`, what runs out of memory or fails. So many `processes` do so side by side, on as many
    devices, each with a share of the host.
    """

    kernels: tuple[Operator, ...]
    launches: tuple[Operator, ...]
    kernels_s: float
    launches_s: float
    processes: int = 1

    def shares(self, processes: int) -> list[Operators]:
        """What each of so many processes measures, side by side."""
        return [
            replace(self, kernels=self.kernels[n::processes], launches=self.launches[n::processes], processes=processes)
            for n in range(processes)
        ]

    @staticmethod
    def preload(layouts: Iterable[Layout]) -> list[str]:
        """What measures, and what a training of the layouts needs."""
        return ["trainables.measuring", *Slice.preload(layouts)]

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        """Measure. What is measured is handed over as it comes: whatever ends the process, that stands."""
        from trainables.measuring import measure

        return measure(self, request, place, on_progress)
