"""What a trial by slices costs of one GPU, and what it is off by for taking so few steps.

    python -m benchmarks.measure.alone SPEC... [--layouts N] [--seed SEED] [--seconds S] --out FILE.jsonl

Of each spec N legal layouts on several GPUs, spread over all axes, are run by slices as a search does. Then the same
ranks run once more in whole windows after a whole warm-up, of the whole batch, as long as the spec says. Prints what
each trial took, from its begin to its result, and what of that went into its steps; then how far its figures are off
those of the whole windows, worst first. No layout begins after S seconds; the same command goes on with FILE. All specs
must name the same cluster.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.measure.blind import Row, draw, layout_of, left, read, row_of, write
from benchmarks.measure.gang import Warm, sliced, some_gangs
from benchmarks.measure.off import COMPARED, errors, lines_of
from search_spaces.kinds import kinds
from search_spaces.layout import Layout
from service.answers.tables import render
from service.metrics import heading
from service.problem import Problem
from service.result import TrialResult
from service.spec import load_spec
from service.trials.evaluate import make_request
from service.trials.slices import run_slices

PHASES = ("trial_overhead_s", "compile_time_s", "warmup_time_s", "window_time_s", "breakdown_time_s")
"""What a trial's seconds go into, in the order of time but for the first, which begins and ends it."""


def whole(trial_id: str, layout: Layout, problem: Problem, warm: Warm) -> TrialResult:
    """A layout by slices, in whole windows of the whole batch."""
    request = make_request(trial_id, layout, problem)
    procedure = replace(request.procedure, alike_s=math.inf, window_s=problem.measurement.window_s)
    return run_slices(warm.bench(problem), replace(request, procedure=procedure, batches=()))


def tried(specs: Mapping[str, Problem], rows: Sequence[Row], until: float) -> Iterator[Row]:
    """A line for each of some rows, until time is up."""
    layouts = [layout_of(row) for row in rows]
    cluster = specs[rows[0]["spec"]].cluster
    with some_gangs(cluster, 1, layouts, most=1) as (warm,):
        for number, (row, layout) in enumerate(zip(rows, layouts, strict=True)):
            if (began := time.monotonic()) > until:
                return
            spec = specs[row["spec"]]
            short = warm(f"short-{number}", layout, spec)
            seconds = time.monotonic() - began
            yield row | {
                "seconds": seconds,
                "kinds": len(kinds(layout, spec.workload.run)),
                "short": short.to_dict(),
                "whole": whole(f"whole-{number}", layout, spec, warm).to_dict(),
            }


def costs(rows: Sequence[Row]) -> str:
    """What each trial took, dearest first."""
    dearest = sorted(rows, key=lambda row: -row["seconds"])
    lines = [
        [
            Path(row["spec"]).stem,
            row["layout"],
            str(row["kinds"]),
            f"{row['seconds']:.1f}",
            *(f"{row['short']['metrics'].get(phase, math.nan):.1f}" for phase in PHASES),
        ]
        for row in dearest
    ]
    taken = [row["seconds"] for row in rows]
    summary = f"{statistics.median(taken):.1f} s in the median, {max(taken):.1f} s at most"
    phases = ("start, end", "compile", "warm-up", "window", "profile")
    return render(["model", "layout", "kinds", "s", *phases], lines) + "\n" + summary


def off(rows: Sequence[Row]) -> str:
    """How far each trial's figures are off those of whole windows."""
    known = [row | {"error": errors(row["short"]["metrics"], row["whole"]["metrics"])} for row in rows]
    lines = lines_of(known, lambda row: [Path(row["spec"]).stem, row["layout"]])
    return render(["model", "off whole windows", *map(heading, COMPARED)], lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="+", metavar="SPEC")
    parser.add_argument("--layouts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    specs = {path: sliced(load_spec(path).located()) for path in arguments.specs}
    drawn = [
        row_of(path, layout)
        for path, spec in specs.items()
        for layout in draw([one for one in spec.legal.layouts if one.num_gpus > 1], arguments.layouts, arguments.seed)
    ]
    if todo := left(drawn, arguments.out):
        new = tried(specs, todo, time.monotonic() + arguments.seconds)
        write(arguments.out, new, lambda row: f"{row['seconds']:.1f} s")
    rows = read(arguments.out)
    ok = [row for row in rows if row["short"]["status"] == row["whole"]["status"] == "ok"]
    print()
    if ok:
        print(costs(ok), off(ok), sep="\n\n")
    for row in rows:
        for name in ("short", "whole"):
            if row[name]["status"] != "ok":
                print(f"{row['layout']}, {name}: {row[name]['status']}: {row[name]['cause']}")


if __name__ == "__main__":
    main()
