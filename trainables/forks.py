"""Processes forked from one that has imported what they need, which can be halted, and what they say."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from trainables.child import error_line
from trainables.leftovers import end_with_parent

QUIET_S = 0.01
"""In which processes that are halted have come to a stop, and a device has done most of what they gave it."""


class Fork:
    """A process with the compilers that it starts. It ends when the life that it was given does, with an error in a
    line as its last word."""

    def __init__(self, life: Callable[[Connection], None]) -> None:
        """Start it. No device has been used by this process."""
        self.messages, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if not self.pid:
            _live(theirs, life)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it did so itself, and may have ended since
            os.setpgid(self.pid, self.pid)
        theirs.close()

    def tell(self, message: object) -> None:
        with contextlib.suppress(OSError):  # it has ended, as it will be heard
            self.messages.send(message)

    def hear(self, patience_s: float) -> Any:
        """What it says within so many seconds; a string says why nothing else comes of it any more."""
        try:
            in_time = self.messages.poll(max(0.0, patience_s))
            return self.messages.recv() if in_time else f"nothing came of it in {patience_s:.0f} s"
        except (EOFError, OSError):
            return "its process has ended"

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def end(self) -> None:
        self.messages.close()
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)


@contextlib.contextmanager
def halted(forks: Sequence[Fork]) -> Iterator[None]:
    """Meanwhile these do nothing. What they gave a device may yet go on: a `trainables.gauge.Gauge` tells."""
    try:
        for fork in forks:
            fork.signal(signal.SIGSTOP)
        if forks:
            time.sleep(QUIET_S)
        yield
    finally:
        for fork in forks:
            fork.signal(signal.SIGCONT)


def _live(messages: Connection, life: Callable[[Connection], None]) -> None:
    try:
        os.setpgid(0, 0)
        end_with_parent()
        life(messages)
    except BaseException as error:
        messages.send(error_line(error, "measuring"))
    finally:
        os._exit(0)
