"""A process per trial and rank, forked from a server that has imported all that the program needs.

A leak, a hang or a broken communicator dies with its process, and no library has to survive a second trial. The fork
costs milliseconds, since what the program preloads is imported once, in the server.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.util
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, Literal

from trainables.breakdown import Profile
from trainables.leftovers import end_with_parent
from trainables.platforms.base import Platform
from trainables.program import InvalidTrial, Place, Progress, RankReport, TrialRequest
from trainables.scratch import scratch
from trainables.status import Status

ABORTED: Final = "aborted"
POLL_S = 0.1
STACK_S = 5.0  # of a busy machine; a child that answers at all does at once
PROGRESS_S = 0.5
SCRATCH = "wattune-worker-"
_NO_MEMORY = re.compile("out of memory|can.t allocate memory", re.IGNORECASE)  # CUDA's words, and the host's


@dataclass(frozen=True)
class Outcome:
    """How one rank's trial ended: `ok` with a report, or another status with its cause, and what it had handed over.

    `ABORTED` is a rank that was stopped because another rank failed, whose status is the trial's. `phase` is the last
    phase it reached, `traceback` what Python said of the error, or where a rank that hangs was. `infrastructure`: it
    ended for what befell the gang, not for what the rank did. `left` is what the trial left behind, a line each.
    """

    status: Status | Literal["aborted"]
    cause: str | None = None
    phase: str = "start"
    report: RankReport | None = None
    traceback: str | None = None
    infrastructure: bool = False
    left: tuple[str, ...] = ()


class Nursery:
    """Starts the children of one worker process."""

    def __init__(self, platform: Platform, preload: Sequence[str]) -> None:
        """`preload`: modules that the fork server imports, beside this one."""
        os.environ.update(platform.environment)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["trainables.server", __name__, *preload])
        self._ending = contextlib.ExitStack()
        self._folder = self._ending.enter_context(scratch(SCRATCH))
        multiprocessing.util.Finalize(None, self._ending.close, exitpriority=-200)  # after its own, which are inside
        with _temporary_in(self._folder):  # the server's socket, which a worker leaves that is killed
            # The server comes up with the first child: pay that before the first trial is measured. It ends with the
            # thread that starts it here, and its children with it.
            first = self._context.Process(target=_nothing)
            first.start()
            first.join()
        self._store: BaseProcess | None = None

    def keep_store(self, host: str) -> int:
        """Have a child keep a key-value store on `host`, at which ranks can meet until this process ends; its port.

        This process itself need not import torch for it. Raises `EOFError` if there cannot be one.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        self._store = self._context.Process(target=_keep_store, args=(host, theirs), daemon=True)
        self._store.start()
        theirs.close()
        with ours:
            port: int = ours.recv()
        return port

    def close(self) -> None:
        """Remove what is temporary: Ray ends workers without Python's own clean-up."""
        if self._store is not None:
            self._store.kill()
            self._store.join()
        shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)
        self._ending.close()

    @contextlib.contextmanager
    def trial(
        self,
        request: TrialRequest,
        place: Place,
        elapsed_s: Callable[[], float],
        aborted: Callable[[], bool],
        follow: Callable[[Progress], None] = lambda progress: None,
    ) -> Iterator[Outcome]:
        """Run one rank in a child until it ends, `aborted()` turns true or the request's deadline has passed.

        `follow` is given the latest progress at once when there is some, and every `POLL_S` while there is none.

        The child lives on until the block ends. The ranks that wait for it would see it die, and should not be heard
        before the cause is known. Raises `RuntimeError` if the store that is kept here was lost.
        """
        if self._store is not None and not self._store.is_alive():
            raise RuntimeError("the process that keeps the key-value store of trials has ended")
        ours, theirs = self._context.Pipe(duplex=False)
        with tempfile.NamedTemporaryFile(prefix="stack-", dir=self._folder) as stack:
            child = self._context.Process(target=_child, args=(request, place, theirs, stack.name), daemon=True)
            child.start()
            theirs.close()
            try:
                yield _watch(child, ours, Path(stack.name), request.deadline_s, elapsed_s, aborted, follow)
            finally:
                ours.close()
                child.kill()
                child.join()


