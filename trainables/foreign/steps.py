"""The steps of a program as it tells of them: by calling the hook, or in its log."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import trainables
from trainables.command import LogPatterns
from trainables.logs import LogReader

HOOK = Path(trainables.__path__[0]) / "hook"
"""The folder that programs import `wattune_steps` from."""

HOOK_VERSION = 1
CALL = "wattune_steps.step() after each optimizer step, on every rank"


@dataclass(frozen=True)
class StepEnd:
    """The end of an optimizer step: its number as the program counts, and when, on this node's monotonic clock.

    `seconds` is the step's time by the program's own account, `tokens` those of all ranks. What is not told is None.
    """

    number: int
    ns: int
    loss: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    tokens: float | None = None


@dataclass(frozen=True)
class Told:
    """What a program said of itself beside its steps, of which losses and norms are in their order."""

    losses: list[float | None]
    grad_norms: list[float | None]
    peak_memory_gib: float | None
    environment: dict[str, str] = field(default_factory=dict)


class Steps(ABC):
    """The ends of steps, in their order as they come, from a thread of another's.

    - `environment`: what the program needs to tell of them.
    - `awaited`: what it should have done, in words.
    - `device`: the UUID of the GPU that it says it trains on, if it does.
    - `problem`: why its steps cannot be followed; None if they can.
    - `newest`: the number of the step that ended last.
    """

    def __init__(self, awaited: str, environment: dict[str, str]) -> None:
        self.awaited, self.environment = awaited, environment
        self.device: str | None = None
        self.problem: str | None = None
        self.newest = 0
        self._ends: deque[StepEnd] = deque()
        self._changed = threading.Condition()

    @property
    def complete(self) -> bool:
        """Whether all has been read that a program told which has ended and whose output was read."""
        return True

    def wait(self, seconds: float) -> bool:
        """Wait for an end that was not taken yet; whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ends), seconds)

    def take(self) -> StepEnd:
        """The next end, which must be there."""
        return self._ends.popleft()

    def hear(self, line: str, ns: int) -> None:  # noqa: B027
        """Take a line of the program's output, which came at `ns`."""

    def _add(self, end: StepEnd) -> None:
        with self._changed:
            self._ends.append(end)
            self.newest = end.number
            self._changed.notify_all()

    @abstractmethod
    def told(self, taken: list[StepEnd], seconds: float) -> Told | None:
        """What the program said beside the steps, of those that were `taken`; None if that is not there in time."""


class HookSteps(Steps):
    """Steps of a program that calls the hook, which `trainables/hook/wattune_steps.py` describes."""

    def __init__(self, path: Path) -> None:
        """Listen at `path`, which must be shorter than 108 bytes (see unix(7))."""
        super().__init__(f"the program is to call {CALL}", {"WATTUNE_STEPS": str(path)})
        self._answers: dict[str, Any] = {}
        self._asked: set[str] = set()
        self._caller: socket.socket | None = None
        self._unread: dict[socket.socket, bytes] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def complete(self) -> bool:
        with self._changed:
            return not self._unread and not wait([self._listener], 0)

    def told(self, taken: list[StepEnd], seconds: float) -> Told | None:
        answer = self._ask("report", True, seconds)
        if answer is None:
            return None
        losses, grad_norms = (answer[name][: len(taken)] for name in ("losses", "grad_norms"))
        return Told(losses, grad_norms, answer["peak_memory_gib"], answer["environment"])

    def profile(self, step: int, path: Path, device: str | None, seconds: float) -> dict[str, Any] | None:
        """Ask once for a profile of step `step`, and wait for what the hook answers; None if it has not yet."""
        question = {"step": step, "path": str(path), "device": device, "cpu": True}
        answer: dict[str, Any] | None = self._ask("profile", question, seconds)
        return answer

    def _ask(self, name: str, question: Any, seconds: float) -> Any:
        with self._changed:
            if name not in self._asked and self._caller is not None:
                self._asked.add(name)
                with contextlib.suppress(OSError):  # it has ended, and said before what it had to
                    self._caller.sendall(json.dumps({name: question}).encode() + b"\n")
            self._changed.wait_for(lambda: name in self._answers, seconds)
            return self._answers.get(name)

    def _serve(self) -> None:
        while True:
            wait([self._listener, *self._unread])
            with self._changed:
                if wait([self._listener], 0):
                    self._unread[self._listener.accept()[0]] = b""
                for connection in [one for one in self._unread if wait([one], 0)]:
                    self._read(connection)
                self._changed.notify_all()

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            del self._unread[connection]
            return
        *lines, self._unread[connection] = (self._unread[connection] + data).split(b"\n")
        for line in lines:
            self._hear_hook(connection, json.loads(line))

    def _hear_hook(self, connection: socket.socket, message: dict[str, Any]) -> None:
        if "step" in message:
            self._add(StepEnd(message["step"], message["ns"], tokens=message["tokens"]))
        elif "hello" in message:
            version = message["hello"]["version"]
            if version != HOOK_VERSION:
                self.problem = f"its wattune_steps.py speaks version {version} of what is version {HOOK_VERSION} here"
            elif self._caller is not None:
                self.problem = "two processes of one rank call wattune_steps.step()"
            self.device, self._caller = message["hello"]["device"], connection
        else:
            self._answers |= message


class LogSteps(Steps):
    """Steps of a program that tells of them in its output. A line that is some steps after the last ends them all."""

    def __init__(self, patterns: LogPatterns) -> None:
        super().__init__(f"a line of the program's output is to match {patterns.step!r}", {})
        self._reader = LogReader(patterns)
        self._last: StepEnd | None = None
        self._memory_gib: float | None = None

    def hear(self, line: str, ns: int) -> None:
        try:
            told = self._reader.read(line)
        except ValueError as error:
            self.problem = f"the patterns of steps read what is no number: {error}"
            return
        if told is None:
            return
        if told.memory_gib is not None:
            self._memory_gib = max(told.memory_gib, self._memory_gib or 0.0)
        if told.step is None:
            return
        end, before = StepEnd(told.step, ns, told.loss, told.grad_norm, told.seconds), self._last
        if before is None:
            self._add(end)
        elif (count := end.number - before.number) > 0:
            for i in range(1, count):
                self._add(StepEnd(before.number + i, before.ns + (ns - before.ns) * i // count, seconds=told.seconds))
            self._add(end)
        else:
            return  # said twice
        self._last = end

    def told(self, taken: list[StepEnd], seconds: float) -> Told:
        return Told([end.loss for end in taken], [end.grad_norm for end in taken], self._memory_gib)
