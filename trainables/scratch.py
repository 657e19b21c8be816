"""Folders for what is temporary, which go with the process that made them, or else with the next that makes one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CLEANING_S = 5.0
LOCK = "in-use.lock"


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[str]:
    """A folder, with a name short enough for sockets, for as long as the block lasts.

    Those of this prefix that processes left which were killed are removed: the kernel keeps a folder's lock while its
    process lives.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError), (left / LOCK).open("r+") as lock:  # alive, just begun, or of another user
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=prefix)
    with Path(folder, "new").open("w") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        Path(folder, "new").rename(Path(folder, LOCK))  # nobody finds it unlocked
        try:
            yield folder
        finally:
            until = time.monotonic() + CLEANING_S
            while os.path.exists(folder) and time.monotonic() < until:  # the last of its processes may write yet
                shutil.rmtree(folder, ignore_errors=True)
                time.sleep(0.1)
