"""The polling thread of a node."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from telemetry.devices import Device, Refreshing
from telemetry.samples import SampleBuffer

logger = logging.getLogger(__name__)

FULL_PERIOD_S = 30.0
"""How often a device is read in full where nobody asks for it."""

TICK_BUDGET_S = 0.06
"""Time into a tick after which no further device is read in full: it waits for the next. One takes 6 ms on H200."""

LATE_S = 0.018
"""How late a tick may be: one that would be later is skipped."""

SLOW_READ_S = 0.2
"""A reading that took longer is dropped: there is no telling of which moment it is."""


class Sampler:
    """Reads every device each `period_s` seconds into a buffer, on a fixed schedule: ticks do not drift, and a tick
    whose time has long passed while the one before was still being read is skipped.

    What takes the driver milliseconds is read every `FULL_PERIOD_S` and soon after each `mark`.
    """

    def __init__(self, devices: Sequence[Device], buffer: SampleBuffer, node: str, period_s: float = 0.1) -> None:
        self._devices = devices
        self._buffer = buffer
        self._node = node
        self._period_s = period_s
        self._stopping = False
        self._failed: set[str] = set()
        self._full_ns = dict.fromkeys((device.info.uuid for device in devices), 0)
        self._marked_ns = 1
        self._refreshing = [device for device in devices if isinstance(device, Refreshing)]
        self._thread = threading.Thread(target=self._poll, name="telemetry-sampler", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the buffer keeps what it has."""
        self._stopping = True
        self._thread.join()

    def mark(self, since_ns: int | None = None) -> None:
        """Have every device that was not read in full since then (default: now) read so as soon as ticks allow."""
        self._marked_ns = max(self._marked_ns, time.monotonic_ns() if since_ns is None else since_ns)

    def was_full(self, uuids: Iterable[str], since_ns: int) -> bool:
        """Whether each of these devices was read in full since then."""
        return all(self._full_ns.get(uuid, since_ns) >= since_ns for uuid in uuids)

    def _poll(self) -> None:
        origin, tick = time.monotonic(), 0
        while not self._stopping:
            # Half of what an event's wait costs.
            time.sleep(max(origin + tick * self._period_s - time.monotonic(), 0.0))
            began_ns = time.monotonic_ns()
            self._buffer.append([self._sample(device, began_ns) for device in self._devices])
            for device in self._refreshing:
                device.align(round((origin + (tick + 1) * self._period_s + LATE_S) * 1e9))
            tick = max(tick + 1, math.ceil((time.monotonic() - LATE_S - origin) / self._period_s))

    def _sample(self, device: Device, tick_ns: int) -> dict[str, Any]:
        info, now_ns = device.info, time.monotonic_ns()
        last_ns = self._full_ns[info.uuid]
        due = last_ns < self._marked_ns or now_ns - last_ns >= FULL_PERIOD_S * 1e9
        full = due and now_ns - tick_ns < TICK_BUDGET_S * 1e9
        row: dict[str, Any] = {
            "time_ns": now_ns,
            "node": self._node,
            "device": info.uuid,
            "index": info.index,
            "kind": info.kind,
            "energy_method": info.energy_method,
        }
        try:
            reading = device.read(full)
            seconds = (time.monotonic_ns() - now_ns) / 1e9
            if seconds > SLOW_READ_S:
                raise TimeoutError(f"the driver took {seconds:.1f} s")
        except Exception:
            if info.uuid not in self._failed:
                self._failed.add(info.uuid)
                logger.exception("reading %s failed; its samples are null while it does", info.uuid)
            return row
        finally:
            if full:
                self._full_ns[info.uuid] = now_ns
        return row | reading
