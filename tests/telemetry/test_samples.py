from __future__ import annotations

import threading
import time

from telemetry.samples import SCHEMA, SampleBuffer


def row(time_ns: int) -> dict[str, object]:
    return {"time_ns": time_ns, "node": "n", "device": "GPU-0"}


def test_between_takes_both_edges_and_leaves_what_a_row_lacks_null() -> None:
    buffer = SampleBuffer(capacity_rows=100, batch_rows=4)
    for time_ns in range(10):
        buffer.append([row(time_ns) | {"power_w": float(time_ns)}])
    table = buffer.between(3, 8)
    assert table.schema == SCHEMA
    assert table["time_ns"].to_pylist() == [3, 4, 5, 6, 7, 8]
    assert table["power_w"].to_pylist() == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert table["energy_mj"].null_count == 6
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
    assert buffer.wait_for(5, timeout_s=10)
    assert time.monotonic() - began < 5
    writer.join()
