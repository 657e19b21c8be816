"""The samples of a node on its own disk, written as they come, so that they outlive whoever took them.

A recording is a folder of segments, and a segment an Arrow IPC stream. It is called by the time of its first sample in
nanoseconds, and its schema's metadata holds `boot_id`, `follows_ns` (the time of the sample right before its first;
absent where nobody knows of one) and `wall_offset_ns` (add it to `time_ns` for nanoseconds since the epoch).

    ROOT / boot id of the machine / name of the recording / 00000000123456789012.arrows

`time_ns` restarts with the machine: recordings of different boots are never mixed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from telemetry.samples import SCHEMA, SealedBatch, to_table

SEGMENT_BYTES = 16 * 2**20
TOTAL_BYTES = 4 * 2**30
"""What all recordings under one root may take up, before the oldest segments are dropped."""

_SUFFIX = ".arrows"
END_NS = 2**63 - 1
"""Later than any sample."""


def boot_id() -> str:
    """What tells this boot of this machine from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Spool:
    """Writes one recording. A recording that is there already, of a process that died, is carried on.

    Not thread-safe. `write` raises OSError when the disk is full or cannot be written.
    """

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._boot_id = boot_id()
        self.folder = root / self._boot_id / name
        self._file: BinaryIO | None = None
        self._written = 0
        self._last_ns: int | None = None

    def write(self, batches: Sequence[SealedBatch]) -> None:
        """Have these batches on disk, for good, when this returns. They are later than all before."""
        for batch in batches:
            if self._file is None or self._written >= SEGMENT_BYTES or batch.follows_ns != self._last_ns:
                self._begin_segment(batch)
            self._put(batch.message)
            self._last_ns = batch.last_ns
        if self._file is not None and batches:
            self._sync()

    def close(self) -> None:
        """End the segment that is being written; a later `write` begins another."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take
                self._file.close()
            self._file = None

    def _begin_segment(self, batch: SealedBatch) -> None:
        if self._file is not None:
            self._sync()
            self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        _drop_oldest(self._root)
        self._file = (self.folder / f"{batch.first_ns:020d}{_SUFFIX}").open("xb")
        self._written = 0
        metadata = {"boot_id": self._boot_id, "wall_offset_ns": str(time.time_ns() - time.monotonic_ns())}
        if batch.follows_ns is not None:
            metadata["follows_ns"] = str(batch.follows_ns)
        self._put(SCHEMA.with_metadata(metadata).serialize())
        directory = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _put(self, message: pa.Buffer) -> None:
        assert self._file is not None
        self._file.write(message)
        self._written += message.size

    def _sync(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())


def read(folder: Path, start_ns: int = 0, end_ns: int = END_NS, devices: Sequence[str] | None = None) -> pa.Table:
    """What of a recording can be read, from `start_ns` to `end_ns`, of some devices or all; in order of time.

    Raises ValueError if it holds other columns than `telemetry.samples.SCHEMA`.
    """
    table = to_table((sealed.batch for sealed in after(folder, start_ns - 1, end_ns)), start_ns, end_ns)
    return table if devices is None else table.filter(pc.field("device").isin(list(devices)))


def after(folder: Path, time_ns: int, end_ns: int = END_NS) -> Iterator[SealedBatch]:
    """The batches of a recording with samples later than `time_ns`, up to those that begin after `end_ns`, in order.

    Of a segment whose end was torn off, those before it.
    """
    segments = sorted(folder.glob(f"*{_SUFFIX}"))
    begins = [int(path.stem) for path in segments]
    for path, begin_ns, next_ns in zip(segments, begins, [*begins, END_NS][1:], strict=True):
        if begin_ns <= end_ns and next_ns > time_ns:
            yield from (batch for batch in _read_segment(path) if batch.last_ns > time_ns and batch.first_ns <= end_ns)


def _read_segment(path: Path) -> Iterator[SealedBatch]:
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            if not stream.schema.equals(SCHEMA):
                raise ValueError(f"{path} was written by another version: its columns differ")
            known = stream.schema.metadata.get(b"follows_ns")
            follows_ns = None if known is None else int(known)
            for batch in stream:
                sealed = SealedBatch.of(batch, follows_ns)
                yield sealed
                follows_ns = sealed.last_ns
    except (OSError, pa.ArrowInvalid):
        return  # its end was torn off, or it was dropped meanwhile


def _drop_oldest(root: Path) -> None:
    """Remove the segments that were written to the longest ago, of any recording, until the rest fits the limit."""
    segments = []
    for path in root.glob(f"*/*/*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            status = path.stat()
            segments.append((status.st_mtime_ns, status.st_size, path))
    total = SEGMENT_BYTES + sum(size for _, size, _ in segments)
    for _, size, path in sorted(segments):
        if total <= TOTAL_BYTES:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            with contextlib.suppress(OSError):  # not empty
                path.parent.rmdir()
                path.parent.parent.rmdir()
        total -= size
