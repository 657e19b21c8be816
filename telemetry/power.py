"""Power limits of a node's GPUs, set for a while: what each had is put back, also when who set them is killed.

Nothing here is called unless a person let a search set limits: `wattune run --allow-power-limits`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from telemetry.devices import Device, Limitable

READY = "ready"
"""What the watchdog says once it is there."""

START_S = 30.0
EXACT_W = 1.0
"""How far a limit that was set may be from the one that is read."""


class PowerLimits:
    """The limits of a node's devices. Before the first is set, a process is started that outlives this one.

    Safe to be called from several threads.
    """

    def __init__(self, devices: Iterable[Device]) -> None:
        self._devices = {device.info.index: device for device in devices if isinstance(device, Limitable)}
        self._before: dict[int, float] = {}
        self._watchdog: Watchdog | None = None
        self._lock = threading.Lock()

    def check(self, limits: Iterable[float]) -> None:
        """Raise OSError, in a line, if one of these limits is none that each of the devices takes. Whether this process
        may set any is not tried: these may be others' GPUs."""
        wanted = list(limits)
        for device in self._devices.values():
            for watts in wanted:
                _check_range(device, watts)

    def set(self, index: int, watts: float) -> None:
        """Set the limit of the device with this number on the node.

        Raises OSError, in a line, for one that has no limit to set or not such a one, and where it cannot be set.
        """
        with self._lock:
            device = self._devices.get(index)
            if device is None:
                raise OSError(f"device {index} has no power limit that can be set")
            _check_range(device, watts)
            before = device.power_limit_w()
            first = index not in self._before
            if self._watchdog is None:
                self._watchdog = Watchdog()
            if first:
                self._watchdog.guard(device.info.uuid, before)
                self._before[index] = before
            try:
                device.set_power_limit(watts)
            finally:
                now = device.power_limit_w()
                if first and now == before != watts:  # nothing was set
                    del self._before[index]
                    self._watchdog.leave(device.info.uuid)
            if abs(now - watts) > EXACT_W:
                raise OSError(f"{device.info.uuid} has a power limit of {now:g} W though {watts:g} W were set")

    def holds(self, index: int, watts: float) -> bool:
        """Whether the limit that was set is still there; False where nothing answers."""
        with self._lock:
            try:
                return index in self._before and abs(self._devices[index].power_limit_w() - watts) <= EXACT_W
            except OSError:
                return False

    def restore(self, index: int) -> None:
        """Put back what the device had, if that was changed. Raises OSError where that cannot be done: the watchdog
        tries again when this process is gone."""
        with self._lock:
            if index not in self._before:
                return
            device = self._devices[index]
            device.set_power_limit(self._before[index])
            del self._before[index]
            assert self._watchdog is not None
            self._watchdog.leave(device.info.uuid)

    def close(self) -> None:
        """Put back all of them; what cannot be is left to the watchdog."""
        for index in list(self._before):
            try:
                self.restore(index)
            except OSError:
                continue
        with self._lock:
            if self._watchdog is not None:
                self._watchdog.close()
                self._watchdog = None


def _check_range(device: Limitable, watts: float) -> None:
    least, highest = device.power_limit_range_w()
    if not least <= watts <= highest:
        raise OSError(f"{device.info.uuid} takes a power limit of {least:g} to {highest:g} W, not {watts:g} W")


class Watchdog:
    """A process (`telemetry.watchdog`) that sets limits as it was told once this one is gone, however it ended.

    It is nobody's child and has no terminal, so that what ends this process and its children leaves it. It notices by
    the pipe between them, which the kernel closes.
    """

    def __init__(self) -> None:
        """Raises OSError if it cannot be started."""
        root = Path(__file__).parents[1]
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "telemetry.watchdog"],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        self._process.wait(START_S)  # what was started has left the one that stays
        if said != READY:
            raise OSError("no power limit is set: the process that would restore it did not start")

    def guard(self, uuid: str, watts: float) -> None:
        """Have it set this limit in the end."""
        self._tell(uuid, watts)

    def leave(self, uuid: str) -> None:
        """Have it leave this device alone."""
        self._tell(uuid, None)

    def close(self) -> None:
        """Have it do what is left to do, and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _tell(self, uuid: str, watts: float | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"device": uuid, "power_limit_w": watts}) + "\n")
        self._process.stdin.flush()
