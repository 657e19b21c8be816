"""A program that was started under a guard: what it says, line by line, and how it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainables.foreign import guard

TAIL_LINES = 100
LINE_CHARACTERS = 2000
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINE_END = re.compile(rb"[\r\n]+")  # progress bars return to the start of the line


class Program:
    """One process of the user's and all that it starts: they end with this process, however that ends.

    `on_line` is given each line that it says, without colours, and this node's `time.monotonic_ns()` when it came, in a
    thread of its own. `tail` are the latest of them.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        folder: Path,
        on_line: Callable[[str, int], None],
    ) -> None:
        """Start it. `folder` is removed in the end."""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.start_ns = time.monotonic_ns()
        self._on_line = on_line
        self._ending: str | None = None
        output, theirs = os.pipe()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(folder), str(theirs), directory, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[theirs],
            env=dict(environment),
            start_new_session=True,
        )
        os.close(theirs)
        reader = threading.Thread(target=self._read, args=(output,), daemon=True)
        reader.start()
        threading.Thread(target=self._await_end, args=(reader,), daemon=True).start()

    @property
    def ending(self) -> str | None:
        """How it ended, as its guard says it, once all has been read that it said; None before."""
        return self._ending

    def _read(self, output: int) -> None:
        rest = b""
        while data := os.read(output, 1 << 16):
            now = time.monotonic_ns()
            *lines, rest = _LINE_END.split(rest + data)
            for line in lines:
                self._take(line, now)
        self._take(rest, time.monotonic_ns())
        os.close(output)

    def _take(self, line: bytes, now: int) -> None:
        text = uncoloured(line.decode(errors="replace")).rstrip()
        if text:
            self.tail.append(text[:LINE_CHARACTERS])
            self._on_line(text, now)

    def _await_end(self, reader: threading.Thread) -> None:
        assert self._guard.stdout is not None
        ending = self._guard.stdout.readline().decode(errors="replace").strip()
        reader.join()
        self._ending = ending or "error its guard was killed, and it with that"


def uncoloured(text: str) -> str:
    """The text without a terminal's escape sequences (ECMA-48's control sequences)."""
    return _COLOUR.sub("", text)
