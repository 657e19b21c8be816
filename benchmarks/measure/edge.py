"""Layouts at the edge of a GPU's memory: does one run out of it that a probe of its fullest rank let pass?

    python -m benchmarks.measure.edge SPEC... [--launches 60] [--seed SEED] [--seconds S] --out FILE.jsonl

Draws, of the legal layouts of the specs of which the memory model says that they may or may not fit, one after the
other, spread over all axes, and tries each as a search by gangs with `borderline: probe` does: it is probed, and
launched unless that refuses it, which here means that each kind of its ranks runs alone. Several GPUs at hand try
several at once. Ends after so many launches, or begins none after S seconds; the same command with another seed or FILE
goes on. Prints every layout, then the share of the launches that ran out of memory. All specs must name the same
cluster; the memory is that of its GPUs, whatever is at hand.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.measure.blind import Row, draw, read, row_of, write
from benchmarks.measure.gang import Warm, sliced, some_gangs, spread
from search_spaces.layout import Layout
from search_spaces.memory import SAFE_SHARE, band, estimate
from search_spaces.workload import Workload
from service.answers.tables import render
from service.problem import Problem
from service.result import TrialResult
from service.spec import load_spec
from service.trials.evaluate import after_probe
from trainables.status import Status

REFUSED = "refused by a probe"
RAN_OUT = "ran out of memory"


def verdict(result: TrialResult) -> str:
    """What came of a layout: `REFUSED`, `RAN_OUT`, or the status of its launch."""
    if result.status != Status.OOM:
        return result.status
    return REFUSED if (result.cause or "").startswith("probe: ") else RAN_OUT


def is_doubtful(layout: Layout, work: Workload) -> bool:
    """Whether the memory model says neither that a layout fits nor that it does not, for being so near the edge."""
    share = estimate(layout, work.run).share
    return band(layout, work) == "borderline" and share is not None and share >= SAFE_SHARE


def at_the_edge(specs: Mapping[str, Problem], seed: int) -> Iterator[tuple[str, Problem, Layout]]:
    """Layouts that may or may not fit, of one spec after the other in turns."""
    turns = []
    for path, spec in specs.items():
        doubtful = [one for one in spec.legal.layouts if is_doubtful(one, spec.workload)]
        probed = replace(sliced(spec), borderline="probe")
        turns.append([(path, probed, layout) for layout in draw(doubtful, len(doubtful), seed)])
    for turn in itertools.zip_longest(*turns):
        yield from (one for one in turn if one is not None)


def tried(specs: Mapping[str, Problem], launches: int, seed: int, until: float) -> Iterator[Row]:
    """A line for each layout that was tried, until there are so many launches."""
    todo, launched = list(at_the_edge(specs, seed)), Counter[str]()
    if not todo:
        raise SystemExit("no layout of these specs is at the edge of its GPUs' memory")
    cluster = todo[0][1].cluster

    def one(number: int, path: str, spec: Problem, layout: Layout, warm: Warm) -> Row | None:
        if (began := time.monotonic()) > until or launched.total() - launched[REFUSED] >= launches:
            return None
        trial_id = f"edge-{number}"
        launch = partial(warm, trial_id, layout, replace(spec, borderline="risk"))
        result = after_probe(warm.bench(spec), trial_id, layout, launch)
        launched[verdict(result)] += 1
        share = estimate(layout, spec.workload.run).share
        seconds = time.monotonic() - began
        return row_of(path, layout) | {"share": share, "seconds": seconds, "result": result.to_dict()}

    with some_gangs(cluster, 1, [layout for _, _, layout in todo], most=cluster.size) as gangs:
        rows = spread(gangs, [partial(one, number, *what) for number, what in enumerate(todo)])
        yield from (row for row in rows if row is not None)


def table(rows: list[Row]) -> str:
    """Every layout, those that ran out first and then the fullest, and what it comes to."""
    results = [(row, TrialResult.from_dict(row["result"])) for row in rows]
    told = [(row, verdict(result), result.metrics.get("peak_memory_gib")) for row, result in results]
    told.sort(key=lambda one: (one[1] != RAN_OUT, -one[0]["share"]))
    lines = [
        [Path(row["spec"]).stem, row["layout"], f"{row['share']:.0%}", came, "" if gib is None else f"{gib:.1f}"]
        for row, came, gib in told
    ]
    counts = Counter(came for _, came, _ in told)
    launches = counts.total() - counts[REFUSED]
    measured = [gib for _, _, gib in told if gib is not None]
    summary = f"{launches} launches, {counts[RAN_OUT]} of them {RAN_OUT}; {counts[REFUSED]} {REFUSED}"
    summary += "".join(f"; {counts[one]} {one}" for one in counts if one not in (REFUSED, RAN_OUT))
    if measured:
        summary += f"; {statistics.median(measured):.1f} GiB reserved in the median, {max(measured):.1f} at most"
    return render(["model", "layout", "foretold", "", "GiB"], lines) + "\n" + summary


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="+", metavar="SPEC")
    parser.add_argument("--launches", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    specs = {path: load_spec(path).located() for path in arguments.specs}
    until = time.monotonic() + arguments.seconds
    rows = tried(specs, arguments.launches, arguments.seed, until)
    write(arguments.out, rows, lambda row: verdict(TrialResult.from_dict(row["result"])))
    print()
    print(table(read(arguments.out)))


if __name__ == "__main__":
    main()
