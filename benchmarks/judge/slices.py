"""What it takes to find by slices what an exhaustive sweep by whole gangs found.

    python -m benchmarks.judge.slices TABLE.csv SLICES.jsonl[.xz]... [--seeds 20] [--few 4] [--blind]

A table is one of `benchmarks.judge.search`, with its spec beside it, and SLICES is what `benchmarks.measure.slices`
printed of it, or of `benchmarks.measure.blind`; only layouts of both are looked at. `gang` is a search by whole gangs
with the sampler `auto`. `slices` explores a few layouts by the same sampler, each on one GPU in the time that its
slices took, then runs those of them in full that may be on the front by their slices' figures, and goes on with the
next few. Printed is the median over the seeds of the trials in full, and of the GPU-seconds of all, until those in full
reach 90, 95 and 99% of the hypervolume of the layouts that are looked at.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import text_of
from benchmarks.judge.search import SHARES, Launch, Table, by_gang, effort, medians, of_any_batch
from search_spaces.layout import Layout
from service.errors import InputError
from service.goals import Goals
from service.result import TrialResult
from service.sampling.finalists import contenders
from trainables.status import Status

SAMPLER = "auto"


@dataclass(frozen=True)
class Sliced:
    """What slices said of a layout, and the seconds of one GPU that they took."""

    result: TrialResult
    gpu_seconds: float


def read(paths: Iterable[Path]) -> dict[Layout, Sliced]:
    """By layout of any global batch; lines that are no JSON, such as the table at their end, are left out."""
    found = {}
    for path in paths:
        for row in (json.loads(line) for line in text_of(path).splitlines() if line.startswith("{")):
            result = TrialResult.from_dict(row["result"] if "result" in row else row["slices"])
            found[of_any_batch(result.layout)] = Sliced(result, row["seconds"])
    return found


def by_slices(table: Table, sliced: Mapping[Layout, Sliced], few: int, seed: int) -> Iterator[Launch]:
    """Some layouts by slices, those that lead among them in full, and so on until all are run in full."""
    study, goals = table.study(SAMPLER, seed), Goals(table.objectives)
    left: list[TrialResult] = []
    while True:
        for _ in range(few):
            if (layout := study.ask()) is None:
                break
            one = sliced[of_any_batch(layout)]
            study.tell(layout, one.result)
            yield Launch(layout, one.gpu_seconds, full=False)
            if one.result.status == Status.OK:
                left.append(replace(one.result, layout=layout))
        leading = [one.layout for one in contenders(left, goals, len(left))]
        if not leading:
            return
        left = [one for one in left if one.layout not in leading]
        for layout in leading:
            yield Launch(layout, table.gpu_seconds[layout])


def comparison(table: Table, name: str, sliced: Mapping[Layout, Sliced], seeds: int, few: int) -> Iterator[str]:
    """Lines that say how both fare on a table of layouts that all were sliced."""
    yield (
        f"{name}: {len(table.results)} layouts by slices and in full, {len(table.front)} on the front of "
        f"{' and '.join(table.objectives)}; medians of {seeds} seeds"
    )
    whole = statistics.fmean(table.gpu_seconds.values())
    alone = statistics.fmean(sliced[of_any_batch(layout)].gpu_seconds for layout in table.results)
    yield f"a layout takes {whole:.1f} GPU-s in full and {alone:.1f} by slices on average"
    heads = [f"{what} {share:.0%}" for what in ("in full", "GPU-s") for share in SHARES]
    yield f"{'explores by':12}" + "".join(f"{head:>12}" for head in heads)
    searches: dict[str, Callable[[int], Iterator[Launch]]] = {
        "gang": lambda seed: by_gang(table, SAMPLER, seed),
        "slices": lambda seed: by_slices(table, sliced, few, seed),
    }
    for way, search in searches.items():
        counts, spent = medians([effort(table, search(seed)) for seed in range(seeds)])
        cells = [f"{value:.1f}" for value in counts] + [f"{value:.0f}" for value in spent]
        yield f"{way:12}" + "".join(f"{cell:>12}" for cell in cells)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("slices", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--few", type=int, default=4, help="layouts that are explored before some are run in full")
    parser.add_argument("--blind", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        sliced = read(arguments.slices)
        table = Table(arguments.table, arguments.blind, sliced)
    except (OSError, ValueError, LookupError, lzma.LZMAError, InputError) as error:
        parser.error(str(error))
    for line in comparison(table, arguments.table.name, sliced, arguments.seeds, arguments.few):
        print(line, flush=True)


if __name__ == "__main__":
    main()
