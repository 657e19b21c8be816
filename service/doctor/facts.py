"""What is known of the machines when they are judged: plain values, as a node sends them and as tests make them up."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from search_spaces.hardware import known_as
from service.history import Figures
from telemetry.devices import DeviceInfo
from telemetry.devices.cpu import cpu_uuid
from trainables.probes import Attained


@dataclass(frozen=True)
class Load:
    """What telemetry saw of a device while it multiplied matrices for `duration_s` seconds; None is unknown.

    `throttle_s` are the seconds in which each of `telemetry.samples.THROTTLE_CAUSES` held its clock down.
    """

    duration_s: float
    mean_power_w: float | None
    mean_sm_clock_mhz: float | None
    peak_gpu_temp_c: float | None
    throttle_s: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceFacts:
    """One device of a node.

    `reading`: columns of `telemetry.samples.SCHEMA` as it answered last, counters since the driver was loaded. `held`:
    why it was left alone, None where nobody holds it. `attained` and `load` are of a device that was put to work,
    `error` is why it attained nothing, or not all.
    """

    info: DeviceInfo
    reading: Mapping[str, Any]
    held: str | None = None
    attained: Attained | None = None
    load: Load | None = None
    error: str | None = None


@dataclass(frozen=True)
class DiskFacts:
    """A folder that a search writes to: bytes that are free there, and a second's writes; `error` is why there are
    none."""

    path: str
    free_bytes: int | None
    write_bytes_per_s: float | None
    error: str | None = None


@dataclass(frozen=True)
class NodeFacts:
    """One machine, `name` to readers: its host name, with its id in Ray where several nodes share one.

    `versions` are of libraries by name, `silent` what telemetry logged of devices that do not answer, `xids` the XID
    errors in the kernel's log, None where it may not be read. `host` is what the processors attained, None where they
    were left alone. `clock_s` is how far its clock is ahead of the examiner's, give or take `clock_error_s`;
    `object_store_bytes_per_s` how fast Ray's objects come from it: None of the examiner's own machine.
    """

    name: str
    hostname: str
    versions: Mapping[str, str]
    devices: tuple[DeviceFacts, ...]
    disks: tuple[DiskFacts, ...]
    cores: int
    load_average: float
    host: Attained | None = None
    host_error: str | None = None
    silent: tuple[str, ...] = ()
    xids: tuple[str, ...] | None = None
    clock_s: float | None = None
    clock_error_s: float | None = None
    object_store_bytes_per_s: float | None = None
    object_store_error: str | None = None

    @property
    def host_uuid(self) -> str:
        """What its processors are called."""
        return cpu_uuid(self.hostname)


@dataclass(frozen=True)
class StoreFacts:
    """The tracking store: its URI as it may be shown, and why it cannot be used."""

    uri: str
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """All that is judged. `lost`: why a node has no facts, by name. `history` is of earlier examinations, by the
    device's UUID, oldest first."""

    nodes: tuple[NodeFacts, ...]
    store: StoreFacts
    lost: Mapping[str, str] = field(default_factory=dict)
    history: Mapping[str, tuple[Figures, ...]] = field(default_factory=dict)

    def devices(self) -> Iterator[tuple[NodeFacts, DeviceFacts]]:
        """All devices, in the nodes' order and theirs."""
        for node in self.nodes:
            for device in node.devices:
                yield node, device

    def figures(self) -> dict[str, Figures]:
        """What this examination adds to the history, by UUID."""
        now = time.time()
        found = {
            device.info.uuid: Figures(
                now,
                attained.flops,
                attained.memory_bytes_per_s,
                attained.launch_s,
                attained.all_reduce_bytes_per_s,
                None if device.load is None else device.load.mean_sm_clock_mhz,
                known_as(device.info.name),
                device.info.power_limit_w,
            )
            for _, device in self.devices()
            if (attained := device.attained) is not None
        }
        hosts = ((node.host_uuid, node.host) for node in self.nodes)
        return found | {
            uuid: Figures(now, host.flops, host.memory_bytes_per_s, host.launch_s)
            for uuid, host in hosts
            if host is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self)
