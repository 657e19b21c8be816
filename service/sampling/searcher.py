"""Ray Tune's view of an agenda: its trials, one by one, as Tune asks for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

from ray.tune.search import Searcher

from service.result import Purpose, TrialResult
from service.sampling.agenda import Agenda
from service.step import Step
from trainables.status import Status


class AgendaSearcher(Searcher):
    """Hands out the trials of an `Agenda`. What became of them, the driver tells the agenda, once it is on disk.

    `gangs_up` says how many gangs are up, lent or not: no more trials than these are under way, so that none waits for
    GPUs that others hold. They are trials of `purposes` alone.
    """

    def __init__(
        self, agenda: Agenda, gangs_up: Callable[[], int], purposes: Container[Purpose] = tuple(Purpose)
    ) -> None:
        super().__init__()
        self.agenda, self.gangs_up, self.purposes = agenda, gangs_up, purposes

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]  # Ray leaves FINISHED out
        """The next trial's `Step` as a dict, `Searcher.FINISHED`, or None while it has to wait."""
        if not self.agenda.closed and len(self.agenda.under_way) >= self.gangs_up():
            return None
        if (step := self.agenda.next(trial_id, self.purposes)) is not None:
            return step.to_dict()
        return None if self.agenda.under_way else Searcher.FINISHED

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
