"""Ray Tune's view of the study: suggests the next layout while the budget lasts, and passes on the outcomes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from ray.tune.search import Searcher

from search_spaces.config import TrialConfig
from service.spec import BudgetSpec
from service.study import SearchStudy
from trainables.result import TrialResult


@dataclass(frozen=True)
class Spent:
    """What a search has used of its budget."""

    trials: int = 0
    wall_time_s: float = 0.0
    gpu_seconds: float = 0.0


class StudySearcher(Searcher):
    """Hands out points of a `SearchStudy` until the budget, `spent` of it before, or the space is used up."""

    def __init__(self, study: SearchStudy, budget: BudgetSpec, spent: Spent = Spent()) -> None:
        super().__init__()
        self.study, self.budget = study, budget
        self.earlier_trials = spent.trials
        self.began = time.monotonic() - spent.wall_time_s
        self.suggested: dict[str, TrialConfig] = {}
        self.started: dict[str, float] = {}
        self.gpu_seconds = spent.gpu_seconds
        self.stopped = False

    def suggest(self, trial_id: str) -> dict[str, Any] | str:  # type: ignore[override]  # Ray leaves FINISHED out
        """The fields of the next layout, or `Searcher.FINISHED`."""
        if self.stopped or self._spent() or (config := self.study.ask()) is None:
            return Searcher.FINISHED
        self.suggested[trial_id] = config
        self.started[trial_id] = time.monotonic()
        return config.to_dict()

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        config = self.suggested[trial_id]
        self.gpu_seconds += (time.monotonic() - self.started[trial_id]) * config.num_gpus
        self.study.tell(config, outcome_of(trial_id, config, result))

    def _spent(self) -> bool:
        budget = self.budget
        return (
            self.earlier_trials + len(self.suggested) >= budget.trials
            or (budget.wall_time_s is not None and time.monotonic() - self.began >= budget.wall_time_s)
            or (budget.gpu_hours is not None and self.gpu_seconds / 3600 >= budget.gpu_hours)
        )

    def save(self, checkpoint_path: str) -> None:
        """The study's own storage keeps what has to last."""

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""


def outcome_of(trial_id: str, config: TrialConfig, result: dict[str, Any] | None) -> TrialResult:
    """The `TrialResult` inside what a Tune trial reported; a trial that reported none has crashed."""
    if result and "result" in result:
        return TrialResult.from_dict(json.loads(result["result"]))
    return TrialResult(trial_id, config, "crash", "the trial's own process died before it reported")
