"""How steps and clocks settle after a trial's first step: among all ranks, and in ranks that run alone.

    python -m benchmarks.measure.settling FILE.jsonl --out OUT.jsonl [--only TEXT...] [--gang] [--seconds S]

runs layouts of a file of `benchmarks.measure.blind`, those whose label has one of the texts if any is given, each for
`LASTS_S` seconds after its second step: the first rank of each alone, or with `--gang` all ranks. A line of OUT is
one layout, with what each stretch of `STRETCH_S` seconds or more, in whole steps, was: its begin in seconds from the
first step's end, seconds a step, and a GPU's mean clock in MHz and temperature in degC. Prints that, and at last the
means over layouts, of each figure relative to that of the last stretch. After S seconds no other layout begins.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.measure.blind import chosen, layout_of, parser_of, read, row_of, write
from benchmarks.measure.gang import Warm, first_alone, some_gangs, spread
from service.answers.tables import render
from service.problem import Problem
from service.result import TrialResult
from service.spec import load_spec
from service.trials.bench import Bench
from service.trials.evaluate import make_request
from service.trials.windows import Span, node_windows, summaries
from trainables.program import TrialRequest

LASTS_S = 9.0

STRETCH_S = 1.5

FIGURES = ("step_s", "clock_mhz", "temperature_c")


def course(bench: Bench, request: TrialRequest) -> list[dict[str, float]]:
    """What each stretch of a trial's steps was, on average over its GPUs. Raises SystemExit if it did not end well."""
    answer = bench.answer(request)
    if isinstance(answer, TrialResult):
        raise SystemExit(f"{request.layout.label}: {answer.status}: {answer.cause}")
    outcomes, members, _ = answer
    reports = [outcome.report for outcome in outcomes if outcome.report is not None]
    timings = [next(iter(report.timings.values())) for report in reports]
    steps = [*timings[0].warmup_steps_s[1:], *timings[0].window_steps_s]
    before_s = sum(timings[0].warmup_steps_s[1:])
    found = []
    for first, last in stretches(steps):
        begin_s, end_s = sum(steps[:first]), sum(steps[:last])
        spans = [
            Span(report.device, *(timing.start_ns + round(1e9 * (at - before_s)) for at in (begin_s, end_s)))
            for report, timing in zip(reports, timings, strict=True)
        ]
        (seen,) = summaries([node_windows(spans, members, bench.telemetry)], bench.telemetry)
        devices = seen.devices
        found.append(
            {
                "begin_s": begin_s,
                "step_s": (end_s - begin_s) / (last - first),
                "clock_mhz": statistics.fmean(device.mean_sm_clock_mhz or math.nan for device in devices),
                "temperature_c": statistics.fmean(device.mean_gpu_temp_c or math.nan for device in devices),
            }
        )
    return found


def stretches(steps: Sequence[float]) -> Iterator[tuple[int, int]]:
    """The first step and the one after the last of each; what is too short in the end is left out."""
    first = 0
    for last, end_s in enumerate(accumulate(steps), start=1):
        if end_s - sum(steps[:first]) >= STRETCH_S:
            yield first, last
            first = last


def request_of(bench: Bench, number: int, row: dict[str, Any], spec: Problem, alone: bool) -> TrialRequest:
    """A trial of `LASTS_S` seconds after the second step, of all ranks or of the first."""
    layout = layout_of(row)
    request = make_request(f"settling-{number}", layout, spec)
    procedure = replace(
        request.procedure, steady_steps=1, warmup_tolerance=1.0, window_s=LASTS_S, window_min_steps=1, breakdown=False
    )
    request = replace(request, procedure=procedure, batches=())
    return first_alone(bench, request) if alone else request


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The means over layouts, relative to the last stretch that all have."""
    count = min(len(row["course"]) for row in rows)
    lines = []
    for index in range(count):
        cells = [f"{statistics.fmean(row['course'][index]['begin_s'] for row in rows):.1f} s"]
        for figure in FIGURES:
            off = [row["course"][index][figure] / row["course"][count - 1][figure] - 1 for row in rows]
            cells.append(f"{statistics.fmean(off):+.2%}")
        lines.append(cells)
    return render(["from", *FIGURES], lines)


def _told(row: dict[str, Any]) -> str:
    return "; ".join(
        f"{one['begin_s']:.1f} s: {one['step_s']:.4f} s, {one['clock_mhz']:.0f} MHz, {one['temperature_c']:.0f} degC"
        for one in row["course"]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gang", action="store_true", help="all ranks of each")
    given = parser.parse_args(argv)
    rows = chosen(parser, given)
    specs = {path: load_spec(Path(path)).located() for path in dict.fromkeys(row["spec"] for row in rows)}
    until, cluster = time.monotonic() + given.seconds, specs[rows[0]["spec"]].cluster
    size = cluster.size if given.gang else 1

    def one(number: int, row: dict[str, Any], warm: Warm) -> dict[str, Any] | None:
        if time.monotonic() > until:
            return None
        bench = warm.bench(specs[row["spec"]])
        request = request_of(bench, number, row, specs[row["spec"]], alone=not given.gang)
        return row_of(row["spec"], layout_of(row)) | {"course": course(bench, request)}

    with some_gangs(cluster, size, [layout_of(row) for row in rows], most=cluster.size // size) as gangs:
        found = spread(gangs, [partial(one, number, row) for number, row in enumerate(rows)])
        write(given.out, (row for row in found if row is not None), _told)
    print(table(read(given.out)))


if __name__ == "__main__":
    main()
