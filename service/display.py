"""What a running search tells the person who started it: a line per trial, the best so far and the time left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

from service.answers.candidates import Candidate, candidates
from service.answers.ranking import leaders
from service.goals import Comparison, Goals
from service.metrics import with_unit
from service.problem import Budget
from service.result import Purpose, TrialResult
from trainables.status import Status


@dataclass
class Display:
    """Prints as it goes; plain lines, so that a log file reads the same as a terminal.

    `trials` is the most that explore. Figures that are estimated carry a '*', extrapolated ones a '~'. `results` are
    those of the trials that count, `over` is the number of all.
    """

    goals: Goals
    budget: Budget
    trials: int
    began: float = field(default_factory=time.monotonic)
    results: list[TrialResult] = field(default_factory=list)
    over: int = 0

    @property
    def done(self) -> int:
        """How many trials explored."""
        return sum(result.purpose == Purpose.SEARCH for result in self.results)

    @property
    def best(self) -> dict[str, float]:
        """Objective -> its best value so far; see `service.answers.ranking.leaders`."""
        return {metric: one.metrics[metric] for metric, one in leaders(self.compared).items()}

    def say(self, text: str) -> None:
        print(text, flush=True)

    def started(self, label: str, purpose: Purpose = Purpose.SEARCH) -> None:
        self.say(f"[{self._clock()}] start  {label}{_beside(purpose)}")

    def count(self, result: TrialResult) -> None:
        """Take a trial in, without a word."""
        self.over += 1
        self.results.append(result)
        vars(self).pop("compared", None)

    def retried(self, result: TrialResult) -> None:
        """Say that the machines failed a trial, which is run again and does not count."""
        self.over += 1
        self._outcome(result, f"{result.cause}; it is run again")

    def finished(self, result: TrialResult, to_come: int) -> None:
        """Say what became of a trial, and how long the `to_come` others may take."""
        self.count(result)
        figures = [
            with_unit(metric, value, result.methods.get(metric))
            for metric in self.goals.objectives
            if (value := result.metrics.get(metric)) is not None
        ]
        lacks = result.status != Status.OK or len(figures) < len(self.goals.objectives)
        told = [", ".join(figures)] if result.status == Status.OK else []
        why = [result.cause] if lacks and result.cause is not None else []  # else what it says is in the record
        self._outcome(result, "; ".join([*told, *why]))
        best = ", ".join(self.figure(metric, value) for metric, value in self.best.items())
        if result.purpose == Purpose.SEARCH:
            stand = f"trial {self.done} of at most {self.trials}; best so far: {best or 'none yet'}"
        else:
            stand = f"trials planned: {to_come}" + (f"; best so far: {best}" if best else "")
        self.say(f"         {stand}; {self._left(to_come)} left")

    def _outcome(self, result: TrialResult, text: str) -> None:
        self.say(f"[{self._clock()}] {result.status:6} {result.layout.label}{_beside(result.purpose)}: {text}")

    def figure(self, metric: str, value: float) -> str:
        """A value with its unit, marked where this search does not measure it."""
        doubt = self.compared.doubt(metric)
        return with_unit(metric, value, doubt.method if doubt else None)

    @cached_property
    def compared(self) -> Comparison[Candidate]:
        """All that is ranked so far, held against each other."""
        return self.goals.among(candidates(self.results))

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        return f"{minutes:3d}:{seconds:02d}"

    def left_s(self, to_come: int) -> float:
        """Seconds left by the pace so far, and by the wall-time budget where that is nearer."""
        elapsed = time.monotonic() - self.began
        left = elapsed / self.over * to_come
        if self.budget.wall_time_s is not None:
            left = min(left, max(0.0, self.budget.wall_time_s - elapsed))
        return left

    def _left(self, to_come: int) -> str:
        left = self.left_s(to_come)
        return f"about {left / 60:.0f} min" if left >= 120 else f"about {left:.0f} s"


def _beside(purpose: Purpose) -> str:
    """How a line marks a trial that does not explore."""
    return "" if purpose == Purpose.SEARCH else f" ({purpose})"
