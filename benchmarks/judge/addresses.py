"""How much of a pipeline's memory hangs on where CUDA's driver places what torch's allocator reserves.

    python -m benchmarks.judge.addresses SLICES.jsonl[.xz] MEASURED.jsonl[.xz] [SLICES MEASURED ...]

In pairs, files of `benchmarks.measure.blind`. Of free pieces that are alike the allocator takes the one at the lowest
address, so that with other addresses other pieces are left over, and the next large tensor may find no room. Prints of
each rank of the eager pipelines of `megatron` that both files have, a stage on a GPU, the GiB that it reserved alone,
and in a gang; and what a replay of its step does (`search_spaces.replay`): with each segment below the older ones, as
the driver places them in a process alone, and the least and the most of `ORDERS` replays with segments anywhere, and
how many of these come to what it was in the gang.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.judge.pairs import both, found
from benchmarks.measure.blind import Row
from search_spaces.layout import Layout
from search_spaces.replay import run
from search_spaces.replay.allocator import Allocator
from search_spaces.replay.pipelined import Pipelined
from search_spaces.workload import Workload
from service.answers.tables import render
from service.spec import load_spec

ORDERS = 20

ALIKE = 0.001
"""By how much what is the same differs."""

ADDRESSES = 2**47


class Scattered(Allocator):
    """Has its segments anywhere."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def _address(self, size: int) -> int:
        return self.random.randrange(ADDRESSES)


@dataclass(frozen=True)
class Point:
    """A rank of a layout, and the GiB that it reserved in each way."""

    spec: str
    layout: str
    rank: int
    alone: float
    gang: float
    replayed: float
    scattered: tuple[float, ...]

    @property
    def as_in_gang(self) -> int:
        return sum(abs(one / self.gang - 1) <= ALIKE for one in self.scattered)


def replayed_gib(work: Workload, layout: Layout, rank: int, allocator: Allocator) -> float:
    class Placed(Pipelined):
        def start(self) -> None:
            self.allocator = allocator
            super().start()

    assert work.model is not None
    return run(Placed(work.model, layout.microbatch_tokens(work.sequence_length), layout, rank)).reserved / 2**30


def points(sliced: Iterable[Row], measured: Iterable[Row]) -> Iterator[Point]:
    for path, alone, gang in both(sliced, measured):
        layout = alone.layout
        if layout.engine != "megatron" or layout.compile or layout.pipeline_parallel_size != layout.num_gpus:
            continue
        work, among = load_spec(Path(path)).workload.run, {one.rank: one.peak_memory_gib for one in gang.ranks}
        for one in alone.ranks:
            in_gang = among[one.rank]
            if one.peak_memory_gib is None or in_gang is None:
                continue
            orders = tuple(replayed_gib(work, layout, one.rank, Scattered(seed)) for seed in range(ORDERS))
            driver = replayed_gib(work, layout, one.rank, Allocator())
            yield Point(Path(path).stem, layout.label, one.rank, one.peak_memory_gib, in_gang, driver, orders)


def table(all_points: Iterable[Point]) -> str:
    """What was the furthest off alone first."""
    lines = [
        [one.spec, one.layout, str(one.rank)]
        + [f"{gib:.2f}" for gib in (one.alone, one.gang, one.replayed, min(one.scattered), max(one.scattered))]
        + [f"{one.as_in_gang} of {len(one.scattered)}"]
        for one in sorted(all_points, key=lambda one: -abs(one.alone / one.gang - 1))
    ]
    heads = ["model", "layout", "rank", "alone", "in a gang", "replayed", "least", "most", "as in the gang"]
    return render(heads, lines)


def main(argv: list[str] | None = None) -> None:
    print(table(found(__doc__, argv, points, "no eager pipeline of megatron is in both files of a pair")))


if __name__ == "__main__":
    main()
