"""The sign of life that a driver gives in the record, by which any machine tells a search that runs from a dead one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

BEAT_S = 15.0
SILENT_S = 90.0
"""After so long a driver elsewhere is taken for dead: a beat may be lost, and clocks may differ by a minute."""


@dataclass(frozen=True)
class Heartbeat:
    """When a driver was last alive, in seconds since the epoch by its own machine's clock, and which process it is."""

    time: float
    host: str
    pid: int

    @classmethod
    def now(cls) -> Heartbeat:
        """That of this process."""
        return cls(time.time(), socket.gethostname(), os.getpid())

    @classmethod
    def parse(cls, text: str) -> Heartbeat:
        """Inverse of `str`."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @property
    def age_s(self) -> float:
        return time.time() - self.time

    @property
    def here(self) -> bool:
        """Whether it is of this machine."""
        return self.host == socket.gethostname()


def silent(last: Heartbeat | None, driven: bool | None) -> bool:
    """Whether a search that is recorded as going on has no driver any more.

    `last` is None in records of before there were heartbeats. `driven` is what this machine's lock says at once, see
    `service.home.Home.driven`. A lock that is held is proof; one that is free says nothing of a driver elsewhere, whose
    locks may not show in a directory that machines share.
    """
    if driven or (driven is False and (last is None or last.here)):
        return not driven
    return last is not None and last.age_s > SILENT_S


@contextlib.contextmanager
def beating(beat: Callable[[], None]) -> Iterator[None]:
    """Call `beat` every `BEAT_S` in a thread of its own. Where it raises, the next one is waited for."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(BEAT_S):
            with contextlib.suppress(Exception):  # whatever is wrong with the store, the driver's own writes tell of it
                beat()

    threading.Thread(target=keep, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        over.set()  # a beat under way may come late, which does no harm
