"""A Linux namespace for a benchmark that kills and fills: processes, mounts and shared memory of its own.

Whatever runs in it ends with it, and nothing else on the machine is seen from inside.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MARK = "WATTUNE_APART"
"""Set inside: `init` for the first process, `here` for what it runs."""


def possible() -> bool:
    """Whether this user may make such namespaces here."""
    return subprocess.run([*_unshare(), "true"], capture_output=True, check=False).returncode == 0


def apart(module: str, arguments: list[str], disk: Path, disk_mib: int) -> int:
    """Run `python -m MODULE ARGUMENTS` in namespaces of its own, with a file system of `disk_mib` MiB at `disk`.

    Returns its exit code. The module is to ask `inside` first.
    """
    mounts = f"mount -t tmpfs -o size={disk_mib}m wattune {disk} && mount -t tmpfs wattune /dev/shm"
    first = [sys.executable, "-m", __name__, sys.executable, "-m", module, *arguments]
    return subprocess.run([*_unshare(), "sh", "-c", f'{mounts} && exec "$@"', "sh", *first], check=False).returncode


def inside() -> bool:
    """Whether this process is in namespaces that `apart` made."""
    return MARK in os.environ


def _unshare() -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *as_root, "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]


def _first_process(command: list[str]) -> int:
    """Run a command as its first process does: collect all that end without a parent, as `init` has to."""
    child = subprocess.Popen(command, env=os.environ | {MARK: "here"})
    while True:
        ended, status = os.wait()
        if ended == child.pid:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(_first_process(sys.argv[1:]))
