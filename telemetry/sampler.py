"""The polling thread of a node."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from telemetry.devices.base import Device
from telemetry.samples import SampleBuffer

logger = logging.getLogger(__name__)


class Sampler:
    """Reads every device each `period_s` seconds into a buffer, on a fixed schedule: ticks do not drift, and a tick
    whose time has passed while the one before was still being read is skipped."""

    def __init__(self, devices: Sequence[Device], buffer: SampleBuffer, node: str, period_s: float = 0.1) -> None:
        self._devices = devices
        self._buffer = buffer
        self._node = node
        self._period_s = period_s
        self._stopping = threading.Event()
        self._failed: set[str] = set()
        self._thread = threading.Thread(target=self._poll, name="telemetry-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the buffer keeps what it has."""
        self._stopping.set()
        self._thread.join()

    def _poll(self) -> None:
        origin, tick = time.monotonic(), 0
        while not self._stopping.wait(max(origin + tick * self._period_s - time.monotonic(), 0.0)):
            self._buffer.append([self._sample(device) for device in self._devices])
            tick = max(tick + 1, math.ceil((time.monotonic() - origin) / self._period_s))

    def _sample(self, device: Device) -> dict[str, Any]:
        info = device.info
        row: dict[str, Any] = {
            "time_ns": time.monotonic_ns(),
            "node": self._node,
            "device": info.uuid,
            "index": info.index,
            "kind": info.kind,
            "energy_method": info.energy_method,
        }
        try:
            reading = device.read()
        except Exception:
            if info.uuid not in self._failed:
                self._failed.add(info.uuid)
                logger.exception("reading %s failed; its samples are null while it does", info.uuid)
            return row
        return row | reading
