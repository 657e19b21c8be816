"""What every kind of device offers the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class DeviceInfo:
    """What does not change while a device is watched.

    `energy_method` is `counter` where the hardware counts its energy, `shared` where `energy_mj` and power are its
    equal part of what all devices of a `card` are counted for together (exact over all of them, a guess for one),
    `estimated` where they are a model's. The peaks are of one direction, of PCIe and of all links to other GPUs
    together; None where there is no such fabric or its speed is not known.
    """

    uuid: str
    index: int
    name: str
    kind: str
    energy_method: str
    card: str | None = None
    driver_version: str | None = None
    power_limit_w: float | None = None
    pcie_peak_bytes_per_s: float | None = None
    link_peak_bytes_per_s: float | None = None


class Device(Protocol):
    """One device of this node."""

    @property
    def info(self) -> DeviceInfo: ...

    def read(self, full: bool) -> dict[str, Any]:
        """One sample: columns of `telemetry.samples.SCHEMA`; what the device cannot say is None or left out.

        What takes the driver milliseconds is read only if `full`, and then first, next to the sample's time: counters,
        of which readings around a window are enough.
        """
        ...


@runtime_checkable
class Refreshing(Protocol):
    """A device whose counters are refreshed now and then, at moments that it has to look for."""

    def align(self, until_ns: int) -> None:
        """Look for such a moment, if that is due. Called after every reading, with the time before which to be done."""
        ...
