"""How a program of the user's ended, by its exit code and its last words."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

OUT_OF_MEMORY = (
    "out of memory",  # CUDA's, HIP's, NCCL's, XLA's
    "OutOfMemoryError",
    r"cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUBLAS_STATUS_ALLOC_FAILED",
    r"^\S*MemoryError\b",
    "can.t allocate memory|cannot allocate memory",  # torch's on the host, and errno ENOMEM
)
"""What programs say where memory ran out, whatever the case of its letters."""

_RANK = re.compile(r"^\[\w*\d+\]:\s?")
_OTHERS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process|NCCL|DistBackendError|Gloo|c10d",
    re.IGNORECASE,
)
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(:|$)")
SAID_CHARACTERS = 250


class ProgramFailed(RuntimeError):
    """The program ended with an error. The first line of the text says which, below are the last lines it said."""


class OutOfMemory(MemoryError):
    """The program ended as memory ran out, the device's or the host's. The text is like that of `ProgramFailed`."""


def failure(ending: str, tail: Sequence[str], patterns: Sequence[str], kernel_killed: bool) -> Exception | None:
    """What a program's end means; None if it went well.

    `ending`: as `trainables.foreign.guard` says it. `tail`: the last lines of its output. `patterns`: regular
    expressions beside `OUT_OF_MEMORY`. `kernel_killed`: whether the kernel killed processes for memory meanwhile.
    """
    kind, _, value = ending.partition(" ")
    if kind == "error":
        return ProgramFailed(value)
    code = int(value)
    if code == 0:
        return None
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = [_RANK.sub("", line) for line in tail]
    said = memory_line(lines, patterns)
    if said is not None:
        return OutOfMemory(_text(how, said, lines))
    if code == -signal.SIGKILL and kernel_killed:
        return OutOfMemory(_text(how, "the kernel killed processes, since the host's memory had run out", lines))
    return ProgramFailed(_text(how, last_words(lines), lines))


def memory_line(lines: Sequence[str], patterns: Sequence[str]) -> str | None:
    """The last line that says that memory ran out; None if there is none."""
    wanted = re.compile("|".join(f"(?:{pattern})" for pattern in (*OUT_OF_MEMORY, *patterns)), re.IGNORECASE)
    return next((line for line in reversed(lines) if wanted.search(line)), None)


def last_words(lines: Sequence[str]) -> str | None:
    """The line of a program's output that says most of why it ended: Python's last exception, or else the last line."""
    tracebacks = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    for start in reversed(tracebacks):
        for line in lines[start + 1 :]:
            if _RAISED.match(line):
                return line
    return lines[-1] if lines else None


def _text(how: str, said: str | None, lines: Sequence[str]) -> str:
    first = how if said is None else f"{how}: {said.strip()[:SAID_CHARACTERS]}"
    return "\n".join([first, "", "The last lines of its output:", *lines]) if lines else first


def blames_others(text: str) -> bool:
    """Whether a `ProgramFailed` speaks of communication, so that another rank may have failed before."""
    return bool(_OTHERS.search(text.partition("\n")[0]))


def kernel_kills() -> int | None:
    """How many processes the kernel has killed for memory since it started, in all of this node; None if untold."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
