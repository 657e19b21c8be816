"""Ray Tune's view of a course: its trials, one by one, as Tune asks for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray.tune.search import Searcher

from search_spaces.layout import Layout
from service.result import TrialResult
from service.sampling.agenda import Agenda


class AgendaSearcher(Searcher):
    """Hands out the trials of a `Agenda`. What became of them, the driver tells the course, once it is on disk."""

    def __init__(self, course: Agenda) -> None:
        super().__init__()
        self.course = course

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]  # Ray leaves FINISHED out
        """The next trial's `Step` as a dict, `Searcher.FINISHED`, or None while it depends on trials under way."""
        if (step := self.course.next(trial_id)) is not None:
            return step.to_dict()
        return None if self.course.under_way else Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing: Tune calls this before the driver's callback, which writes the record."""

    def save(self, checkpoint_path: str) -> None:
        """The record and the study's own storage keep what has to last."""

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""


def outcome_of(trial_id: str, config: Mapping[str, Any], reported: Mapping[str, Any] | None) -> TrialResult:
    """The `TrialResult` inside what the Tune trial of `layout` reported.

    A trial is an actor that waits for a gang: one that died without a word was lost with its node or its memory.
    """
    if reported and "result" in reported:
        result = TrialResult.from_dict(json.loads(reported["result"]))
    else:
        cause = "the trial's own process died before it reported"
        result = TrialResult(trial_id, Layout.from_dict(config), "crash", cause, infrastructure=True)
    return replace(result, purpose=config["purpose"])
