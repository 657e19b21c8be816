"""When NVIDIA's energy counter is refreshed, and what knowing it is worth for the energy of short windows.

    python -m benchmarks.measure.refresh --record READS.json.xz     on a GPU: 25 s of reads, beside a load like training
    python -m benchmarks.measure.refresh READS.json.xz

Prints how far apart refreshes are, when reads see them, and how far the energy of windows laid anywhere into the reads
is off: of the counter read at ticks of 100 ms next to the edges, of that with the moment of its refreshes, and of
sampled power.
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from service.answers.tables import render
from telemetry import counters
from telemetry.devices.nvidia import REFRESH_NS, REFRESH_SEEN_NS

SECONDS = 25.0
WINDOWS_S = (3.0, 5.0)
COUNT = 2000
LATE_MS = 2.0
"""The sampler's ticks come at most this late."""


class Reads(NamedTuple):
    """One row a read: when it was asked and answered, in ns, energy in mJ, instant and average power in mW."""

    asked_ns: np.ndarray
    answered_ns: np.ndarray
    energy_mj: np.ndarray
    power_mw: np.ndarray
    average_mw: np.ndarray


def record(path: Path) -> None:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    load = multiprocessing.get_context("spawn").Process(target=_load, daemon=True)
    load.start()
    time.sleep(10)
    rows = []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        asked_ns = time.monotonic_ns()
        (energy,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION])
        answered_ns = time.monotonic_ns()
        power, average = pynvml.nvmlDeviceGetFieldValues(handle, [(186, 0), (185, 0)])
        rows.append((asked_ns, answered_ns, energy.value.ullVal, power.value.uiVal, average.value.uiVal))
        time.sleep(0.002)
    load.kill()
    with lzma.open(path, "wt") as file:
        json.dump(rows, file)


def _load() -> None:
    """Steps of half a second: matrix products, then memory traffic, then a pause."""
    import torch

    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    states = torch.randn(2**28, device="cuda")
    while True:
        for _ in range(330):
            torch.mm(matrix, matrix)
        for _ in range(60):
            states.mul_(1.0)
        torch.cuda.synchronize()
        time.sleep(0.02)


def read_recorded(path: Path) -> Reads:
    with lzma.open(path, "rt") as file:
        return Reads(*np.array(json.load(file), dtype=np.int64).T)


def refreshes(reads: Reads) -> tuple[np.ndarray, np.ndarray]:
    """When the counter was refreshed, on a grid of its period, and the reads that were the first to see it."""
    moved = np.flatnonzero(np.diff(reads.energy_mj)) + 1
    seen_ns = reads.answered_ns[moved]
    number = np.round((seen_ns - seen_ns[0]) / REFRESH_NS).astype(np.int64)
    first_ns = int((seen_ns - REFRESH_NS * number).min())
    return first_ns + REFRESH_NS * number, moved


def regularity(reads: Reads) -> str:
    """How regular refreshes are, and when the first read that has a new value was asked, in ms after them."""
    refreshed_ns, first = refreshes(reads)
    asked = reads.asked_ns[first]
    after_ms = (asked - refreshed_ns) / 1e6
    number = np.arange(len(asked))
    period_ms = np.polyfit(number, asked / 1e6 - asked[0] / 1e6, 1)[0]
    took_ms = (reads.answered_ns - reads.asked_ns) / 1e6
    low, middle, high = np.percentile(after_ms, [1, 50, 99])
    return (
        f"{len(took_ms)} reads of {np.median(took_ms):.1f} ms; {len(number)} refreshes, {period_ms:.3f} ms apart\n"
        f"the first read to see one is asked {low:+.1f} to {high:+.1f} ms from it (98%), {middle:+.1f} in the median"
    )


def window_errors(reads: Reads, window_s: float, chance: np.random.Generator) -> np.ndarray:
    """Of windows laid at random, relative to the refreshed values, by method [COUNT, 4]."""
    refreshed_ns, first = refreshes(reads)
    refreshed_mj = reads.energy_mj[first]
    span_ns = int(window_s * 1e9)
    counter_mj = (reads.energy_mj + 10**10).astype(np.uint64)  # one that is nearly new might have been reset
    since_ns = (reads.asked_ns - refreshed_ns[0]) % REFRESH_NS
    clear = np.flatnonzero((since_ns >= REFRESH_SEEN_NS) & (since_ns < REFRESH_NS - REFRESH_SEEN_NS))
    relative = []
    for _ in range(COUNT):
        start_ns = int(chance.uniform(refreshed_ns[0] + 2e9, refreshed_ns[-1] - span_ns - 2e9))
        end_ns = start_ns + span_ns
        ticks = np.arange(refreshed_ns[0] + chance.uniform(0, REFRESH_NS), refreshed_ns[-1] - REFRESH_NS, REFRESH_NS)
        ticks += chance.uniform(0, LATE_MS * 1e6, len(ticks))
        at = np.searchsorted(reads.asked_ns, ticks)
        time_ns = reads.asked_ns[at]
        power = [reads.power_mw[at] / 1000, reads.average_mw[at] / 1000]
        full = np.unique([2, *np.searchsorted(time_ns, (start_ns, end_ns)), len(ticks) - 3])
        sure = clear[np.searchsorted(reads.asked_ns[clear], ticks[full])]
        new_ns = refreshed_ns[np.searchsorted(refreshed_ns, reads.asked_ns[sure], side="right") - 1]

        def drawn_j(since_ns: int, until_ns: int, time_ns: np.ndarray = time_ns, watts: np.ndarray = power[0]) -> float:
            return counters.integral(time_ns, watts, since_ns, until_ns)

        true_j = float(np.diff(np.interp((start_ns, end_ns), refreshed_ns, refreshed_mj))[0]) / 1000
        counted = [
            counters.energy_j(reads.asked_ns[read], counter_mj[read], start_ns, end_ns, drawn_j, known)
            for read, known in ((at[full], None), (sure, new_ns))
        ]
        sampled = [counters.integral(time_ns, watts, start_ns, end_ns) for watts in power]
        relative.append([joules / true_j - 1 for joules in (*counted, *sampled)])
    return np.array(relative)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reads", type=Path)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.record:
        record(arguments.reads)
    try:
        reads = read_recorded(arguments.reads)
    except (OSError, lzma.LZMAError, ValueError, TypeError) as error:
        parser.error(f"{arguments.reads} holds no reads: {error}")
    print(regularity(reads), end="\n\n")
    chance = np.random.default_rng(0)
    methods = ("counter", "counter, refreshes known", "instant power", "average power")
    rows = []
    for window_s in WINDOWS_S:
        for method, of in zip(methods, window_errors(reads, window_s, chance).T, strict=True):
            high = np.percentile(np.abs(of), 95)
            rows.append([f"{window_s:.0f} s", method, *(f"{x:+.2%}" for x in (of.mean(), of.std(), high))])
    print(render(["window", "energy by", "mean error", "deviation", "95% within"], rows))


if __name__ == "__main__":
    main()
