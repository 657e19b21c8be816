"""Where seconds go."""

from __future__ import annotations

import time


class Laps:
    """Seconds by what they went into, one thing after the other, from when this was made."""

    def __init__(self) -> None:
        self.began = self.since = time.monotonic()
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """What went by since something else ended was for this."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.since
        self.since = now
