"""What a record says of where its figures come from: versions, devices, drivers, the state of the code."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from ray.actor import ActorHandle

from service.remote import call
from telemetry.actor import Telemetry


def software() -> dict[str, str]:
    """Versions of what the driver runs, and the git commit of the working directory if it is a checkout."""
    versions = {"python": platform.python_version()}
    for name in ("wattune", "ray", "optuna", "deepspeed"):
        with contextlib.suppress(PackageNotFoundError):  # code on the path that was never installed
            versions[name] = version(name)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if commit.returncode == 0:
        versions["git_commit"] = commit.stdout.strip()
    return versions


def surroundings() -> dict[str, str]:
    """How busy this machine is, which is to be asked before a search makes it so."""
    return {"cores": str(os.cpu_count()), "load_average": f"{os.getloadavg()[0]:.1f}"}


def busy(environment: Mapping[str, str]) -> list[str]:
    """A notice if the machine, by its `surroundings`, had more to do than it has cores."""
    cores, load = environment["cores"], environment["load_average"]
    return [f"the machine was busy: load {load} on {cores} cores"] if float(load) > int(cores) else []


def described(telemetry: Mapping[str, ActorHandle[Telemetry]]) -> list[dict[str, Any]]:
    """The `DeviceInfo` of all devices in the cluster; `telemetry` by node id."""
    actors = list(telemetry.values())  # a node may join meanwhile
    return [
        device for node in ray.get([call(actor, Telemetry.describe) for actor in actors]) for device in node["devices"]
    ]


def hardware(found: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Names, drivers and power limits of devices, as `described` has them."""
    drivers = {device["driver_version"] for device in found} - {None}
    limits = {device["power_limit_w"] for device in found} - {None}
    names = {"devices": ", ".join(sorted({device["name"] for device in found}))}
    names |= {"driver": ", ".join(sorted(drivers))} if drivers else {}
    return names | ({"power_limit_w": ", ".join(f"{limit:g}" for limit in sorted(limits))} if limits else {})
