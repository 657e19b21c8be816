"""Tokens on an object store: copied once to each node, and read there as files.

A store is whatever pyarrow reaches by a URI: `s3://`, `gs://`, `abfs://`, `file://`. Who may read there is told by the
environment of each node, as the store's own tools have it: a role of the machine, variables, files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem


def is_uri(source: str) -> bool:
    """Whether tokens lie on an object store rather than at a path."""
    return "://" in source


def pair(named: str) -> tuple[str, str]:
    """The two files of an indexed dataset that is named by either of their endings, or by neither."""
    stem = named[: -len(".bin")] if named.endswith((".bin", ".idx")) else named
    return f"{stem}.bin", f"{stem}.idx"


def holds_secret(source: str) -> bool:
    """Whether a URI has a password in it, which would be recorded with it."""
    return is_uri(source) and urlsplit(source).password is not None


def cache() -> Path:
    """Where copies lie on this machine. They may be removed whenever no search runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wattune" / "data"


def fetch(source: str) -> Path:
    """The path of this machine's copy of `source`, made now if there is none of what the store has at present.

    `source` is named as a file would be: a pair of `.bin` and `.idx` by either or by neither ending, else one file. Of
    several processes one copies, the others wait. A copy appears whole or not at all. Raises `FileNotFoundError` if
    there is no such object, other kinds of `OSError` if the store or the disk fails, and `ValueError` for a URI of no
    store or of nothing in it.
    """
    from pyarrow.fs import FileSystem

    if not (named := urlsplit(source)).netloc + named.path.strip("/"):
        raise ValueError("the URI names no object")
    store, path = FileSystem.from_uri(source)
    objects = _objects(store, path)
    if not objects:
        raise FileNotFoundError(f"there is no such object, with the ending .bin or without: {source}")
    version = "".join(f"{one.path}\n{one.size}\n{one.mtime_ns}\n" for one in objects)
    copy = cache() / hashlib.sha256(f"{source}\n{version}".encode()).hexdigest()[:16]
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        with copy.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of a process that dies the kernel takes it
            if not copy.exists():
                _copy(store, objects, copy)
    return copy / PurePosixPath(path).name


def _objects(store: FileSystem, path: str) -> Sequence[FileInfo]:
    """The objects that make up the tokens at `path`; none if one is missing that must be there."""
    from pyarrow.fs import FileType

    names = [path] if path.endswith(".npy") else list(pair(path))
    return [one for one in store.get_file_info(names) if one.type == FileType.File]


def _copy(store: FileSystem, objects: Sequence[FileInfo], copy: Path) -> None:
    from pyarrow.fs import LocalFileSystem, copy_files

    part = copy.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    part.mkdir()
    try:
        for one in objects:
            copy_files(one.path, str(part / one.base_name), store, LocalFileSystem())
        part.rename(copy)
    finally:
        shutil.rmtree(part, ignore_errors=True)
