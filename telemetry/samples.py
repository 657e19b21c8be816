"""The samples of a node's devices: one row a device and a tick, columnar in bulk.

Units are in the column names (`_w` watts, `_mj` millijoules, `_ns` nanoseconds, `_mhz`, `_c` degrees Celsius, `_gib`,
`_bytes`); utilisations and activities are shares from 0 to 1. What a device cannot say, or was not asked at a tick, is
null. `COUNTERS` are running totals that start at an arbitrary value; everything else is the state at the tick, but for
`MEANS`, which are of the time since the device was last asked for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

THROTTLE_CAUSES = ("power_cap", "sw_thermal", "hw_thermal", "hw_brake", "sync_boost", "thermal_policy")

GAUGES = (
    "power_w",
    "power_average_w",
    "hbm_power_w",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "gpu_temp_c",
    "gpu_temp_margin_c",
    "hbm_temp_c",
    "gpu_utilisation",
    "memory_used_gib",
    "cpu_utilisation",
    "process_cpu_utilisation",
    "cpu_clock_mhz",
    "cpu_temp_c",
)
"""Columns that hold a state rather than a running total."""

MEANS = ("tensor_activity", "dram_activity")
"""Columns that hold a mean since they were last read: share of cycles in which tensor cores, or memory, were busy."""

TRAFFIC = ("pcie_rx_bytes", "pcie_tx_bytes", "link_rx_bytes", "link_tx_bytes")
"""Bytes received and sent by the GPU over PCIe, and over its links to other GPUs (NVLink, xGMI)."""

EVENTS = ("ecc_corrected", "ecc_uncorrected", "xid_errors")
"""Numbers of events: memory errors that were corrected and that were not, and XID errors that the driver reported."""

COUNTERS = ("energy_mj", *(f"throttle_{cause}_ns" for cause in THROTTLE_CAUSES), *TRAFFIC, *EVENTS)
"""Columns that hold a running total."""

SCHEMA = pa.schema(
    [
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("node", pa.string(), nullable=False),
        pa.field("device", pa.string(), nullable=False),
        ("index", pa.int32()),
        ("kind", pa.string()),
        ("energy_method", pa.string()),
        ("energy_ns", pa.int64()),
        *((name, pa.float64()) for name in (*GAUGES, *MEANS)),
        *((name, pa.uint64()) for name in COUNTERS),
        ("throttle_reasons", pa.uint64()),
        ("xid", pa.uint64()),
    ]
)
"""`time_ns` is the node's `time.monotonic_ns()`, `device` a GPU's UUID or `cpu:<hostname>`, `kind` that of its vendor
(`telemetry.devices.Vendor`). `energy_method` says whether `energy_mj` is a hardware `counter` or `estimated`,
`energy_ns`, on the clock of `time_ns`, when its value was new, where that is known. `throttle_reasons` is the driver's
bitmask, `xid` the number of the latest XID error."""

_ROW = pa.struct(list(SCHEMA))


@dataclass(frozen=True)
class SealedBatch:
    """Rows of one node in order of time: one Arrow IPC message, which lies in memory and on disk and goes to clients.

    `follows_ns` is the time of the row right before the first; None where nobody knows of one.
    """

    follows_ns: int | None
    first_ns: int
    last_ns: int
    rows: int
    message: pa.Buffer

    @classmethod
    def of(cls, batch: pa.RecordBatch, follows_ns: int | None) -> SealedBatch:
        """A batch by `SCHEMA`, of one row at least."""
        first, last = batch["time_ns"][0].as_py(), batch["time_ns"][-1].as_py()
        return cls(follows_ns, first, last, batch.num_rows, batch.serialize())

    @property
    def batch(self) -> pa.RecordBatch:
        """The rows, without a copy."""
        return pa.ipc.read_record_batch(self.message, SCHEMA)

    def continues(self, time_ns: int) -> bool:
        """Whether no row between that time and the first is missing."""
        return self.first_ns <= time_ns or (self.follows_ns is not None and self.follows_ns <= time_ns)


def to_table(batches: Iterable[pa.RecordBatch], start_ns: int, end_ns: int) -> pa.Table:
    """The rows of these batches with `start_ns <= time_ns <= end_ns`."""
    table = pa.Table.from_batches(batches, schema=SCHEMA)
    return table.filter((pc.field("time_ns") >= start_ns) & (pc.field("time_ns") <= end_ns))


class SampleBuffer:
    """The latest samples of a node, in memory and bounded; safe to append to and read from several threads.

    Rows are sealed into batches by `seal`, by `between`, and when there are `batch_rows`; whole batches are dropped,
    oldest first. At least the latest `capacity_rows` rows are kept, and little more.
    """

    def __init__(self, capacity_rows: int, batch_rows: int = 256) -> None:
        self._capacity_rows = capacity_rows
        self._batch_rows = batch_rows
        self._sealed: deque[SealedBatch] = deque()
        self._sealed_rows = 0
        self._open: list[Mapping[str, Any]] = []
        self._sealing = threading.Lock()
        self._appended = threading.Condition()
        self._latest_ns: int | None = None

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of one tick, in order of time and later than all before; columns that a row lacks are null."""
        with self._appended:
            self._open.extend(rows)
            self._latest_ns = rows[-1]["time_ns"]
            full = len(self._open) >= self._batch_rows
            self._appended.notify_all()
        if full:
            self.seal()

    @property
    def latest_sealed_ns(self) -> int | None:
        """The time of the last sample that is in a batch."""
        with self._appended:
            return self._sealed[-1].last_ns if self._sealed else None

    def after(self, time_ns: int) -> list[SealedBatch]:
        """The sealed batches with samples later than `time_ns`, in order; the first may have earlier ones too."""
        with self._appended:
            later = list(takewhile(lambda batch: batch.last_ns > time_ns, reversed(self._sealed)))
        return later[::-1]

    def between(self, start_ns: int, end_ns: int) -> pa.Table:
        """The samples with `start_ns <= time_ns <= end_ns`, in order of time."""
        self.seal()
        return to_table((sealed.batch for sealed in self.after(start_ns - 1)), start_ns, end_ns)

    def wait_for(self, time_ns: int, timeout_s: float) -> bool:
        """Block until a sample at or after `time_ns` is held; False if none comes within `timeout_s` seconds."""
        with self._appended:
            return self._appended.wait_for(
                lambda: self._latest_ns is not None and self._latest_ns >= time_ns, timeout=timeout_s
            )

    def seal(self) -> None:
        """Make a batch of the rows that are in none yet."""
        with self._sealing:  # one at a time, or batches would come out of order
            with self._appended:
                rows, self._open = self._open, []
                follows_ns = self._sealed[-1].last_ns if self._sealed else None
            if not rows:
                return
            sealed = SealedBatch.of(pa.RecordBatch.from_struct_array(pa.array(rows, _ROW)), follows_ns)
            with self._appended:
                self._sealed.append(sealed)
                self._sealed_rows += sealed.rows
                while self._sealed_rows - self._sealed[0].rows >= self._capacity_rows:
                    self._sealed_rows -= self._sealed.popleft().rows
