from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from telemetry import spool
from telemetry.samples import SCHEMA, SealedBatch
from telemetry.spool import Spool, boot_id


def batches(start: int, end: int, size: int = 10, known: bool = False) -> list[SealedBatch]:
    """Rows at `start` to `end` - 1 ns, of two devices in turn, in batches; `known` whether there was one before."""
    rows = [{"time_ns": t, "node": "n", "device": f"GPU-{t % 2}", "power_w": float(t)} for t in range(start, end)]
    return [
        SealedBatch.of(
            pa.RecordBatch.from_pylist(rows[at : at + size], schema=SCHEMA), start + at - 1 if at or known else None
        )
        for at in range(0, len(rows), size)
    ]


def times(table: pa.Table) -> list[int]:
    return table["time_ns"].to_pylist()


def test_what_was_written_is_read_by_time_and_device(tmp_path: Path) -> None:
    recording = Spool(tmp_path, "a")
    recording.write(batches(100, 200))
    recording.write(batches(200, 220, known=True))
    table = spool.read(recording.folder)  # while it is being written
    assert table.schema == SCHEMA
    assert times(table) == list(range(100, 220))
    assert table["power_w"].to_pylist() == [float(t) for t in range(100, 220)]
    assert times(spool.read(recording.folder, 155, 205)) == list(range(155, 206))
    assert times(spool.read(recording.folder, 155, 165, ["GPU-1"])) == [155, 157, 159, 161, 163, 165]
    assert times(spool.read(recording.folder, 500)) == []
    assert times(spool.read(tmp_path / "absent")) == []


def test_a_segment_says_which_boot_and_when(tmp_path: Path) -> None:
    recording = Spool(tmp_path, "a")
    recording.write(batches(100, 110))
    assert recording.folder == tmp_path / boot_id() / "a"
    (segment,) = recording.folder.iterdir()
    with pa.ipc.open_stream(segment) as stream:
        metadata = stream.schema.metadata
    assert metadata[b"boot_id"].decode() == boot_id()
    assert b"follows_ns" not in metadata
    epoch_ns = time.monotonic_ns() + int(metadata[b"wall_offset_ns"])
    assert epoch_ns == pytest.approx(time.time_ns(), abs=10**9)


def test_a_segment_torn_anywhere_gives_what_was_before(tmp_path: Path) -> None:
    recording = Spool(tmp_path, "a")
    recording.write(batches(100, 140))
    recording.close()
    (segment,) = recording.folder.iterdir()
    whole = segment.read_bytes()
    message = batches(100, 110)[0].message.size
    lengths = set()
    for length in range(0, len(whole), 97):
        segment.write_bytes(whole[:length])
        read = times(spool.read(recording.folder))
        assert read == list(range(100, 100 + len(read)))
        held = max((length - (len(whole) - 4 * message)) // message, 0)
        assert len(read) == 10 * held
        lengths.add(len(read))
    assert lengths == {0, 10, 20, 30}


def test_segments_are_bounded_and_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = batches(0, 10)[0].message.size
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 3 * size)
    monkeypatch.setattr(spool, "TOTAL_BYTES", 20 * size)
    former = Spool(tmp_path, "of an earlier search")
    former.write(batches(0, 50))
    former.close()
    recording = Spool(tmp_path, "a")
    last = None
    for start in range(1000, 2000, 10):
        recording.write(batches(start, start + 10, known=last is not None))
        last = start
    read = times(spool.read(recording.folder))
    assert read == list(range(read[0], 2000))
    assert 10 * size < sum(path.stat().st_size for path in tmp_path.rglob("*.arrows")) <= 20 * size
    assert not former.folder.exists()
    # What is left knows of what it followed, so that whoever looks for it is told.
    oldest = next(spool.after(recording.folder, 1500))
    assert oldest.follows_ns == oldest.first_ns - 1
    assert not oldest.continues(1005)
    assert all(b.follows_ns == a.last_ns for a, b in pairwise(spool.after(recording.folder, 0)))


def test_a_recording_is_carried_on_after_its_writer_died(tmp_path: Path) -> None:
    first = Spool(tmp_path, "a")
    first.write(batches(100, 130))
    segment = next(first.folder.iterdir())
    segment.write_bytes(segment.read_bytes()[:-5])
    second = Spool(tmp_path, "a")
    second.write(batches(150, 170))
    read = list(spool.after(second.folder, 0))
    assert [sealed.first_ns for sealed in read] == [100, 110, 150, 160]
    assert [sealed.follows_ns for sealed in read] == [None, 109, None, 159]


def test_columns_of_another_version_are_refused(tmp_path: Path) -> None:
    with pa.OSFile(str(tmp_path / "00000000000000000001.arrows"), "wb") as file:
        pa.ipc.new_stream(file, SCHEMA.remove(5)).close()
    with pytest.raises(ValueError, match="its columns differ"):
        spool.read(tmp_path)


WRITER = """
import sys, time, pyarrow as pa
from pathlib import Path
from telemetry.samples import SCHEMA, SealedBatch
from telemetry.spool import Spool
recording, last = Spool(Path(sys.argv[1]), "a"), None
while True:
    batch = pa.RecordBatch.from_pylist([{"time_ns": time.monotonic_ns(), "node": "n", "device": "d"}], schema=SCHEMA)
    sealed = SealedBatch.of(batch, last)
    recording.write([sealed])
    last = sealed.last_ns
    print(last, flush=True)
"""


def test_all_that_was_written_survives_a_killed_writer(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        written = [int(writer.stdout.readline()) for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
        written += [int(line) for line in writer.stdout if line.endswith("\n")]
    assert times(spool.read(tmp_path / boot_id() / "a"))[: len(written)] == written


def test_what_a_slow_disk_did_not_take_is_told(tmp_path: Path) -> None:
    recording = Spool(tmp_path, "a")
    recording.write(batches(100, 120))
    recording.write(batches(150, 160, known=True))
    *_, last = spool.after(recording.folder, 0)
    assert last.follows_ns == 149
    assert not last.continues(119)
