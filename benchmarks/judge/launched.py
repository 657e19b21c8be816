"""How far predictions are off on hosts whose launches were measured, by what launches take in a step beyond that.

    python -m benchmarks.judge.launched RUN [RUN ...] [--in-step 1.0 1.1]

A run is `NAME` of `benchmarks/data/NAME.operators.json.xz`, what a calibration kept of operators, beside which are what
was measured of layouts there, in full or by slices. Prints of each run, by the data sheet and these operators alone,
the mean error of step time, with its sign and without, of the layouts that wait for the CPU for each
`launches_in_step` given, and of those that do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks import DATA, text_of
from benchmarks.measure.blind import IDLE, layout_of, read, waited_share
from benchmarks.measure.off import errors
from search_spaces.cost import predicted_metrics
from search_spaces.operators import OperatorTiming, Timings
from service.answers.tables import render
from service.fitting import expected
from service.spec import load_spec

IN_STEP = (1.0, 1.1)


@dataclass(frozen=True)
class Point:
    """What is predicted of a layout's step time over what was measured, less 1, for each `launches_in_step`; and
    whether it waits for the CPU."""

    waits: bool
    off: tuple[float, ...]


def points(run: str, in_step: Sequence[float]) -> list[Point]:
    """Raises SystemExit where the run's operators are not committed, or nothing of what was measured."""
    kept = DATA / f"{run}.operators.json.xz"
    rows, found = read(DATA / f"{run}.measured.jsonl.xz") or read(DATA / f"{run}.slices.jsonl.xz"), []
    if not rows or not kept.exists():
        raise SystemExit(f"{run}: no operators are committed, or nothing that was measured beside them")
    operators = Timings(tuple(map(OperatorTiming.from_dict, json.loads(text_of(kept)))))
    problems = {path: load_spec(path).located() for path in dict.fromkeys(row["spec"] for row in rows)}
    for row in rows:
        problem, metrics = problems[row["spec"]], (row.get("full") or row["slices"])["metrics"]
        sheet = expected(problem.cluster)
        assert sheet is not None, "only H100 and H200 are committed"
        if metrics.get("step_time_s"):
            known = [replace(sheet, operators=operators, launches_in_step=by) for by in in_step]
            told = [predicted_metrics(layout_of(row), problem.workload, one) for one in known]
            off = tuple(errors(figures, metrics)["step_time_s"] for figures in told)
            found.append(Point((waited_share(metrics, {}) or 0.0) >= IDLE, off))
    return found


def table(found: dict[str, list[Point]], in_step: Sequence[float]) -> str:
    lines = []
    for run, of_run in {**found, "all": [point for some in found.values() for point in some]}.items():
        line = [run]
        for waits in (True, False):
            group = [point for point in of_run if point.waits is waits]
            line.append(str(len(group)))
            for index in range(len(in_step)):
                off = [point.off[index] for point in group]
                line += [f"{statistics.fmean(off):+.1%}", f"{statistics.fmean(map(abs, off)):.1%}"] if off else ["", ""]
        lines.append(line)
    of_each = [heading for by in in_step for heading in (f"{by:g}: mean", "error")]
    return render(["run", "wait", *of_each, "do not", *of_each], lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--in-step", nargs="+", type=float, default=IN_STEP)
    arguments = parser.parse_args(argv)
    print(table({run: points(run, arguments.in_step) for run in arguments.runs}, arguments.in_step))


if __name__ == "__main__":
    main()
