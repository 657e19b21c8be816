"""Telemetry of a simulated fleet on this machine: many nodes of 8 GPUs, streamed to one subscriber without a loss.

    python -m benchmarks.measure.fleet --nodes 32 64 128 256 --seconds 60

Each node is a real `telemetry.actor.Telemetry`: a sampling thread at 10 Hz, batches, a spool that is synced to disk
every second. Only the GPUs are not real: each plays a synthetic trace of the columns that an H200 fills. There are as
many actors as this machine has CPUs, and they share the nodes. Nodes keep 10 s in memory instead of 10 min, so that a
minute shows whether it stays flat. The subscriber is this process, and asks each node every second.

A sample is lost if its tick was skipped, as its thread came too late, or if it was taken and not received. A tick's
lateness is its time after the schedule by the node's most punctual tick. CPU time is that of the actors and of the
subscriber, user and system; what Ray's own processes take is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import ray

from telemetry import spool
from telemetry.actor import PERIOD_S, Pulled, Telemetry
from telemetry.devices.replay import ReplayDevice, Track
from telemetry.samples import COUNTERS, MEANS, SCHEMA
from telemetry.stream import subscribe

GPUS = 8
TRACE_S = 20
KEPT_S = 10.0
SETTLE_S = 15.0
CHEAP_COUNTERS = ("throttle_power_cap_ns", "throttle_sw_thermal_ns", "throttle_sync_boost_ns")
PERIOD_NS = round(PERIOD_S * 1e9)


class _DecodedTrack(Track):
    """A track whose rows are Python's values already: what replaying costs is not what is measured here."""

    def __init__(self, rows: pa.Table) -> None:
        super().__init__(rows, loop=True)
        self._decoded = [super(_DecodedTrack, self).row(place, self.columns) for place in range(self.count)]

    def row(self, number: int, columns: Any) -> dict[str, Any]:
        if columns is not self.columns:
            return super().row(number, columns)
        lap, place = divmod(number, self.count)
        row = dict(self._decoded[place])
        if lap and self.growth is not None:
            row |= {name: row[name] + lap * growth for name, growth in self.growth.items() if row[name] is not None}
        return row


def make_track(seed: int) -> Track:
    """`TRACE_S` seconds of one busy GPU; counters that cost the driver milliseconds have a value every 10 s."""
    draw = random.Random(seed)
    rows = []
    for tick in range(round(TRACE_S / PERIOD_S)):
        row: dict[str, Any] = {
            "time_ns": tick * PERIOD_NS,
            "node": "trace",
            "device": f"GPU-{seed}",
            "index": seed,
            "kind": "nvidia",
            "energy_method": "counter",
            "power_w": draw.uniform(600, 700),
            "power_average_w": draw.uniform(640, 690),
            "hbm_power_w": draw.uniform(90, 120),
            "sm_clock_mhz": draw.uniform(1400, 1900),
            "memory_clock_mhz": 3201.0,
            "gpu_temp_c": draw.uniform(55, 75),
            "hbm_temp_c": draw.uniform(60, 80),
            "gpu_utilisation": 1.0,
            "memory_used_gib": 120.5,
            "throttle_reasons": draw.choice([0, 4]),
        }
        read = COUNTERS if tick % 100 == seed else CHEAP_COUNTERS
        row |= dict.fromkeys(read, 10**12 + tick * 10**7)
        if read is COUNTERS:
            row |= {"gpu_temp_margin_c": 20.0} | dict.fromkeys(MEANS, draw.random())
        rows.append(row)
    return _DecodedTrack(pa.Table.from_pylist(rows, schema=SCHEMA))


class Nodes:
    """An actor with some of the fleet's nodes."""

    def __init__(self, names: list[str], root: Path) -> None:
        tracks = [make_track(seed) for seed in range(GPUS)]
        self._nodes = {}
        for name in names:
            devices = [ReplayDevice(track, f"GPU-{name}-{track.info.index:08d}-0000-0000") for track in tracks]
            self._nodes[name] = Telemetry(name, name, root, devices, KEPT_S)
            time.sleep(PERIOD_S / len(names))  # real nodes do not tick all at once either

    def pid(self) -> int:
        return os.getpid()

    def pull(self, name: str, after_ns: int | None) -> Pulled:
        return self._nodes[name].pull(after_ns)

    def stop(self) -> None:
        for node in self._nodes.values():
            node.stop()


class _OneNode:
    """One node of such an actor, as `subscribe` calls it: `handle.pull.remote(cursor)`."""

    def __init__(self, nodes: Any, name: str) -> None:
        self._nodes, self._name = nodes, name
        self.pull = self

    def remote(self, after_ns: int | None) -> Any:
        return self._nodes.pull.remote(self._name, after_ns)


