"""How far depth proxies are from the truth, on a model that does fit.

    python -m benchmarks.measure.proxy SPEC SHALLOW DEEP --trials N

Runs the first N legal layouts of a spec in one gang, each with the model itself and with models of SHALLOW and of DEEP
layers, and prints what the two smaller ones foretell against what the model came to: a table of errors in percent, then
the figures as lines of JSON, one a layout.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure.gang import RunTrial, one_gang, require_ok
from search_spaces.layout import Layout
from service.answers.tables import render
from service.metrics import heading
from service.problem import Problem
from service.result import TrialResult
from service.spec import dump_spec, load_spec, parse_spec
from service.trials.extrapolation import OVER_DEPTH


def compare_depths(run: RunTrial, whole: Problem, proxied: Problem, layouts: list[Layout]) -> list[dict[str, Any]]:
    """For each layout its metrics as measured and as extrapolated, and the error of these relative to those."""
    rows = []
    for number, layout in enumerate(layouts):
        measured = _metrics(run(f"whole-{number}", layout, whole))
        extrapolated = _metrics(run(f"proxy-{number}", layout, proxied))
        errors = {metric: extrapolated[metric] / measured[metric] - 1 for metric in measured}
        rows.append({"layout": layout.label, "measured": measured, "extrapolated": extrapolated, "error": errors})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Errors in percent, one row a layout, and the largest and the median of their sizes."""
    metrics = list(rows[0]["error"])
    errors = [[row["error"][metric] for metric in metrics] for row in rows]
    lines = [[row["layout"], *(f"{error:+.2%}" for error in line)] for row, line in zip(rows, errors, strict=True)]
    sizes = [[abs(error) for error in column] for column in zip(*errors, strict=True)]
    lines += [
        [name, *(f"{of(column):.2%}" for column in sizes)]
        for name, of in (("largest", max), ("median", statistics.median))
    ]
    return render(["error of", *map(heading, metrics)], lines)


def _metrics(result: TrialResult) -> dict[str, float]:
    metrics = require_ok(result)
    return {name: metrics[name] for name in OVER_DEPTH if name in metrics}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("depths", type=int, nargs=2, metavar="LAYERS", help="of the shallow and the deep model")
    parser.add_argument("--trials", type=int, default=3)
    arguments = parser.parse_args(argv)
    spec = load_spec(arguments.spec).located()
    in_full = replace(spec.measurement, short_trials=False)
    whole = replace(spec, depth_proxy=None, measurement=in_full)
    proxied = parse_spec(dump_spec(replace(whole, depth_proxy=tuple(arguments.depths))), str(arguments.spec))
    layouts = list(proxied.legal.layouts[: arguments.trials])
    with one_gang(spec, proxied.gang_size) as run:
        rows = compare_depths(run, whole, proxied, layouts)
    shallow, deep = arguments.depths
    print(f"{spec.workload.shape.layers} layers foretold from {shallow} and {deep}\n\n{table(rows)}\n")
    for row in rows:
        print(json.dumps({"spec": str(arguments.spec), "depths": arguments.depths, **row}))


if __name__ == "__main__":
    main()
