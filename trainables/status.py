"""How a trial can end."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """How a trial ended; its text is what records hold."""

    OK = "ok"
    OOM = "oom"
    """Memory ran out, the device's or the host's."""
    HANG = "hang"
    """No result by the deadline."""
    CRASH = "crash"
    """An error, or a process or machine that was lost."""
    INVALID = "invalid"
    """It ran, but what ran is not training: the loss is not finite or does not fall."""
    PRUNED = "pruned"
    """Given up early, since it could not become one of the best."""
    CANCELLED = "cancelled"
    """Ended by a person."""
