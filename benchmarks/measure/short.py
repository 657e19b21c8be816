"""How far short trials are from full ones, and how much less time they take.

    python -m benchmarks.measure.short SPEC --trials N

Runs N legal layouts of a spec, spread over its space, in one gang, each in full and short: full steps of the whole
global batch, short ones of two smaller batches. Prints the figures of each layout as a line of JSON, then a table of
what the short ones are off the full ones, in percent, with the share of a full trial's time that the short one took and
the standard error that it gave itself. Layouts of too few microbatches to be short are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure.gang import RunTrial, one_gang, require_ok
from search_spaces.layout import Layout
from service.answers.tables import render
from service.metrics import heading
from service.problem import Problem
from service.spec import load_spec
from service.trials import short
from service.trials.extrapolation import SPENT

COMPARED = ("tokens_per_s", "step_time_s", "joules_per_token", "mean_power_w", "peak_memory_gib")


def compare_lengths(run: RunTrial, spec: Problem, layouts: list[Layout]) -> Iterator[dict[str, Any]]:
    """For each layout its figures in full and short, the error of these relative to those, and the seconds of both."""
    full = replace(spec, measurement=replace(spec.measurement, short_trials=False))
    for number, layout in enumerate(layouts):
        measured = require_ok(run(f"full-{number}", layout, full))
        extrapolated = require_ok(run(f"short-{number}", layout, spec))
        names = [name for name in COMPARED if measured.get(name)]
        yield {
            "layout": layout.label,
            "batches": short.batches(layout),
            "error": {name: extrapolated[name] / measured[name] - 1 for name in names},
            "time": _seconds(extrapolated) / _seconds(measured),
            "own_error": extrapolated["extrapolation_error"],
            "full": measured,
            "short": extrapolated,
        }


def table(rows: list[dict[str, Any]]) -> str:
    """One row a layout, and the largest and the median of the errors' sizes."""
    metrics = list(rows[0]["error"])
    figures = [[*(row["error"][name] for name in metrics), row["time"], row["own_error"]] for row in rows]
    lines = [
        [row["layout"], *(f"{error:+.2%}" for error in line[:-2]), f"{line[-2]:.0%}", f"{line[-1]:.2%}"]
        for row, line in zip(rows, figures, strict=True)
    ]
    columns = [[abs(figure) for figure in column] for column in zip(*figures, strict=True)]
    for name, of in (("largest", max), ("median", statistics.median)):
        worst = [of(column) for column in columns]
        lines.append([name, *(f"{error:.2%}" for error in worst[:-2]), f"{worst[-2]:.0%}", f"{worst[-1]:.2%}"])
    return render(["error of", *map(heading, metrics), "time", "own error"], lines)


def _seconds(metrics: dict[str, float]) -> float:
    return sum(metrics[name] for name in SPENT)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--trials", type=int, default=8)
    arguments = parser.parse_args(argv)
    spec = load_spec(arguments.spec).located()
    able = [layout for layout in spec.legal.layouts if short.batches(layout) is not None]
    if not able:
        raise SystemExit(f"{arguments.spec}: no legal layout has microbatches enough to be short")
    count = min(arguments.trials, len(able))
    layouts = [able[i * len(able) // count] for i in range(count)]
    rows = []
    with one_gang(spec, spec.gang_size) as run:
        for row in compare_lengths(run, spec, layouts):
            print(json.dumps({"spec": str(arguments.spec), **row}), flush=True)
            rows.append(row)
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
