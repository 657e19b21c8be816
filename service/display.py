"""What a running search tells the person who started it: a line per trial, the best so far and the time left."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from service.answers.tables import MARKS, with_unit
from service.problem import Budget
from service.result import TrialResult
from service.spec import excess


@dataclass
class Display:
    """Prints as it goes; plain lines, so that a log file reads the same as a terminal.

    `trials` is the most that explore. What violates one of `limits`, (metric, '<=' or '>=', bound), is never the best.
    Figures that are estimated carry a '*', extrapolated ones a '~'. `done` counts trials that explored, `over` all.
    """

    objectives: Mapping[str, str]
    budget: Budget
    trials: int
    limits: Sequence[tuple[str, str, float]] = ()
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    over: int = 0
    best: dict[str, float] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def started(self, label: str, purpose: str = "search") -> None:
        self.say(f"[{self._clock()}] start  {label}{_beside(purpose)}")

    def count(self, result: TrialResult) -> None:
        """Take a trial in, without a word."""
        self.over += 1
        self.unmeasured |= {metric: method for metric, method in result.methods.items() if method in MARKS}
        if result.purpose == "search":
            self.done += 1
            if result.status == "ok":
                self._keep_best(result.metrics)

    def retried(self, result: TrialResult) -> None:
        """Say that the machines failed a trial, which is run again and does not count."""
        self.over += 1
        self._outcome(result, f"{result.cause}; it is run again")

    def finished(self, result: TrialResult, to_come: int) -> None:
        """Say what became of a trial, and how long the `to_come` others may take."""
        self.count(result)
        figures = [
            self.figure(metric, value)
            for metric in self.objectives
            if (value := result.metrics.get(metric)) is not None
        ]
        self._outcome(result, ", ".join(figures) if result.status == "ok" else result.cause or "")
        if result.purpose == "search":
            best = ", ".join(self.figure(metric, value) for metric, value in self.best.items()) or "none yet"
            stand = f"trial {self.done} of at most {self.trials}; best so far: {best}"
        else:
            stand = f"trials to come: at most {to_come}"
        self.say(f"         {stand}; {self._left(to_come)} left")

    def _outcome(self, result: TrialResult, told: str) -> None:
        self.say(f"[{self._clock()}] {result.status:6} {result.layout.label}{_beside(result.purpose)}: {told}")

    def _keep_best(self, metrics: Mapping[str, float | None]) -> None:
        if any(excess(limit, metrics) > 0 for limit in self.limits):
            return
        for metric, direction in self.objectives.items():
            value = metrics.get(metric)
            if value is not None:
                better = max if direction == "maximize" else min
                self.best[metric] = better(self.best.get(metric, value), value)

    def figure(self, metric: str, value: float) -> str:
        """A value with its unit, marked where this search does not measure it."""
        return with_unit(metric, value, self.unmeasured.get(metric))

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        return f"{minutes:3d}:{seconds:02d}"

    def _left(self, to_come: int) -> str:
        """Time left by the pace so far, and by the wall-time budget where that is nearer."""
        elapsed = time.monotonic() - self.began
        left = elapsed / self.over * to_come
        if self.budget.wall_time_s is not None:
            left = min(left, max(0.0, self.budget.wall_time_s - elapsed))
        return f"about {left / 60:.0f} min" if left >= 120 else f"about {left:.0f} s"


def _beside(purpose: str) -> str:
    """How a line marks a trial that does not explore."""
    return "" if purpose == "search" else f" ({purpose})"
