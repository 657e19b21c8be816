"""What happens in a search, as it happens: read from its record every few seconds, wherever that can be reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from typing import Any

from service.answers.ranking import compared, leaders
from service.errors import InputError
from service.metrics import with_unit
from service.record.results import SearchRecord, TrialRecord
from service.record.store import ENDED
from service.result import Purpose
from service.watch.event import Event

PERIOD_S = 2.0


def events(search_id: str, read: Callable[[], tuple[SearchRecord, str]]) -> Generator[Event, None, None]:
    """All that has happened in a search and goes on to happen, until it ends. `read` gives its record and its status.

    While the record is out of reach, `read` raises `InputError`, the search is taken to go on.
    """
    seen, status, labels, away = dict[str, str](), "", list[str](), False
    while True:
        try:
            record, now = read()
        except InputError as error:
            if not away:
                away = True
                yield _event(search_id, "fault", None, f"the record is out of reach: {error}", {})
            time.sleep(PERIOD_S)
            continue
        away = False
        if now != status and now not in ENDED:
            yield _event(search_id, "fault" if now == "interrupted" else "status", None, now, {"status": now})
        for trial in record.trials:
            if trial.trial_id not in seen:
                yield _of_trial(record, "start", trial, trial.started)
                seen[trial.trial_id] = "running"
            if trial.status != seen[trial.trial_id]:
                yield _of_trial(record, "fault" if trial.infrastructure else "result", trial, trial.ended)
                seen[trial.trial_id] = trial.status
        comparison = compared(record)
        front = [candidate.label for candidate in comparison.front()]
        if front != labels:
            labels = front
            best = {metric: one.metrics[metric] for metric, one in leaders(comparison).items()}
            text = f"{', '.join(with_unit(metric, value, None) for metric, value in best.items())}: {'; '.join(front)}"
            yield _event(search_id, "front", None, text, {"layouts": front, "best": best})
        if now in ENDED:
            yield _event(search_id, "status", None, now, {"status": now})
            return
        status = now
        time.sleep(PERIOD_S)


def _of_trial(record: SearchRecord, kind: str, trial: TrialRecord, when: datetime | None) -> Event:
    purpose = "" if trial.purpose == Purpose.SEARCH else f" ({trial.purpose})"
    text = f"{trial.label}{purpose}"
    if kind != "start":
        figures = [
            with_unit(metric, trial.metrics[metric], trial.methods.get(metric))
            for metric in record.objectives
            if metric in trial.metrics
        ]
        said = ", ".join(figures) if trial.status == "ok" else trial.cause
        text = f"{trial.status:6} {text}" + (f": {said}" if said else "")
    return _event(record.id, kind, when, text, {"trial": trial.to_dict()})


def _event(search_id: str, kind: str, when: datetime | None, text: str, details: dict[str, Any]) -> Event:
    return Event(search_id, kind, when or datetime.now(UTC), text, details)
