"""The program that runs a command of the user's and times the steps that it tells of. Needs no torch until it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from search_spaces.layout import Layout
from trainables.program import Place, Progress, RankProgram, RankReport, TrialRequest

TRIAL_DIR = "{trial_dir}"
"""Stands for the folder of the trial's own, which only the worker knows, wherever a `Command` has text."""


@dataclass(frozen=True)
class LogPatterns:
    """How steps are read off a program's own output: regular expressions, each searched in one line at a time.

    A line in which `step` is found is the end of optimizer step number `step`, a group by that name. Further groups are
    read where they took part in the match: `loss`; `seconds` or `milliseconds`, the time of one step; `grad_norm`; and
    `memory_gib` or `memory_mib`, the most memory that torch has reserved. `memory` finds lines that tell that alone.
    Colours are taken out of lines before.
    """

    step: str
    memory: str | None = None


@dataclass(frozen=True)
class Command(RankProgram):
    """Runs a program of the user's for each rank, as torchrun would, and times the optimizer steps that it tells of.

    - `arguments`: the argument list; no shell reads it.
    - `environment`: names and values, beside those of the worker, of torchrun and of the hook.
    - `files`: names and texts of configuration files, which are in the trial's own folder when the program starts.
    - `directory`: where it is started; None for the trial's own folder.
    - `tokens_per_step`: of all ranks together, where the program does not tell.
    - `steps`: how its output tells of steps; None for a program that calls the hook.
    - `out_of_memory`: regular expressions of what its output says where memory ran out, beside those that are known.

    `TRIAL_DIR` stands for the trial's own folder in `arguments`, the values of `environment`, the texts of `files` and
    `directory`. It is the same for all ranks, but on the disk of each node.
    """

    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, str], ...]
    directory: str | None
    tokens_per_step: int
    steps: LogPatterns | None
    out_of_memory: tuple[str, ...] = ()

    @staticmethod
    def preload(layouts: Iterable[Layout]) -> list[str]:
        """What starts a program and follows it."""
        return ["trainables.foreign.rank"]

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        """Start the program, which goes on until the trial ends, and time its steps. Collective over the ranks.

        Raises `InvalidTrial` if its loss does not fall or it ends too soon, `trainables.foreign.output.ProgramFailed`,
        and `trainables.foreign.output.OutOfMemory`.
        """
        from trainables.foreign.rank import run_command

        return run_command(self, request, place, on_progress)
