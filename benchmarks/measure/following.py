"""Lines of JSON that several processes write, each into a file of its own, read as they come."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

POLL_S = 0.02


def followed(paths: Sequence[Path], over: Callable[[], bool]) -> Iterator[tuple[dict[str, Any], ...]]:
    """The first line of all files, then the second one and so on, each once all have it whole.

    It ends where a file has no further line once it is `over`: then nothing more is written.
    """
    with contextlib.ExitStack() as closing:
        for path in paths:
            path.touch()
        files = [closing.enter_context(path.open()) for path in paths]
        while True:
            lines = [line for file in files if (line := _line(file, over)) is not None]
            if len(lines) < len(files):
                return
            yield tuple(json.loads(line) for line in lines)


def _line(file: TextIO, over: Callable[[], bool]) -> str | None:
    line = ""
    while not line.endswith("\n"):
        ended = over()  # before it is looked for what was written until then
        more = file.readline()
        if not more and ended:
            return None
        if not more:
            time.sleep(POLL_S)
        line += more
    return line
