"""A `python` that starts a script within milliseconds, what the script imports being imported already.

    warm_python.py --serve FD MODULE...     imports modules, and forks for each call at the listening socket FD
    warm_python.py SCRIPT ARGUMENT...       has a fork of that server, at the socket WARM_PYTHON, run the script

The fork takes the caller's arguments, environment, folder and output; it ends with the caller, and the caller as it
did. The server ends with its standard input.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys

SOCKET = "WARM_PYTHON"


def call(arguments: list[str]) -> int:
    """Have the server run a script; the exit code, a signal's being negative."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SOCKET])
        socket.send_fds(server, [b"\n"], [1, 2])
        server.sendall(json.dumps([arguments, dict(os.environ), os.getcwd()]).encode() + b"\n")
        return int(server.makefile().read())


def serve(listener: socket.socket, modules: list[str]) -> list[str]:
    """Answer calls; in a fork, which has become the caller's, return its arguments."""
    for module in modules:
        importlib.import_module(module)
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            os._exit(0)
        caller, _ = listener.accept()
        if not os.fork():
            return run_for(caller)
        caller.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def run_for(caller: socket.socket) -> list[str]:
    """Fork once more: one waits until the caller or the other is gone, the other returns to run the script."""
    outputs = socket.recv_fds(caller, 1, 2)[1]
    arguments, environment, folder = json.loads(caller.makefile().readline())
    program = os.fork()
    if program:
        ended = os.pidfd_open(program)
        if ended in select.select([caller.fileno(), ended], [], [])[0]:
            caller.sendall(str(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])).encode())
        else:
            os.kill(program, signal.SIGKILL)
        os._exit(0)
    caller.close()
    for output, number in zip(outputs, (1, 2), strict=True):
        os.dup2(output, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [os.path.dirname(arguments[0]), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv[:] = arguments
    if "torch" in sys.modules and "OMP_NUM_THREADS" in environment:
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))  # read when it was imported
    return list(arguments)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        script = serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])[0]
        runpy.run_path(script, run_name="__main__")
    elif (code := call(sys.argv[1:])) < 0:
        os.kill(os.getpid(), -code)
    else:
        sys.exit(code)
