"""What two GPUs draw, and how long they take, in collectives of NCCL's and in what stands in for them in slices.

    python -m benchmarks.measure.drawn [--sizes KIB ...] [--kinds KIND ...] [--rounds N]

Each way lasts `LASTS_S` seconds with NCCL's, and then with the stand-in's, which take as long as NCCL's took alone.
Collectives come one after the other; each after work of its own, `WORK` times as long as the collective, half matrix
products and half copies, as ranks do of which each computes a part of a layer; each after a pause as long, as of ranks
that wait for the CPU; and after that work on the second rank alone, for which the first one waits. Prints medians of
the rounds: milliseconds of one turn and mean power, of either rank.

Then, with collectives of `QUIET_BYTES` alone, what pauses of `QUIET_S` seconds in between draw, which tells how long
links stay awake, and products and copies of `QUIET_WORK_S` seconds, which tells what that leaves for them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from benchmarks.measure.contention import RANKS, Bench, start
from search_spaces.network import Collective
from service.answers.tables import render
from trainables.collectives import KINDS
from trainables.platforms.cuda import PLATFORM as CUDA

LASTS_S, SETTLES_S = 1.2, 0.2
"""Of a way, and from its begin until energy counts."""

WORK, ALONE_ROUNDS = 4.0, 5

BATCH_S = 0.1
"""Seconds of turns that the CPU hands over at a time; in between, it says whether more are due."""

POLL_S, FEWEST_TICKS = 0.002, 3
"""From one read of energy to the next; the values that it must have had, of which the first is no refresh."""

LATE_BYTES = 256
"""By which pieces that are late are shorter: the stand-in takes as long for each size as it did at first."""

QUIET_S, QUIET_BYTES = (1e-2, 3e-2, 0.1, 0.3), 2**20

QUIET_WORK_S, QUIET_TAKES_S = 5e-3, 2e-5


Point = tuple[str, list[list[float]]]
"""A way, and of each rank what `Meter.figures` are."""


class Drawn:
    """What a GPU draws from here to `stop`: the energy between two refreshes of its counter, by the time between."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._over, self._ticks = threading.Event(), list[tuple[float, int]]()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Watts. Raises SystemExit if the counter was not refreshed."""
        self._over.set()
        self._thread.join()
        if len(self._ticks) < FEWEST_TICKS:
            raise SystemExit("the GPU's energy counter stands still")
        (first_s, first_mj), (last_s, last_mj) = self._ticks[1], self._ticks[-1]
        return (last_mj - first_mj) / 1e3 / (last_s - first_s)

    def _watch(self) -> None:
        while not self._over.is_set():
            energy_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            if not self._ticks or self._ticks[-1][1] != energy_mj:
                self._ticks.append((time.perf_counter(), energy_mj))
            time.sleep(POLL_S)


class Meter:
    """Seconds and watts of turns, as each of the ranks has them."""

    def __init__(self, bench: Bench) -> None:
        import pynvml

        pynvml.nvmlInit()
        self.bench, self.nvml = bench, pynvml
        self.handle = pynvml.nvmlDeviceGetHandleByUUID(CUDA.identity(bench.device))
        self.states, self.copied = (torch.randn(2**26, device=bench.device) for _ in range(2))
        self.copy_s = bench.race(self.copy, self.copy)[0]

    def copy(self) -> None:
        self.copied.copy_(self.states)

    def work(self, seconds: float) -> Callable[[], None]:
        """Work of so many seconds, half of each sort."""
        products = self.bench.agreed(seconds / 2 / self.bench.product_s)
        share = min(1.0, seconds / 2 / self.copy_s)
        copies = self.bench.agreed(seconds / 2 / self.copy_s) if share == 1 else 1
        part = round(share * self.states.numel())

        def work() -> None:
            self.bench.multiply(products)
            for _ in range(copies):
                self.copied[:part].copy_(self.states[:part])

        return work

    def figures(self, turns: Mapping[ProcessGroup, Callable[[], object]], expected_s: float) -> list[float]:
        """Seconds of a turn and watts, of NCCL's and of the stand-in's."""
        return [figure for turn in turns.values() for figure in self.turns(turn, expected_s)]

    def turns(self, turn: Callable[[], object], expected_s: float) -> tuple[float, float]:
        """Seconds of one of many turns, and watts meanwhile."""
        self._batches(turn, expected_s, SETTLES_S)
        drawn = Drawn(self.nvml, self.handle)
        seconds = self._batches(turn, expected_s, LASTS_S)
        return seconds, drawn.stop()

    def _batches(self, turn: Callable[[], object], expected_s: float, lasts_s: float) -> float:
        """Seconds of a turn, of as many batches as take so long by the first rank's clock."""
        count = math.floor(self.bench.from_first(max(1.0, BATCH_S / expected_s)))
        batches = self.bench.agreed(lasts_s / max(BATCH_S, count * expected_s))
        dist.barrier(self.bench.real)
        torch.cuda.synchronize()
        began = time.perf_counter()
        marks = []
        for _ in range(batches):
            self.bench.ours.normal_()  # sums in place would grow
            for _ in range(count):
                turn()
            marks.append(torch.cuda.Event())
            marks[-1].record()
            if len(marks) > 1:
                marks[-2].synchronize()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / (batches * count)


