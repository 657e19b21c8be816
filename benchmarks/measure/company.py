"""What the same kernels of a layout take on the same GPUs: in a rank alone, in ranks alone side by side, in a gang.

    python -m benchmarks.measure.company FILE.jsonl --out OUT.jsonl [--only TEXT...] [--seconds S]

Runs layouts of a file of `benchmarks.measure.blind`, those whose label has one of the texts if any is given, in whole
windows of the whole batch: the first rank alone while the other GPUs rest (`alone`), that rank on every GPU at once
(`beside`), all ranks (`gang`), and then the rank alone in both ways once more. Pipelines, whose ranks differ, are
refused. From `alone` to `beside` the host and its heat make a difference, and from there to `gang` that ranks meet. A
line of OUT is one rank in one way. Prints of each the seconds of its kernels in a profiled step, and what its GPU was
in the window; at last products and attention in a gang over those of the same GPU without. After S seconds no other
layout begins.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.measure.blind import Row, chosen, layout_of, parser_of, read, row_of, write
from benchmarks.measure.gang import Warm, first_alone, some_gangs, spread
from search_spaces.layout import Layout
from service.answers.tables import render
from service.problem import Problem
from service.result import RankRecord, TrialResult
from service.spec import load_spec
from service.trials.evaluate import make_request

ALONE, BESIDE, GANG = "alone", "beside", "gang"

KERNELS = ("matmul_s", "attention_s", "other_s", "exposed_communication_s", "idle_s")

STATE = ("mean_sm_clock_mhz", "mean_gpu_temp_c", "mean_power_w")


def of_gang(layout: Layout, result: TrialResult) -> Iterator[Row]:
    """A line for each rank of a trial. Raises SystemExit if it did not end well."""
    devices = {device.device: device for device in result.devices}
    for rank in _ranks(layout, result):
        device = devices.get(rank.device or "")
        yield _line(GANG, rank, result, {name: getattr(device, name, None) for name in STATE})


def of_rank_alone(trial_id: str, layout: Layout, problem: Problem, way: str, warm: Warm) -> Row:
    """The line of a layout's first rank, in a whole window of the whole batch. Raises SystemExit likewise."""
    bench = warm.bench(problem)
    one = bench.alone(first_alone(bench, make_request(trial_id, layout, problem)))
    if isinstance(one, TrialResult):
        raise SystemExit(f"{layout.label}: {one.status}: {one.cause}")
    (rank,) = _ranks(layout, one.whole)
    run = one.runs[0]
    return _line(way, rank, run, {name: run.metrics.get(name) for name in STATE})


def _ranks(layout: Layout, result: TrialResult) -> Sequence[RankRecord]:
    if result.status != "ok" or not result.ranks or any(rank.breakdown is None for rank in result.ranks):
        raise SystemExit(f"{layout.label}: {result.status}: {result.cause or 'no breakdown, of which all of this is'}")
    return result.ranks


def _line(way: str, rank: RankRecord, of: TrialResult, state: Mapping[str, float | None]) -> Row:
    seconds = {name: getattr(rank.breakdown, name) for name in KERNELS}
    place = {"way": way, "device": rank.device or f"rank {rank.rank}", "step_s": of.metrics["step_time_s"]}
    return place | seconds | dict(state)


def ranks_alone(gangs: Sequence[Warm], when: str, layout: Layout, problem: Problem) -> Iterator[Row]:
    """The first rank on one GPU, and then on all at once."""
    yield of_rank_alone(f"{when}-{ALONE}", layout, problem, ALONE, gangs[0])
    jobs = [partial(of_rank_alone, f"{when}-{BESIDE}-{place}", layout, problem, BESIDE) for place in range(len(gangs))]
    yield from spread(gangs, jobs)


def measured(specs: Mapping[str, Problem], rows: Sequence[Row], until: float) -> Iterator[Row]:
    cluster, layouts = specs[rows[0]["spec"]].cluster, [layout_of(row) for row in rows]
    for when in ("before", GANG, "after"):
        size = cluster.size if when == GANG else 1
        with some_gangs(cluster, size, layouts, most=cluster.size // size) as gangs:
            for number, (row, layout) in enumerate(zip(rows, layouts, strict=True)):
                if time.monotonic() > until:
                    return
                problem, trial = specs[row["spec"]], f"{when}-{number}"
                if when == GANG:
                    found = of_gang(layout, gangs[0](trial, layout, problem))
                else:
                    found = ranks_alone(gangs, trial, layout, problem)
                yield from (row_of(row["spec"], layout) | one for one in found)


def table(rows: Sequence[Row]) -> str:
    """By layout and GPU, in the order in which they were measured."""
    order = sorted(rows, key=lambda row: (row["spec"], row["layout"], row["device"]))
    lines = [
        [row["layout"], row["device"][-6:], row["way"], f"{row['step_s']:.4g}"]
        + [f"{row[name]:.4f}" for name in KERNELS]
        + ["" if row[name] is None else f"{row[name]:.0f}" for name in STATE]
        for row in order
    ]
    heads = ["layout", "GPU", "way", "step s", "products", "attention", "other", "exposed", "idle", "MHz", "degC", "W"]
    return render(heads, lines)


def longer(rows: Sequence[Row]) -> dict[tuple[str, str, str], float]:
    """By spec, layout and GPU, what products and attention take in a gang over what they take without one, less 1."""
    seconds: dict[tuple[str, str, str], dict[bool, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        ways = seconds[row["spec"], row["layout"], row["device"]]
        ways[row["way"] == GANG].append(row["matmul_s"] + row["attention_s"])
    return {
        place: statistics.fmean(ways[True]) / statistics.fmean(ways[False]) - 1
        for place, ways in seconds.items()
        if len(ways) == 2
    }


def _told(row: Row) -> str:
    return f"{row['way']}, {row['device'][-6:]}: {row['step_s']:.4g} s"


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    given = parser.parse_args(argv)
    rows = chosen(parser, given)
    if pipelines := [row["layout"] for row in rows if layout_of(row).pipeline_parallel_size > 1]:
        parser.error(f"ranks of a pipeline differ: leave out {pipelines[0]}")
    specs = {path: load_spec(Path(path)).located() for path in dict.fromkeys(row["spec"] for row in rows)}
    write(given.out, measured(specs, rows, time.monotonic() + given.seconds), _told)
    found = read(given.out)
    print()
    print(table(found))
    for (spec, layout, device), share in longer(found).items():
        print(f"{Path(spec).stem}: {layout}, {device[-6:]}: products and attention take {share:+.1%} in a gang")


if __name__ == "__main__":
    main()
