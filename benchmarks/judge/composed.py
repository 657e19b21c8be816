"""How far pipelines by slices are off once their ranks are put together as it is done now.

    python -m benchmarks.judge.composed SLICES.jsonl[.xz] MEASURED.jsonl[.xz]

Both are files of `benchmarks.measure.blind`. Ranks that were not profiled are taken to do the usual share of products.
Prints each pipeline of both files, worst first, by how much its step time and J/token are off, and in `recorded` by how
much they were when its slices were run; then means and largest errors.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.judge.pairs import both
from benchmarks.measure.blind import Row, read
from benchmarks.measure.off import errors, over, percent, worst_first
from search_spaces.composition import compose
from search_spaces.network import Network
from service.answers.tables import render
from service.metrics import heading
from service.result import TrialResult
from service.spec import load_spec
from service.trials.slice_breakdown import USUAL_PRODUCTS

TOLD = ("step_time_s", "joules_per_token")

HOW = ("error", "recorded")
"""Where a point has what it is off."""


def again(result: TrialResult, network: Network, spec: str) -> dict[str, float]:
    """The metrics `TOLD` of a pipeline's slices, put together now, with the network that was assumed then."""
    times = {one.kind: one.times for one in result.slices}
    profiled = {kind: replace(of, products=of.products or USUAL_PRODUCTS) for kind, of in times.items()}
    step = compose(result.layout, load_spec(spec).workload.run, profiled, network)
    return {name: getattr(step, name) for name in TOLD}


def points(sliced: Iterable[Row], measured: Iterable[Row]) -> list[dict[str, Any]]:
    """Of each pipeline of both, its `spec`, `layout`, and what it is off, now (`error`) and as `recorded`."""
    found = []
    for path, alone, gang in both(sliced, measured):
        is_pipeline = alone.layout.pipeline_parallel_size > 1
        if is_pipeline and alone.slices and alone.network is not None and "step_time_s" in gang.metrics:
            found.append(
                {"spec": path, "layout": alone.layout.label}
                | {"error": errors(again(alone, alone.network, path), gang.metrics)}
                | {"recorded": errors(alone.metrics, gang.metrics)}
            )
    return worst_first(found)


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line a pipeline, then the mean and the largest of all."""
    rows = list(rows)
    lines = [
        [Path(row["spec"]).stem, row["layout"], *(percent(row[how].get(name)) for how in HOW for name in TOLD)]
        for row in rows
    ]
    for title, of in (("mean", statistics.fmean), ("largest", max)):
        cells = [cell for how in HOW for cell in over([row[how] for row in rows], of, TOLD)]
        lines.append(["all", f"{title} of {len(rows)}", *cells])
    headings = [heading(name) for name in TOLD]
    return render(["model", "layout", *headings, *(f"{name} recorded" for name in headings)], lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slices", type=Path)
    parser.add_argument("measured", type=Path)
    arguments = parser.parse_args(argv)
    if not (rows := points(read(arguments.slices), read(arguments.measured))):
        parser.error(f"{arguments.slices}: no pipeline of it is in {arguments.measured}")
    print(table(rows))


if __name__ == "__main__":
    main()
