"""What a record says of where its figures come from: versions, devices, drivers, the state of the code."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray


def software() -> dict[str, str]:
    """Versions of what the driver runs, and the git commit of the working directory if it is a checkout."""
    found = {"python": platform.python_version()}
    for name in ("wattune", "ray", "optuna", "deepspeed"):
        with contextlib.suppress(PackageNotFoundError):  # code on the path that was never installed
            found[name] = version(name)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if commit.returncode == 0:
        found["git_commit"] = commit.stdout.strip()
    return found


def hardware(telemetry: Mapping[str, Any]) -> dict[str, str]:
    """Names and drivers of the devices in the cluster."""
    nodes = ray.get([actor.describe.remote() for actor in list(telemetry.values())])  # a node may join meanwhile
    devices = [device for node in nodes for device in node["devices"]]
    drivers = {device["driver_version"] for device in devices} - {None}
    found = {"devices": ", ".join(sorted({device["name"] for device in devices}))}
    return found | ({"driver": ", ".join(sorted(drivers))} if drivers else {})
