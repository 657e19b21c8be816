"""What devices attained when they were examined: a file for each in the state directory, a line an examination."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from service.home import Home

KEPT = 50
"""Examinations that are read of a device; of what is there, the latest."""


@dataclass(frozen=True)
class Figures:
    """What a device came to in an examination that ended at `time_s` of the Unix clock.

    `accelerator` is its name in `search_spaces.hardware.ACCELERATORS`, `power_limit_w` what its driver held it to; None
    where either is not known.
    """

    time_s: float
    flops: float
    memory_bytes_per_s: float
    launch_s: float
    all_reduce_bytes_per_s: float | None = None
    mean_sm_clock_mhz: float | None = None
    accelerator: str | None = None
    power_limit_w: float | None = None


def load(home: Home, devices: Iterable[str]) -> dict[str, tuple[Figures, ...]]:
    """What is known of devices, oldest first. Lines that no examination wrote whole are passed over."""
    return {device: known for device in devices if (known := tuple(_read(_file(home, device))))}


def add(home: Home, found: Mapping[str, Figures]) -> None:
    """Keep what an examination found. Raises `OSError` where nothing can be written."""
    for device, one in found.items():
        file = _file(home, device)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(one)) + "\n")


def slower(home: Home, devices: Iterable[str]) -> dict[str, float]:
    """How much longer the slowest of some GPUs takes at its power limit than each, by UUID, as they were when they were
    examined last. GPUs that never were are left out."""
    latest = {device: known[-1].flops for device, known in load(home, devices).items()}
    return {device: flops / min(latest.values()) for device, flops in latest.items()}


def slowest_flops(home: Home, accelerator: str, power_limit_w: float) -> float | None:
    """FLOP/s that the slowest of all GPUs of a kind attained at a power limit, as they were examined last; None where
    none was."""
    latest = [known[-1] for file in home.examinations.glob("*.jsonl") if (known := list(_read(file)))]
    alike = [one.flops for one in latest if (one.accelerator, one.power_limit_w) == (accelerator, power_limit_w)]
    return min(alike, default=None)


def unexamined(home: Home, devices: Collection[str]) -> list[str]:
    """What a search by slices has to say of several GPUs, by UUID, of which some were never examined."""
    new = len(devices) - len(load(home, devices))
    if len(devices) < 2 or not new:
        return []
    return [
        f"{new} of {len(devices)} GPUs were never examined, and slices take none of them to be slower than others, for "
        "which a gang would wait: `wattune doctor` before a search has them corrected"
    ]


def _file(home: Home, device: str) -> Path:
    return home.examinations / f"{device.replace('/', '_')}.jsonl"


def _read(file: Path) -> Iterator[Figures]:
    lines = file.read_text().splitlines() if file.exists() else []
    for line in lines[-KEPT:]:
        try:
            yield Figures(**json.loads(line))
        except (ValueError, TypeError):
            continue
