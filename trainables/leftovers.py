"""What a trial leaves behind on its node once its process has been killed: found, told, and cleaned up where it can be.

All that descends from a worker's trials is known by a variable of its environment (`/proc/PID/environ`, proc(5)), in
whatever session it is and whoever its parent has become. A port that is listened at goes with its process. A segment of
shared memory that came up meanwhile, and that no process has open or mapped, is nobody's any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MARK = "WATTUNE_WORKER"
"""The variable, whose value is that of the worker."""

PATIENCE_S = 10.0
"""What ends by itself soon after the process that it belongs to is not left behind."""

MEMORY_S = 5.0
"""How long a device may take to give back the memory of a process that was killed."""

MEMORY_GIB = 0.25
"""More than this above what was in use before is left behind."""

POLL_S = 0.05

_SHM = Path("/dev/shm")
_SEMAPHORE = "sem."  # sem_overview(7): 32 bytes. Inductor's compile workers, once killed, leave one: no news to anybody
_PR_SET_PDEATHSIG = 1


class Leftovers:
    """Of the trials of one worker. To be made before anything that is to be known as a trial's is started."""

    def __init__(self, mark: str, memory_gib: Callable[[], float | None] = lambda: None) -> None:
        """`mark`: no other worker's, but for one that died and whose place this one takes: what is left of its trials
        is ended. `memory_gib` is what is in use of the worker's device, None where there is none."""
        self._mark, self._memory_gib = f"{MARK}={mark}".encode(), memory_gib
        for pid in self._marked():
            _kill(pid)
        os.environ[MARK] = mark
        self.begin()

    def begin(self) -> None:
        """A trial begins. What is there by then is none of its."""
        self._there, self._segments, self._used_gib = set(self._marked()), _segments(), self._memory_gib()

    def end(self) -> tuple[str, ...]:
        """The trial's own process has ended. Returns what it has left behind, a line each, which is gone now if that
        could be done; nothing as a rule, within some milliseconds."""
        told = []
        until = time.monotonic() + PATIENCE_S
        while (left := set(self._marked()) - self._there) and time.monotonic() < until:
            time.sleep(POLL_S)
        for pid in sorted(left):
            told.append(f"process {pid} ({_command(pid)})")
            _kill(pid)
        if came := {name: inode for name, inode in _segments().items() if name not in self._segments}:
            used = _in_use()
            for name in sorted(name for name, inode in came.items() if inode not in used):
                with contextlib.suppress(OSError):
                    size = (_SHM / name).stat().st_size
                    (_SHM / name).unlink()
                    if not name.startswith(_SEMAPHORE):
                        told.append(f"shared memory {name} ({size / 2**20:.1f} MiB)")
        return (*told, *self._memory())

    def _memory(self) -> Iterator[str]:
        if self._used_gib is None:
            return
        until = time.monotonic() + MEMORY_S
        while (used := self._memory_gib()) is not None and used > self._used_gib + MEMORY_GIB:
            if time.monotonic() > until:
                yield f"{used - self._used_gib:.1f} GiB of the GPU's memory, {MEMORY_S:.0f} s later"
                return
            time.sleep(POLL_S)

    def _marked(self) -> list[int]:
        """The processes that have the mark, but for the worker's own helpers, whose parent it is."""
        found = []
        for pid in _processes():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and _parent(pid) != os.getpid():
                    found.append(pid)
        return found


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, though it be stopped (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _parent(pid: int) -> int:
    """The field after the state, which follows the name in parentheses."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()[:100]
    return "ended meanwhile"


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _segments() -> dict[str, int]:
    """This user's segments of shared memory: name -> inode."""
    with contextlib.suppress(OSError), os.scandir(_SHM) as entries:  # a machine without, or one is gone just now
        mine = (entry for entry in entries if entry.is_file() and entry.stat().st_uid == os.geteuid())
        return {entry.name: entry.inode() for entry in mine}
    return {}


def _in_use() -> set[int]:
    """The inodes of segments that some process has open or mapped, by whatever name: that which makes a semaphore knows
    it by one that is gone (sem_open of glibc links it to its own)."""
    used = set[int]()
    for pid in _processes():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()  # proc(5): the inode is the fifth field
            used.update(int(line.split(maxsplit=5)[4]) for line in maps if f" {_SHM}/" in line)
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(path := f"/proc/{pid}/fd/{descriptor}").startswith(f"{_SHM}/"):
                        used.add(os.stat(path).st_ino)
    return used