@contextlib.contextmanager
def _temporary_in(folder: str) -> Iterator[None]:
    """Meanwhile this process makes its temporary files in `folder`."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def _watch(
    child: BaseProcess,
    messages: Connection,
    stack: Path,
    deadline_s: float,
    elapsed_s: Callable[[], float],
    aborted: Callable[[], bool],
    follow: Callable[[Progress], None],
) -> Outcome:
    """What the child said last, or what kept it from saying anything, with the report that it had handed over."""
    progress, began_s = Progress(), 0.0
    while True:
        phase = progress.phase
        if messages.poll(POLL_S):
            try:
                message = messages.recv()
            except EOFError:
                child.join(5)
                outcome = Outcome(Status.CRASH, _death(child.exitcode, phase), phase)
                break
            if isinstance(message, Outcome):
                outcome = message
                break
            if message.phase != phase:
                began_s = elapsed_s()
            progress = message
            follow(progress)
            continue  # all that it said counts before it is stopped
        if aborted():
            outcome = Outcome(ABORTED, None, phase)
            break
        if elapsed_s() > deadline_s:
            cause = f"no result after {deadline_s:.0f} s, in phase {phase}"
            if progress.awaits is not None:
                cause = f"{cause}: {progress.awaits}"
            outcome = Outcome(Status.HANG, cause, phase, traceback=_where(child, stack))
            break
        follow(progress)
    if outcome.report is not None or progress.report is None:
        return outcome
    lacking = Profile(None, outcome.cause, elapsed_s() - began_s)
    return replace(outcome, report=replace(progress.report, profile=lacking))


def _where(child: BaseProcess, stack: Path) -> str | None:
    """The Python stacks of a child's threads, which may be stuck in native code; None if it does not tell."""
    assert child.pid is not None
    os.kill(child.pid, signal.SIGUSR1)
    until = time.monotonic() + STACK_S
    while not stack.stat().st_size and time.monotonic() < until:
        time.sleep(POLL_S)
    time.sleep(POLL_S)  # the rest of it
    return stack.read_text() or None


def _keep_store(host: str, connection: Connection) -> None:
    from torch.distributed import TCPStore

    end_with_parent()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    while True:
        signal.pause()


def _nothing() -> None:
    """The body of a child whose only purpose is to bring the fork server up."""


def _death(exit_code: int | None, phase: str) -> str:
    if exit_code is not None and exit_code < 0:
        return f"the process was killed by {signal.Signals(-exit_code).name} in phase {phase}"
    return f"the process ended with exit code {exit_code} in phase {phase}"


def _child(request: TrialRequest, place: Place, connection: Connection, stack: str) -> None:
    # All threads: a backward pass on a GPU, and what hooks into it, runs in one of its own.
    faulthandler.register(signal.SIGUSR1, open(stack, "w"), all_threads=True)  # noqa: SIM115
    end_with_parent()
    worker = multiprocessing.parent_process()
    if worker is None or not worker.is_alive():
        return  # and the server is gone, or about to go
    place.platform.see(place.devices)
    latest, sent_at = Progress(), 0.0

    def on_progress(progress: Progress) -> None:
        nonlocal latest, sent_at
        if progress.phase != latest.phase or time.monotonic() - sent_at >= PROGRESS_S:
            connection.send(progress)
            sent_at = time.monotonic()
        latest = progress

    try:
        report = request.program.run(request, place, on_progress)
        outcome = Outcome(Status.OK, None, latest.phase, report)
    except InvalidTrial as error:
        outcome = Outcome(Status.INVALID, str(error), latest.phase)
    except BaseException as error:
        status = Status.OOM if is_out_of_memory(error) else Status.CRASH
        outcome = Outcome(status, error_line(error, latest.phase), latest.phase, traceback=traceback.format_exc())
    connection.send(outcome)
    signal.pause()  # until killed: communicators and CUDA contexts go with the process, an orderly end only costs time


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is the device's or the host's memory having run out."""
    import torch

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError | MemoryError) or _NO_MEMORY.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def error_line(error: BaseException, phase: str) -> str:
    """One line: the phase, the kind of error and the first line of what it says, from the root of the chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{phase}: {type(error).__name__}: {text[0][:300] if text else 'no message'}"
