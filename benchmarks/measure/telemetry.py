"""How far this machine's telemetry can be trusted.

    python -m benchmarks.measure.telemetry --out FILE.json

On the first device: how often each column changes, what a reading costs, and the energy counter against integrated
power under a steady load and under a square wave. What polling does to training is `benchmarks.measure.pacing`'s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from telemetry.devices import Device, discover
from telemetry.sampler import Sampler
from telemetry.samples import SampleBuffer

PERIODS_S = 3.0
READS = 30
SETTLE_S = 5.0
STEADY_S = 12.0
WAVE_S = 1.5
WAVES = 6


def refresh_periods(device: Device) -> dict[str, dict[str, float]]:
    """Milliseconds between the changes of each column, median and longest, reading as fast as can be."""
    each_tick = changes(device, full=False)
    return changes(device, full=True) | each_tick


def changes(device: Device, full: bool) -> dict[str, dict[str, float]]:
    moments: dict[str, list[float]] = defaultdict(list)
    last: dict[str, Any] = {}
    until = time.monotonic() + PERIODS_S
    while (now := time.monotonic()) < until:
        for column, value in device.read(full).items():
            if value is not None and last.get(column, value) != value:
                moments[column].append(now)
            last[column] = value
    between = {column: 1e3 * np.diff(times) for column, times in moments.items() if len(times) > 2}
    return {name: {"median_ms": float(np.median(d)), "longest_ms": float(d.max())} for name, d in between.items()}


def read_cost(device: Device) -> dict[str, dict[str, float]]:
    """Milliseconds of CPU and of time that a reading takes at 10 Hz, of what each tick reads and in full; medians."""
    costs = {}
    for kind, full in (("tick", False), ("full", True)):
        cpu, wall = [], []
        for _ in range(READS):
            time.sleep(0.1)
            cpu_before, wall_before = time.thread_time(), time.perf_counter()
            device.read(full)
            cpu.append(1e3 * (time.thread_time() - cpu_before))
            wall.append(1e3 * (time.perf_counter() - wall_before))
        costs[kind] = {"cpu_ms": statistics.median(cpu), "wall_ms": statistics.median(wall)}
    return costs


def compute(started: Event, on_s: float, off_s: float = 0.0, waves: int = 1) -> None:
    """Matrix products on the first GPU, or on a CPU, on and off."""
    on_gpu = torch.cuda.is_available()
    device, size = ("cuda", 8192) if on_gpu else ("cpu", 512)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    for _ in range(waves):
        until = time.monotonic() + on_s
        while time.monotonic() < until:
            for _ in range(10):
                a @ a
            if on_gpu:
                torch.cuda.synchronize()
            started.set()
        time.sleep(off_s)


@contextlib.contextmanager
def loaded(on_s: float, off_s: float = 0.0, waves: int = 1) -> Iterator[BaseProcess]:
    """A process that computes, as soon as it does."""
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=compute, args=(started, on_s, off_s, waves), daemon=True)
    process.start()
    started.wait()
    yield process
    process.kill()
    process.join()


def energies(table: pa.Table) -> dict[str, Any]:
    """Joules by the counter between its first and last reading, and by either sampled power between the same two."""
    counter = table.filter(pc.field("energy_mj").is_valid())
    times, counts = counter["time_ns"].to_numpy(), counter["energy_mj"].to_numpy()
    joules: dict[str, Any] = {
        "seconds": float(times[-1] - times[0]) / 1e9,
        "counter_j": float(counts[-1] - counts[0]) / 1e3,
    }
    for column in ("power_w", "power_average_w"):
        known = table.filter(pc.field(column).is_valid())
        if not known.num_rows:
            continue
        at, power = known["time_ns"].to_numpy(), known[column].to_numpy()
        edges = np.concatenate([times[:1], at[(at > times[0]) & (at < times[-1])], times[-1:]])
        integral = float(np.trapezoid(np.interp(edges - times[0], at - times[0], power), edges - times[0])) / 1e9
        joules |= {f"{column}_j": integral, f"{column}_ratio": integral / joules["counter_j"]}
    return joules


def energies_under_load(device: Device) -> dict[str, dict[str, Any]]:
    """Of a load that was steady for `SETTLE_S` before, and of a square wave from before its first rise to its end."""
    with loaded(2 * SETTLE_S + STEADY_S):
        time.sleep(SETTLE_S)
        steady = energies(watched(device, lambda: time.sleep(STEADY_S)))
    with loaded(WAVE_S, WAVE_S, WAVES) as process:
        time.sleep(1.5 * WAVE_S)  # into a pause
        wave = energies(watched(device, process.join))
    return {"steady": steady, "square wave": wave}


def watched(device: Device, stay: Callable[[], object]) -> pa.Table:
    """The samples of a device until `stay` returns, with counters at both ends."""
    buffer = SampleBuffer(capacity_rows=100_000)
    sampler = Sampler([device], buffer, "benchmark")
    began_ns = time.monotonic_ns()
    sampler.start()
    stay()
    sampler.mark()
    time.sleep(0.5)
    sampler.stop()
    return buffer.between(began_ns, time.monotonic_ns())


def show(title: str, figures: dict[Any, dict[str, Any]]) -> None:
    print(f"\n{title}")
    for name, values in figures.items():
        cells = (
            f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
        )
        print(f"  {name!s:26} {'  '.join(cells)}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    devices = discover(os.getpid())
    record: dict[str, Any] = {"info": asdict(devices[0].info)}
    print(f"{devices[0].info}")
    with loaded(1e3):
        record["refresh"] = refresh_periods(devices[0])
        record["reading"] = read_cost(devices[0])
    show("Milliseconds between changes, under load", record["refresh"])
    show("A reading at 10 Hz, under load", record["reading"])
    record["load energy"] = energies_under_load(devices[0])
    show("Energy counter and integrated power", record["load energy"])
    arguments.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