def ways(meter: Meter, kind: Collective, size: int, rounds: int) -> list[tuple[str, list[float]]]:
    """Of one collective: each way's name and `Meter.figures`, of this rank."""
    bench = meter.bench
    groups = bench.real, bench.stood_in
    buffers = bench.ours[: size // 4], bench.theirs[: size // 4]
    once = {group: bench.task(kind, buffers, group, 1) for group in groups}
    alone_s = bench.from_first(bench.alone(kind, buffers, ALONE_ROUNDS)[1])
    work = meter.work(WORK * alone_s)
    works = bench.real.rank() == 1

    def nothing() -> None:
        pass

    late_s = alone_s if works else (1 + WORK) * alone_s
    shorter = size - RANKS * LATE_BYTES
    of_late = bench.ours[: shorter // 4], bench.theirs[: shorter // 4]
    bench.takes |= {(kind, size): alone_s, (kind, shorter): late_s}
    late = {group: bench.task(kind, of_late, group, 1) for group in groups}
    found = []
    for name, communicate, before, expected in (
        ("alone", once, nothing, 1.0),
        ("after work", once, work, 1 + WORK),
        ("after a pause", once, pause(WORK * alone_s), 1 + WORK),
        ("late", late, work if works else nothing, 1 + WORK),
    ):
        turns = {group: turn(communicate[group], before) for group in groups}
        each = zip(*(meter.figures(turns, expected * alone_s) for _ in range(rounds)), strict=True)
        found.append((f"{kind} of {size / 2**10:g} KiB, {name}", [statistics.median(figures) for figures in each]))
    return found


def quiet(meter: Meter) -> Iterator[tuple[str, list[float]]]:
    """The same of small collectives, with pauses in between, and with work of either sort."""
    bench = meter.bench
    buffers = bench.ours[: QUIET_BYTES // 4], bench.theirs[: QUIET_BYTES // 4]
    bench.takes[Collective.ALL_GATHER, QUIET_BYTES] = QUIET_TAKES_S
    products, copies = (bench.agreed(QUIET_WORK_S / each_s) for each_s in (bench.product_s, meter.copy_s))

    def copy() -> None:
        for _ in range(copies):
            meter.copy()

    groups = bench.real, bench.stood_in
    once = {group: bench.task(Collective.ALL_GATHER, buffers, group, 1) for group in groups}
    ways = {f"small, after pauses of {seconds * 1e3:g} ms": (pause(seconds), seconds) for seconds in QUIET_S}
    ways["small, after products"] = (lambda: bench.multiply(products)), QUIET_WORK_S
    ways["small, after copies"] = copy, QUIET_WORK_S
    for name, (before, seconds) in ways.items():
        turns = {group: turn(communicate, before) for group, communicate in once.items()}
        yield name, meter.figures(turns, seconds)


def pause(seconds: float) -> Callable[[], None]:
    """A rest of the GPU."""

    def rest() -> None:
        torch.cuda.synchronize()
        time.sleep(seconds)

    return rest


def turn(communicate: Callable[[], object], before: Callable[[], object]) -> Callable[[], None]:
    def once_each() -> None:
        before()
        communicate()

    return once_each


def table(rows: Iterable[Point]) -> str:
    """A row for each way and rank, of what `ways` tells."""
    lines = []
    for name, ranks in rows:
        for rank, figures in enumerate(ranks):
            seconds, watts = figures[::2], figures[1::2]
            cells = [f"{each * 1e3:.3f}" for each in seconds] + [f"{each:.0f}" for each in watts]
            longer, more = seconds[0] / seconds[1] - 1, watts[0] - watts[1]
            lines.append([name, str(rank), *cells, f"{longer:+.1%}", f"{more:+.0f}"])
    header = ["what", "rank", "NCCL's ms", "stand-in's", "NCCL's W", "stand-in's", "longer by", "more W"]
    return render(header, lines)


def of_ranks(mine: Sequence[float], device: torch.device) -> list[list[float]]:
    told = torch.tensor(mine, device=device, dtype=torch.float64)
    others = [torch.empty_like(told) for _ in range(RANKS)]
    dist.all_gather(others, told)
    return [each.tolist() for each in others]


def points(bench: Bench, kinds: Sequence[Collective], sizes: Sequence[int], rounds: int) -> list[Point]:
    """Of each kind and size each way, and of small ones."""
    meter = Meter(bench)
    of_kinds = (each for kind in kinds for size in sizes for each in ways(meter, kind, size, rounds))
    return [(way, of_ranks(mine, bench.device)) for way, mine in chain(of_kinds, quiet(meter))]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 16384, 131072], metavar="KIB")
    parser.add_argument("--kinds", type=Collective, nargs="+", choices=KINDS, default=KINDS[:4], metavar="KIND")
    parser.add_argument("--rounds", type=int, default=1)
    start(parser, parser.parse_args(argv), 2**10, points, table)


if __name__ == "__main__":
    main()
