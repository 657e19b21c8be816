"""Slices against layouts that were really run, or are run beside them.

    python -m benchmarks.measure.slices TABLE.csv [--layouts N] [--seconds S] [--seed SEED] [--part I/N]
    python -m benchmarks.measure.slices SPEC.yaml [--layouts N] [--seconds S] [--seed SEED] [--part I/N]

A table is one of benchmarks/data, with the spec of its sweep beside it, of the same name in YAML; its layouts that
ended well are run by slices, on one GPU. Of a spec, legal layouts are run by all their ranks and then by slices, in one
gang.
There are N of them, drawn by the seed, or as many as begin within S seconds; of part I of N, every N-th from the I-th
on, for sweeps in several goes. Prints the results of each as a line of JSON as it comes; then a table of how far slices
are off, in percent, worst first, and what each took. Layouts on a single GPU have nothing to stand in for and are left
out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.judge.search import Table
from benchmarks.measure.gang import RunTrial, one_gang, sliced
from benchmarks.measure.off import COMPARED, errors, lines_of, worst_first
from search_spaces.layout import Layout
from service.answers.tables import render
from service.metrics import heading
from service.problem import Problem
from service.spec import load_spec

Measured = Mapping[str, Any]


def tabled(path: Path, problem: Problem) -> list[tuple[Layout, Measured]]:
    """The layouts of a table on several GPUs, with what was measured of them."""
    return [
        (replace(result.layout, global_batch_size=problem.global_batch_size), result.metrics)
        for result in Table(path).results.values()
        if result.status == "ok" and result.layout.num_gpus > 1
    ]


def compare(
    run: RunTrial, problem: Problem, rows: Iterable[tuple[Layout, Measured | None]], until: float
) -> Iterator[dict[str, Any]]:
    """For each layout the result by slices, the errors relative to what was measured, or is before, and the seconds."""
    whole = replace(problem, measurement=replace(problem.measurement, explore="gang"))
    for number, (layout, known) in enumerate(rows):
        if time.monotonic() > until:
            return
        full = None if known is not None else run(f"full-{number}", layout, whole)
        measured = known if full is None else full.metrics
        assert measured is not None
        began = time.monotonic()
        result = run(f"slices-{number}", layout, problem)
        seconds = time.monotonic() - began
        error = errors(result.metrics, measured)
        results = {"result": result.to_dict()} | ({} if full is None else {"full": full.to_dict()})
        yield {"layout": layout.label, "seconds": seconds, "error": error} | results


def table(rows: list[dict[str, Any]]) -> str:
    """One row a layout, the worst first, then the means and the largest of the errors' sizes."""
    seconds = [row["seconds"] for row in worst_first(rows)]
    lines = lines_of(rows, lambda row: [row["layout"]])
    for line, taken in zip(lines, [*seconds, statistics.fmean(seconds), max(seconds)], strict=True):
        line.append(f"{taken:.1f}")
    return render(["error of", *map(heading, COMPARED), "s"], lines)


def part(text: str) -> slice:
    """Which of some rows are part I of N, from `I/N`, both counted from 1."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 1/4, the first of four")
    return slice(int(number) - 1, None, int(count))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="TABLE|SPEC")
    parser.add_argument("--layouts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=part, default=slice(None), metavar="I/N")
    arguments = parser.parse_args(argv)
    problem = sliced(load_spec(arguments.source.with_suffix(".yaml")).located())
    rows: list[tuple[Layout, Measured | None]]
    if arguments.source.suffix == ".csv":
        rows, size = [*tabled(arguments.source, problem)], 1
    else:
        rows, size = [(layout, None) for layout in problem.legal.layouts if layout.num_gpus > 1], problem.gang_size
    random.Random(arguments.seed).shuffle(rows)
    done = []
    rows = rows[: arguments.layouts][arguments.part]
    with one_gang(problem, size) as run:
        for row in compare(run, problem, rows, time.monotonic() + arguments.seconds):
            print(json.dumps(row), flush=True)
            done.append(row)
    if any(row["error"] for row in done):
        print(table(done))
    for row in done:
        for result in (row["result"], row.get("full", row["result"])):
            if result["status"] != "ok":
                print(f"{row['layout']}: {result['status']}: {result['cause']}")


if __name__ == "__main__":
    main()
