"""What devices came to in earlier examinations: a file for each in the state directory, a line an examination."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from service.doctor.facts import Facts, Figures, NodeFacts
from service.home import Home

KEPT = 50
"""Examinations that are read of a device; of what is there, the latest."""


def host_key(node: NodeFacts) -> str:
    """What a node's processors are called, as telemetry does."""
    return f"cpu:{node.hostname}"


def figures(facts: Facts) -> dict[str, Figures]:
    """What this examination adds, by UUID."""
    now = time.time()
    found = {
        device.info.uuid: Figures(
            now,
            attained.flops,
            attained.memory_bytes_per_s,
            attained.launch_s,
            attained.all_reduce_bytes_per_s,
            None if device.load is None else device.load.mean_sm_clock_mhz,
        )
        for _, device in facts.devices()
        if (attained := device.attained) is not None
    }
    hosts = ((host_key(node), node.host) for node in facts.nodes)
    return found | {
        key: Figures(now, host.flops, host.memory_bytes_per_s, host.launch_s) for key, host in hosts if host is not None
    }


def load(home: Home, devices: Iterable[str]) -> dict[str, tuple[Figures, ...]]:
    """What is known of devices, oldest first. Lines that no examination wrote whole are passed over."""
    return {device: known for device in devices if (known := tuple(_read(_file(home, device))))}


def add(home: Home, found: dict[str, Figures]) -> None:
    """Keep what an examination found. Raises `OSError` where nothing can be written."""
    for device, one in found.items():
        file = _file(home, device)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(one)) + "\n")


def _file(home: Home, device: str) -> Path:
    return home.examinations / f"{device.replace('/', '_')}.jsonl"


def _read(file: Path) -> Iterator[Figures]:
    lines = file.read_text().splitlines() if file.exists() else []
    for line in lines[-KEPT:]:
        try:
            yield Figures(**json.loads(line))
        except (ValueError, TypeError):
            continue
