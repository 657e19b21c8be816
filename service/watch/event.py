"""What is told of a search or of a run as it happens: one line for people, one object for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

POST_S = 5.0


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Of a search, `kind` is `status`, `start` or `result` (of a trial), `fault` (a trial that the machines failed, a
    driver that is dead, a record out of reach) or `front` (which layouts are on it, when these change). Of a run, it is
    `run` (it begins, or falls silent), `error` (of a GPU), or that of a `service.watch.findings.Finding`. `text` is one
    line, `details` what a program wants to know of it, JSON-safe. `search_id` is None of a run that is held against no
    search.
    """

    search_id: str | None
    kind: str
    time: datetime
    text: str
    details: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self) | {"time": self.time.isoformat()}


def text(event: Event) -> str:
    """For a terminal or a log file, in local time."""
    return f"{event.time.astimezone():%H:%M:%S}  {event.kind:6}  {event.text}"


def post(event: Event, url: str) -> str | None:
    """Send an event to a webhook, as JSON. Returns what went wrong, in a line."""
    import requests

    try:
        answer = requests.post(url, json=event.to_dict(), timeout=POST_S)
        answer.raise_for_status()
    except requests.RequestException as error:
        return f"webhook: {type(error).__name__} for a {event.kind} event"
    return None
