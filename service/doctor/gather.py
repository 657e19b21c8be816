"""What one machine says of itself, and what its devices attain. Runs on that machine, and changes no setting of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from service.doctor.facts import DeviceFacts, DiskFacts, Load, NodeFacts
from telemetry.actor import PERIOD_S, Telemetry
from telemetry.devices import DeviceInfo, discover, is_host
from telemetry.devices.replay import TRACE
from trainables import probes
from trainables.probes import Attained, Probed

LIBRARIES = ("wattune", "torch", "ray", "deepspeed", "numpy", "nvidia-ml-py", "amdsmi")
"""Whose versions must be alike on all nodes."""

VISIBLE = {"nvidia": ("cuda", "CUDA_VISIBLE_DEVICES"), "amd": ("rocm", "ROCR_VISIBLE_DEVICES")}
"""Kind of telemetry's devices -> the platform that ranks train on, and the variable that says which there are."""

HELD_GIB, HELD_SHARE = 2.0, 0.5
"""Memory and time in use by which somebody holds a device; the driver itself takes 0.6 GiB of an H200."""

FIRST_S = 10.0
"""How long a device may take to answer for the first time."""

WRITTEN_BYTES = 2**26

NODE = "doctor"
"""What samples have for the node's id: they stay here."""

Probe = Callable[[str, int, Mapping[str, str]], Probed]


def gather(folder: Path, granted: Sequence[str] | None = None, probe: Probe = probes.probe) -> NodeFacts:
    """The facts of this node, within some 60 s.

    `folder` is where searches write. `granted` are the GPUs that Ray lent for this, as `CUDA_VISIBLE_DEVICES` would
    have them; None without Ray. GPUs that somebody else holds are left alone, and with them the processors.
    """
    load = os.getloadavg()[0]
    with _warnings() as silent:
        devices = discover()
    watch = Telemetry(NODE, NODE, devices=devices)
    try:
        readings = _readings(watch, len(devices))
        infos = [device.info for device in devices]
        answers = {info.uuid: readings.get(info.uuid, {}) for info in infos}
        seen = [DeviceFacts(info, answers[info.uuid], _held(info, answers[info.uuid], granted)) for info in infos]
        host: Attained | None = None
        host_error = next((f"left alone: {one.info.name}: {one.held}" for one in seen if one.held), None)
        if host_error is None:
            probed = probe("cpu", 1, {})
            host, host_error = probed.attained[0], probed.errors[0]
        seen = _worked(watch, seen, probe)
    finally:
        watch.stop()
    return NodeFacts(
        name=socket.gethostname(),
        hostname=socket.gethostname(),
        versions=_versions(seen),
        devices=tuple(seen),
        disks=tuple(_disks([folder, Path(tempfile.gettempdir())])),
        cores=os.cpu_count() or 1,
        load_average=load,
        host=host,
        host_error=host_error,
        silent=tuple(silent),
        xids=_xids(),
    )


def _readings(watch: Telemetry, devices: int) -> Mapping[str, dict[str, Any]]:
    """The first readings of all devices, by UUID."""
    until = time.monotonic() + FIRST_S
    while len(latest := watch.state().latest) < devices and time.monotonic() < until:
        time.sleep(PERIOD_S)
    time.sleep(3 * PERIOD_S)  # what was in use over some ticks, not at the very first
    return watch.state().latest or latest


def _held(info: DeviceInfo, reading: Mapping[str, Any], granted: Sequence[str] | None) -> str | None:
    """Why a device must be left alone."""
    if TRACE in os.environ:
        return f"{TRACE} plays a trace in its place"
    if is_host(info.kind):
        busy = reading.get("cpu_utilisation") or 0.0
        return f"in use for {busy:.0%} of the time" if busy > HELD_SHARE else None
    busy, memory = reading.get("gpu_utilisation") or 0.0, reading.get("memory_used_gib")
    if memory is None:
        return "it does not say what of it is in use"
    if busy > HELD_SHARE or memory > HELD_GIB:
        return f"in use, {memory:.0f} GiB and {busy:.0%} of the time"
    if granted is not None:
        return None if _named(info, granted) else "Ray has lent it to others"
    if _ray_is_here():
        return "a Ray runs here, which may lend it any time: give its --address"
    visible = os.environ.get(VISIBLE[info.kind][1])
    return None if visible is None or _named(info, visible.split(",")) else f"{VISIBLE[info.kind][1]} leaves it out"


def _named(info: DeviceInfo, names: Collection[str]) -> bool:
    """Whether a device is among these, by number or by the beginning of its UUID."""
    return any(info.is_called(name) for name in names)


def _ray_is_here() -> bool:
    return any(process.info["name"] == "raylet" for process in psutil.process_iter(["name"]))


def _worked(watch: Telemetry, seen: list[DeviceFacts], probe: Probe) -> list[DeviceFacts]:
    """The devices, those that are free with what they attained and how they fared meanwhile, read once more."""
    free = [one for one in seen if one.held is None and not is_host(one.info.kind)]
    if free:
        name, variable = VISIBLE[free[0].info.kind]
        probed = probe(name, len(free), {variable: ",".join(one.info.uuid for one in free)})
        for one, attained, error in zip(list(free), probed.attained, probed.errors, strict=True):
            load = None if attained is None else _load(watch, one.info.uuid, attained)
            seen[seen.index(one)] = replace(one, attained=attained, load=load, error=error)
    latest = watch.state().latest
    return [replace(one, reading=latest.get(one.info.uuid, one.reading)) for one in seen]


def _load(watch: Telemetry, device: str, attained: Attained) -> Load:
    (window,) = watch.window(attained.start_ns, attained.end_ns, [device]).devices
    return Load(
        duration_s=window.duration_s,
        mean_power_w=window.mean_power_w,
        mean_sm_clock_mhz=window.mean_sm_clock_mhz,
        peak_gpu_temp_c=window.peak_gpu_temp_c,
        throttle_s=window.throttle_s,
    )


def _versions(seen: Sequence[DeviceFacts]) -> dict[str, str]:
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    for one in seen:
        if one.attained is not None:
            versions |= {name: text for name, text in one.attained.versions.items() if name != "gpu_name"}
    return versions


def _disks(folders: Sequence[Path]) -> Iterator[DiskFacts]:
    """One of each file system."""
    known: set[int] = set()
    for folder in folders:
        there = next(path for path in (folder, *folder.parents) if path.is_dir())
        if (device := there.stat().st_dev) not in known:
            known.add(device)
            yield disk(there)


def disk(folder: Path) -> DiskFacts:
    """What can be written to a folder that exists."""
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            block, began = bytes(2**20), time.perf_counter()
            for _ in range(WRITTEN_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
    except OSError as error:
        return DiskFacts(str(folder), None, None, error.strerror or str(error))
    return DiskFacts(str(folder), free, WRITTEN_BYTES / seconds)


def _xids() -> tuple[str, ...] | None:
    """What the kernel's log has of XID errors, as `79 at 0000:1b:00`; None where this user may not read it."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)\): (\d+)", log)
    return tuple(dict.fromkeys(f"{number} at {place}" for place, number in found))


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What telemetry warns of GPUs meanwhile, which goes into no log."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(f"telemetry.devices.{kind}") for kind in VISIBLE]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield said
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
