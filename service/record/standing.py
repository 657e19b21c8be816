"""Where a search stands in the queue of its cluster, as its driver says in the record beside its sign of life."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime


@dataclass(frozen=True)
class Standing:
    """The `place` of a search that has no gang among all `of` those, from 1, and when it may get its first.

    `starts` is in seconds since the epoch; None where nothing says when.
    """

    place: int
    of: int
    starts: float | None

    @classmethod
    def parse(cls, text: str) -> Standing | None:
        """Inverse of `str`; None of an empty text, which stands for a search that does not wait."""
        return cls(**json.loads(text)) if text else None

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @property
    def told(self) -> str:
        """For readers, such as `2 of 3, about 14:05 UTC`."""
        when = "" if self.starts is None else f", about {datetime.fromtimestamp(self.starts, UTC):%H:%M} UTC"
        return f"{self.place} of {self.of}{when}"