class Usage:
    """CPU time and memory of some processes."""

    def __init__(self, pids: list[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    def rss_mib(self) -> float:
        return sum(process.memory_info().rss for process in self._processes) / 2**20


def measure(count: int, seconds: float, root: Path) -> dict[str, Any]:
    """Stream a fleet of `count` nodes for some seconds, once it has run for `SETTLE_S`."""
    names = [f"node{number:03d}" for number in range(count)]
    actor: Any = ray.remote(Nodes)
    shares = [names[place :: psutil.cpu_count()] for place in range(psutil.cpu_count() or 1)]
    actors = [actor.options(num_cpus=0, max_concurrency=4).remote(share, root) for share in shares]
    usages = {"actors": Usage([ray.get(a.pid.remote()) for a in actors]), "subscriber": Usage([os.getpid()])}
    handles: dict[str, Any] = {
        name: _OneNode(a, name) for a, share in zip(actors, shares, strict=True) for name in share
    }
    time.sleep(SETTLE_S)

    received: dict[str, list[np.ndarray]] = {name: [] for name in names}
    rows, missing = 0, 0
    began, cpu_began = time.monotonic(), {who: usage.cpu_s() for who, usage in usages.items()}
    at = [0.25, 0.5, 1.0]
    memory: list[dict[str, float]] = []
    for delivery in subscribe(handles):
        rows += delivery.batch.num_rows
        missing += delivery.missing_ns is not None
        devices = delivery.batch["device"].to_numpy(zero_copy_only=False)
        received[delivery.node_id].append(delivery.batch["time_ns"].to_numpy()[devices == devices.min()])
        elapsed = time.monotonic() - began
        if elapsed >= at[len(memory)] * seconds:
            memory.append({who: round(usage.rss_mib(), 1) for who, usage in usages.items()})
        if len(memory) == len(at):
            break
    cpu_s = {who: usage.cpu_s() - cpu_began[who] for who, usage in usages.items()}
    ray.get([a.stop.remote() for a in actors])
    for a in actors:
        ray.kill(a)
    return fleet_figures(names, received, rows, missing, elapsed, cpu_s, memory, root)


def fleet_figures(
    names: list[str],
    received: dict[str, list[np.ndarray]],
    rows: int,
    missing: int,
    elapsed: float,
    cpu_s: dict[str, float],
    memory: list[dict[str, float]],
    root: Path,
) -> dict[str, Any]:
    ticks = [np.concatenate(received[name]) for name in names]
    late_ms = np.concatenate([lateness_ns(times) for times in ticks]) / 1e6
    expected = GPUS * sum(round((times[-1] - times[0]) / PERIOD_NS) + 1 for times in ticks)
    folders = [root / spool.boot_id() / name for name in names]
    on_disk = sum(
        spool.read(folder, times[0], times[-1] + PERIOD_NS // 2).num_rows
        for folder, times in zip(folders, ticks, strict=True)
    )
    size = sum(path.stat().st_size for folder in folders for path in folder.iterdir())
    written = sum(sealed.rows for folder in folders for sealed in spool.after(folder, 0))
    return {
        "nodes": len(names),
        "seconds": round(elapsed, 1),
        "rows_expected": expected,
        "rows_received": rows,
        "rows_on_disk": on_disk,
        "rows_lost": expected - rows,
        "gaps_told": missing,
        "late_ms": {q: round(float(np.percentile(late_ms, float(q))), 2) for q in ("50", "99", "99.9", "100")},
        "cpu_percent": {who: round(100 * value / elapsed, 1) for who, value in cpu_s.items()},
        "cpu_percent_per_node": round(100 * sum(cpu_s.values()) / elapsed / len(names), 3),
        "rss_mib": memory,
        "spool_mb_per_node_hour": round(size / written * GPUS / PERIOD_S * 3600 / 1e6, 1),
    }


def lateness_ns(times: np.ndarray) -> np.ndarray:
    """How late each tick is, by the most punctual; one later than half a period is taken for no early one."""
    off = (times - times[0]) % PERIOD_NS
    around = (off - np.median(off) + PERIOD_NS // 2) % PERIOD_NS - PERIOD_NS // 2
    around = (around - np.median(around) + PERIOD_NS // 2) % PERIOD_NS - PERIOD_NS // 2
    return (around - around[around > -PERIOD_NS // 10].min()) % PERIOD_NS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--spool", type=Path, help="Folder for the spools, by default in the system's temporary one.")
    arguments = parser.parse_args()
    print(
        f"{psutil.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}, ray {ray.__version__}"
    )
    for count in arguments.nodes:
        directory, root = tempfile.mkdtemp(prefix="wattune-ray-"), Path(tempfile.mkdtemp(dir=arguments.spool))
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=directory)
        try:
            print(json.dumps(measure(count, arguments.seconds, root)), flush=True)
        finally:
            ray.shutdown()
            for folder in (directory, root):
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
