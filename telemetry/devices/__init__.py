"""The devices of this node."""

from __future__ import annotations

import os

from telemetry.devices import amd, nvidia, replay
from telemetry.devices.base import Device, DeviceInfo
from telemetry.devices.cpu import CpuDevice, cpu_uuid

__all__ = ["CpuDevice", "Device", "DeviceInfo", "cpu_uuid", "discover"]


def discover(process_root: int | None = None) -> list[Device]:
    """All NVIDIA and AMD GPUs of this node, or the CPU as the one device where there are none; those of a trace if
    the environment names one (`telemetry.devices.replay`).

    `process_root` is the process whose tree counts as "the process" in the CPU's utilisation; default this one.
    """
    if replayed := replay.discover():
        return [*replayed]
    return [*nvidia.discover(), *amd.discover()] or [CpuDevice(process_root or os.getpid())]
