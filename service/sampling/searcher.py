"""Ray Tune's view of an agenda: its trials, one by one, as Tune asks for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray.tune.search import Searcher

from service.result import TrialResult
from service.sampling.agenda import Agenda, Workers
from service.step import Step
from trainables.status import Status


class AgendaSearcher(Searcher):
    """Hands out the trials of an `Agenda`, each once `workers` were lent for it. What became of them, the driver tells
    the agenda, once it is on disk.
    """

    def __init__(self, agenda: Agenda, workers: Workers) -> None:
        super().__init__()
        self.agenda, self.workers = agenda, workers

    def suggest(self, trial_id: str) -> dict[str, str] | str | None:  # type: ignore[override]  # Ray leaves FINISHED out
        """The next trial's `Step` as Tune's configuration, `Searcher.FINISHED`, or None while it has to wait."""
        if (step := self.agenda.next(trial_id, self.workers)) is not None:
            return step.to_config()
        return Searcher.FINISHED if self.agenda.over else None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing: Tune calls this before the driver's callback, which writes the record."""

    def save(self, checkpoint_path: str) -> None:
        """The record and the study's own storage keep what has to last."""

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""


def outcome_of(trial_id: str, step: Step, reported: Mapping[str, Any] | None) -> TrialResult:
    """The `TrialResult` inside what the Tune trial of `step` reported.

    A trial is an actor that waits for a gang: one that died without a word was lost with its node or its memory.
    """
    if reported and "result" in reported:
        result = TrialResult.from_dict(json.loads(reported["result"]))
    else:
        cause = "the trial's own process died before it reported"
        result = TrialResult(trial_id, step.layout, Status.CRASH, cause, infrastructure=True)
    return replace(result, purpose=step.purpose)
