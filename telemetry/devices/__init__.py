"""The devices of this node: each module of this package is a vendor's, and holds all that is known of its devices.

A vendor is one module with a `VENDOR`. Modules are found by looking into the package, so that there is no list of them.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class DeviceInfo:
    """What does not change while a device is watched.

    `kind` is its vendor's. `energy_method` is `counter` where the hardware counts its energy, `shared` where
    `energy_mj` and power are its equal part of what all devices of a `card` are counted for together (exact over all of
    them, a guess for one), `estimated` where they are a model's. The peaks are of one direction, of PCIe and of all
    links to other GPUs together; None where there is no such fabric or its speed is not known. `power_limit_w` is the
    one in force, `default_power_limit_w` what the vendor ships it with, `max_sm_clock_mhz` its highest clock.
    """

    uuid: str
    index: int
    name: str
    kind: str
    energy_method: str
    card: str | None = None
    driver_version: str | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    max_sm_clock_mhz: float | None = None
    pcie_peak_bytes_per_s: float | None = None
    link_peak_bytes_per_s: float | None = None

    def is_called(self, name: str) -> bool:
        """Whether others on the node mean this device by `name`: its number there, or the beginning of its UUID."""
        return str(self.index) == name if name.isdigit() else bool(name) and self.uuid.startswith(name)


class Device(Protocol):
    """One device of this node."""

    @property
    def info(self) -> DeviceInfo: ...

    def read(self, full: bool) -> dict[str, Any]:
        """One sample: columns of `telemetry.samples.SCHEMA`; what the device cannot say is None or left out.

        What takes the driver milliseconds is read only if `full`, and then first, next to the sample's time: counters,
        of which readings around a window are enough. May raise anything: that sample is null then.
        """
        ...


@runtime_checkable
class Refreshing(Protocol):
    """A device whose counters are refreshed now and then, at moments that it has to look for."""

    def align(self, until_ns: int) -> None:
        """Look for such a moment, if that is due. Called after every reading, with the time before which to be done."""
        ...


@runtime_checkable
class Limitable(Protocol):
    """A device whose power limit can be set, which is done for who asked for it alone: see `telemetry.power`.

    All raise OSError, with one line, where the driver does not answer or does not let this process.
    """

    @property
    def info(self) -> DeviceInfo: ...

    def power_limit_range_w(self) -> tuple[float, float]:
        """The least and the highest limit that can be set."""
        ...

    def power_limit_w(self) -> float:
        """The limit that is set."""
        ...

    def set_power_limit(self, watts: float) -> None:
        """Set it, until it is set again or the driver is loaded anew."""
        ...


class Precedence(IntEnum):
    """Whose devices a node is watched by: all those of the first of these that has any here."""

    RECORDED = 1
    """In place of what is here, because someone asked for it."""
    GPU = 2
    HOST = 3
    """The machine itself, where nothing else is."""


@dataclass(frozen=True)
class Vendor:
    """What is known of one kind of device, `DeviceInfo.kind` and column `kind` of the samples.

    `discover` gives those of this node that answer, none where its driver or binding is missing, and warns of one that
    is there and does not answer. It is called with the id of the process whose tree is the work to be watched, for
    devices that can tell a process's part.

    `throttle_bits` are masks of the column `throttle_reasons` by cause (`telemetry.samples.THROTTLE_CAUSES`); bits in
    none of them stand for no cause. They say what throttles a device that has no counter of it.
    """

    kind: str
    discover: Callable[[int], Sequence[Device]]
    precedence: Precedence = Precedence.GPU
    throttle_bits: Mapping[str, int] = field(default_factory=dict)


def vendors() -> list[Vendor]:
    """Those of all modules of this package. Raises AttributeError for a module without a `VENDOR`."""
    names = [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)]
    return [importlib.import_module(name).VENDOR for name in names]


def discover(process_root: int | None = None) -> list[Device]:
    """The devices of this node: those of a trace if the environment names one (`telemetry.devices.replay`), else all
    its GPUs, else its CPUs as one device.

    `process_root` is the process whose tree counts as "the process" in the CPU's utilisation; default this one. Raises
    what `telemetry.devices.replay.load_tracks` raises of a trace that cannot be played.
    """
    root = os.getpid() if process_root is None else process_root
    for precedence in Precedence:
        here = [vendor for vendor in vendors() if vendor.precedence is precedence]
        if devices := [device for vendor in here for device in vendor.discover(root)]:
            return devices
    return []


def count_gpus() -> int:
    """The GPUs of this node that answer, whatever else it is watched by."""
    found = [vendor.discover(os.getpid()) for vendor in vendors() if vendor.precedence is Precedence.GPU]
    return sum(map(len, found))


def throttle_bits(kind: str | None) -> Mapping[str, int]:
    """Masks of `throttle_reasons` by cause, for a kind of device; none for a kind that is not known here."""
    return next((vendor.throttle_bits for vendor in vendors() if vendor.kind == kind), {})


def is_host(kind: str | None) -> bool:
    """Whether a device of this kind is the machine itself, and no GPU."""
    return any(vendor.kind == kind and vendor.precedence is Precedence.HOST for vendor in vendors())
