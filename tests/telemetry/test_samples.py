from __future__ import annotations

import threading
import time

import pyarrow as pa

from telemetry.samples import SCHEMA, SampleBuffer, SealedBatch


def row(time_ns: int) -> dict[str, object]:
    return {"time_ns": time_ns, "node": "n", "device": "GPU-0"}


def test_between_takes_both_edges_and_leaves_what_a_row_lacks_null() -> None:
    buffer = SampleBuffer(capacity_rows=100, batch_rows=4)
    for time_ns in range(10):
        buffer.append([row(time_ns) | {"power_w": float(time_ns)} | ({"energy_mj": 7} if time_ns == 5 else {})])
    table = buffer.between(3, 8)
    assert table.schema == SCHEMA
    assert table["time_ns"].to_pylist() == [3, 4, 5, 6, 7, 8]
    assert table["power_w"].to_pylist() == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert table["energy_mj"].to_pylist() == [None, None, 7, None, None, None]
    assert table["gpu_temp_c"].null_count == 6
    assert buffer.between(100, 200).num_rows == 0


def test_the_buffer_is_bounded_and_keeps_the_latest() -> None:
    buffer = SampleBuffer(capacity_rows=100, batch_rows=16)
    for time_ns in range(1000):
        buffer.append([row(time_ns)])
    kept = buffer.between(0, 1000)["time_ns"].to_pylist()
    assert kept == list(range(1000 - len(kept), 1000))
    assert 100 <= len(kept) <= 132


def test_counters_keep_all_64_bits() -> None:
    buffer = SampleBuffer(capacity_rows=10)
    buffer.append([row(1) | {"energy_mj": 2**64 - 1}])
    assert buffer.between(0, 2)["energy_mj"].to_pylist() == [2**64 - 1]


def test_wait_for_returns_when_the_sample_comes_and_gives_up_when_none_does() -> None:
    buffer = SampleBuffer(capacity_rows=10)
    assert not buffer.wait_for(5, timeout_s=0.01)
    writer = threading.Timer(0.05, lambda: buffer.append([row(5)]))
    writer.start()
    began = time.monotonic()
    assert buffer.wait_for(5, timeout_s=600)
    assert time.monotonic() - began < 60
    writer.join()


def test_batches_follow_one_another_and_say_so() -> None:
    buffer = SampleBuffer(capacity_rows=4, batch_rows=100)
    buffer.append([row(1), row(2)])
    assert buffer.after(0) == []
    buffer.seal()
    (first,) = buffer.after(0)
    assert (first.follows_ns, first.first_ns, first.last_ns, first.rows) == (None, 1, 2, 2)
    assert not first.continues(0)  # nobody knows what was before
    assert first.continues(1)
    buffer.append([row(3)])
    buffer.seal()
    assert [sealed.last_ns for sealed in buffer.after(1)] == [2, 3]
    (second,) = buffer.after(2)
    assert second.batch["time_ns"].to_pylist() == [3]
    assert second.follows_ns == 2
    assert second.continues(2)
    assert not second.continues(1)
    for time_ns in range(4, 10):
        buffer.append([row(time_ns)])
        buffer.seal()
    assert buffer.after(0)[0].follows_ns == buffer.after(0)[0].first_ns - 1  # of one that was dropped


def test_nothing_is_lost_or_doubled_between_a_writer_and_readers_that_seal() -> None:
    buffer = SampleBuffer(capacity_rows=10_000, batch_rows=7)
    seen: list[list[int]] = [[], [], []]
    done = threading.Event()

    def read(mine: list[int]) -> None:
        last = 0
        while True:
            final = done.is_set()
            buffer.seal()
            for sealed in buffer.after(last):
                mine += sealed.batch["time_ns"].to_pylist()
                last = sealed.last_ns
            if final:
                return

    readers = [threading.Thread(target=read, args=(mine,)) for mine in seen]
    for reader in readers:
        reader.start()
    for time_ns in range(1, 3001):
        buffer.append([row(time_ns)])
    done.set()
    for reader in readers:
        reader.join()
    assert all(mine == list(range(1, 3001)) for mine in seen)


def test_a_sealed_batch_is_its_rows() -> None:
    batch = pa.RecordBatch.from_pylist([row(4) | {"xid": 79}, row(9)], schema=SCHEMA)
    sealed = SealedBatch.of(batch, 3)
    assert sealed.batch.equals(batch)
    assert (sealed.first_ns, sealed.last_ns) == (4, 9)
