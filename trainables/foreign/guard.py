"""Runs a program and, whatever ends this process's parent, leaves nothing of it: no process, and no folder.

A script of its own, which knows the standard library alone and starts in some milliseconds:

    guard.py FOLDER OUTPUT DIRECTORY COMMAND...

starts COMMAND in DIRECTORY, with what it says going to the file descriptor OUTPUT. When it has ended, and what it
left running has been killed, a line of standard output says how: `exit CODE`, a signal's being negative, or `error
TEXT` where it could not be started. When standard input ends, all is killed, FOLDER is removed, and this process ends.

Whoever is to be outlived can be killed by SIGKILL: all it does is to hold the other end of standard input. Processes
that the program starts come to this one when their parents die, being its descendants (PR_SET_CHILD_SUBREAPER of
prctl(2)), whatever session or process group they are in.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(folder: str, output: int, directory: str, command: list[str]) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=directory,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # should this one be killed
        )
    except (OSError, ValueError) as error:  # not there, not allowed, or with a zero byte in its arguments
        say(f"error it could not be started: {error}")
    else:
        threading.Thread(target=await_end, args=(program,), daemon=True).start()
    os.close(output)
    while os.read(0, 1):
        pass
    end_children()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def await_end(program: subprocess.Popen[bytes]) -> None:
    code = program.wait()
    end_children()
    say(f"exit {code}")


def say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, (" ".join(line.split()) + "\n").encode())


def end_children() -> None:
    """Kill children until there are none: those of the killed become children of this process."""
    while found := children():
        for child in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in found:
            with contextlib.suppress(ChildProcessError):  # the other thread has waited for it
                os.waitpid(child, 0)


def children() -> list[int]:
    """The processes whose parent is this one: the field after the state in /proc/PID/stat, see proc(5)."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
