"""How much of a rank's memory hangs on how far its host was ahead of its GPU.

    python -m benchmarks.judge.lags FILE.jsonl[.xz]... [--alone ALONE.jsonl[.xz]]

of files of `benchmarks.measure.allocations`. What a stream of NCCL's has sent, received or gathered, torch's allocator
has back only when the GPU has come so far in that stream (`Tensor.record_stream`): in a record so many requests and
returns later. Prints of each rank with such tensors the GiB that it reserved by its record, and what replays of the
record reserve where these come back at other times: `SEEDS` times each, all of a record off by `TOGETHER` of the lag,
and each by a third of that besides, in standard deviation. With `--alone`, also what the rank reserved alone, and what
its requests alone reserve at the addresses that the driver gave those of the gang.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measure.blind import read
from search_spaces.replay.allocator import Allocator, Piece
from service.answers.tables import render

SEEDS, TOGETHER = 24, 0.01

EMPTIES = "_make_moments"
"""In whose place one of the engines gives the driver back what is free."""

Record = Mapping[str, Any]
"""Of a rank, as `benchmarks.measure.tracing.events` has it."""


class At(Allocator):
    """Has its segments at given addresses, one after the other; those beyond, below all."""

    def __init__(self, addresses: Iterable[int]) -> None:
        super().__init__()
        self._given = iter(addresses)

    def _address(self, size: int) -> int:
        given = next(self._given, None)
        return super()._address(size) if given is None else given


@dataclass(frozen=True)
class Point:
    """A rank of a layout: GiB that it `reserved`, replays of that with `others` lags, and the same of it alone."""

    spec: str
    layout: str
    rank: int
    late: int
    reserved: float
    others: tuple[float, ...]
    alone: float | None = None
    alone_at: float | None = None

    @property
    def spread(self) -> float:
        return (max(self.others) - min(self.others)) / self.reserved


def lags(events: Sequence[Sequence[Any]]) -> dict[int, tuple[int, int]]:
    """Of what came back late, by its request: when it was given back, and when it was there again, as events."""
    asked = {one[0]: index for index, one in enumerate(events) if len(one) == 1}
    there = {one[0]: index for index, one in enumerate(events) if len(one) == 2 and one[1] == "late"}
    return {request: (asked.get(request, index), index) for request, index in there.items()}


def replayed(record: Record, allocator: Allocator, seed: int | None = None) -> int:
    """Bytes that a record's requests reserve at most, its lags as they were or, with a seed, others."""
    events, places, chance = record["events"], record["places"], random.Random(seed)
    late, returns = lags(events), dict[int, list[int]]()
    together = 0.0 if seed is None else chance.gauss(0, TOGETHER)
    for request, (asked, there) in late.items():
        apart = 0.0 if seed is None else chance.gauss(0, TOGETHER / 3)
        lag = round((there - asked) * (1 + together + apart))
        returns.setdefault(min(asked + lag, len(events) - 1), []).append(request)
    held, most, is_new = dict[int, Piece](), 0, True
    for index, one in enumerate(events):
        if len(one) == 3:
            if is_new and EMPTIES in places[one[2]]:
                allocator.empty()
                is_new = False
            held[index] = allocator.take(one[0], one[1])
        elif len(one) == 1 and one[0] not in late:
            allocator.give_back(held.pop(one[0]))
        for request in returns.get(index, ()):
            allocator.give_back(held.pop(request))
        most = max(most, allocator.reserved)
    return most


def points(rows: Iterable[Record], alone: Iterable[Record]) -> Iterator[Point]:
    by_layout = {(row["spec"], row["layout"]): row["ranks"] for row in alone}
    for row in rows:
        for rank, record in enumerate(row["ranks"]):
            if not (late := len(lags(record["events"]))):
                continue
            others = tuple(replayed(record, Allocator(), seed) / 2**30 for seed in range(SEEDS))
            spec, reserved = Path(row["spec"]).stem, record["reserved"] / 2**30
            point = Point(spec, row["layout"], rank, late, reserved, others)
            if (ranks := by_layout.get((row["spec"], row["layout"]))) is not None:
                at = replayed(ranks[rank], At(record["addresses"])) / 2**30
                point = replace(point, alone=ranks[rank]["reserved"] / 2**30, alone_at=at)
            yield point


def table(found: Sequence[Point]) -> str:
    headings = ["model", "layout", "rank", "late returns", "reserved", "least", "most", "as reserved"]
    paired = any(point.alone is not None for point in found)
    lines = []
    for point in sorted(found, key=lambda one: one.spread, reverse=True):
        same = sum(abs(one - point.reserved) < 0.001 * point.reserved for one in point.others)
        cells = [point.spec, point.layout, str(point.rank), str(point.late)]
        cells += [f"{gib:.2f}" for gib in (point.reserved, min(point.others), max(point.others))]
        cells.append(f"{same} of {SEEDS}")
        if paired:
            cells += ["" if gib is None else f"{gib:.2f}" for gib in (point.alone, point.alone_at)]
        lines.append(cells)
    return render([*headings, *(["alone", "alone, at the gang's addresses"] if paired else [])], lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--alone", type=Path, help="of the same layouts, each rank without the others")
    given = parser.parse_args(argv)
    rows, alone = [row for file in given.files for row in read(file)], [] if given.alone is None else read(given.alone)
    if not all("ranks" in row for row in [*rows, *alone]):
        parser.error("a file has something else than records of benchmarks.measure.allocations")
    found = list(points(rows, alone))
    if not found:
        parser.error("no rank has tensors that come back late")
    print(table(found))
    apart = sum(point.spread > 0.001 for point in found)
    print(f"replays of {apart} of {len(found)} ranks differ by more than 0.1%")


if __name__ == "__main__":
    main()
