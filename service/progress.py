"""What a running search tells the person who started it: a line per trial, the best so far and the time left."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from service.spec import BudgetSpec, excess
from service.tables import MARKS, with_unit
from trainables.result import TrialResult


@dataclass
class Progress:
    """Prints as it goes; plain lines, so that a log file reads the same as a terminal.

    `trials` is the most to expect. What violates one of `limits`, (metric, '<=' or '>=', bound), is never the best.
    Figures that are estimated carry a '*', extrapolated ones a '~'.
    """

    objectives: Mapping[str, str]
    budget: BudgetSpec
    trials: int
    limits: Sequence[tuple[str, str, float]] = ()
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    best: dict[str, float] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def started(self, label: str) -> None:
        self.say(f"[{self._clock()}] start  {label}")

    def count(self, result: TrialResult) -> None:
        """Take a trial in, without a word."""
        self.done += 1
        self.unmeasured |= {metric: method for metric, method in result.methods.items() if method in MARKS}
        if result.status == "ok":
            self._keep_best(result.metrics)

    def finished(self, result: TrialResult) -> None:
        self.count(result)
        if result.status == "ok":
            told = ", ".join(
                self._figure(metric, value)
                for metric in self.objectives
                if (value := result.metrics.get(metric)) is not None
            )
        else:
            told = result.cause or ""
        self.say(f"[{self._clock()}] {result.status:6} {result.config.label}: {told}")
        best = ", ".join(self._figure(metric, value) for metric, value in self.best.items()) or "none yet"
        self.say(f"         trial {self.done} of at most {self.trials}; best so far: {best}; {self._left()} left")

    def _keep_best(self, metrics: Mapping[str, float | None]) -> None:
        if any(excess(limit, metrics) > 0 for limit in self.limits):
            return
        for metric, direction in self.objectives.items():
            value = metrics.get(metric)
            if value is not None:
                better = max if direction == "maximize" else min
                self.best[metric] = better(self.best.get(metric, value), value)

    def _figure(self, metric: str, value: float) -> str:
        return with_unit(metric, value, self.unmeasured.get(metric))

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        return f"{minutes:3d}:{seconds:02d}"

    def _left(self) -> str:
        """Time left by the pace so far, and by the wall-time budget where that is nearer."""
        elapsed = time.monotonic() - self.began
        left = elapsed / self.done * (self.trials - self.done)
        if self.budget.wall_time_s is not None:
            left = min(left, max(0.0, self.budget.wall_time_s - elapsed))
        return f"about {left / 60:.0f} min" if left >= 120 else f"about {left:.0f} s"
