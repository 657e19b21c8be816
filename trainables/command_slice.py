"""The program that runs a command of the user's for one rank alone. Needs no torch until it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from search_spaces.layout import Layout
from search_spaces.network import Network
from trainables.command import Command
from trainables.program import Place, Progress, RankProgram, RankReport, TrialRequest


@dataclass(frozen=True)
class CommandSlice(RankProgram):
    """Runs `command` as the first rank of a request's layout, with a stand-in for all others in torch.distributed.

    Collectives take the time that `network` says, messages between two ranks none. `usable_bytes` is what torch may
    reserve on the device, where that is more than a GPU of the layout's has; None leaves it all.
    """

    command: Command
    network: Network
    usable_bytes: float | None = None

    @staticmethod
    def preload(layouts: Iterable[Layout]) -> list[str]:
        """What starts a program and follows it."""
        return ["trainables.foreign.alone"]

    def ranks(self, layout: Layout) -> Sequence[int]:
        return (0,)

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        """Start the program, which goes on until the trial ends, and time its steps.

        Raises what `Command.run` does, but for its loss, which must be finite and need not fall; and `InvalidTrial`
        for a program that meets its other ranks outside of torch.distributed.
        """
        from trainables.foreign.alone import run_alone

        return run_alone(self, request, place, on_progress)
