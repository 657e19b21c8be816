"""How far predictions are off with and without what the doctor found GPUs to attain in products.

    python -m benchmarks.judge.examined TFLOPS MEASURED.jsonl[.xz] [TFLOPS MEASURED ...]

In pairs, what `wattune doctor` found of the slowest GPU before, and a file of `benchmarks.measure.blind measure`.
Prints of each file the mean error of step time by the data sheet alone, with its sign and without, and the same once a
FLOP costs what such a GPU needs for it (`search_spaces.coefficients.Coefficients.examined`), with that of power then,
of layouts that do not wait for the CPU; then of all, and of DeepSpeed's mixtures. What is usual is that of these GPUs
themselves; of DeepSpeed's mixtures, what counts tokens was fitted to them (`search_spaces.cost.STILL`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure.blind import IDLE, Row, layout_of, read, waited_share
from benchmarks.measure.off import errors
from search_spaces.cost import predicted_metrics
from search_spaces.hardware import ACCELERATORS
from service.answers.tables import render
from service.fitting import expected
from service.spec import load_spec


@dataclass(frozen=True)
class Point:
    """A layout, a mixture of DeepSpeed's or not: what is predicted over what was measured, less 1, of step time by the
    data sheet and with what was examined, and of `power` with that."""

    is_deepspeed_mixture: bool
    plain: float
    examined: float
    power: float


def points(rows: Sequence[Row], flops: float) -> Iterator[Point]:
    problems = {path: load_spec(path).located() for path in dict.fromkeys(row["spec"] for row in rows)}
    for row in rows:
        problem, measured = problems[row["spec"]], row["full"]["metrics"]
        sheet, usual = expected(problem.cluster), ACCELERATORS[problem.cluster.accelerator].examined_flops
        if not measured.get("step_time_s") or (waited_share(measured, {}) or 0.0) >= IDLE:
            continue
        if sheet is None or usual is None:
            raise SystemExit(f"{row['spec']}: it is not known what GPUs of its kind attain usually")
        layout = layout_of(row)
        plain, examined = (
            errors(predicted_metrics(layout, problem.workload, coefficients), measured)
            for coefficients in (sheet, sheet.examined(flops, usual))
        )
        is_mixture = layout.engine == "deepspeed" and problem.workload.shape.num_experts > 0
        yield Point(is_mixture, plain["step_time_s"], examined["step_time_s"], examined["mean_power_w"])


def table(found: dict[str, tuple[float, list[Point]]]) -> str:
    lines = []
    every = [point for _, of_file in found.values() for point in of_file]
    mixtures = [point for point in every if point.is_deepspeed_mixture]
    groups = {**found, "all": (0.0, every), "DeepSpeed's mixtures": (0.0, mixtures)}
    for name, (flops, group) in groups.items():
        if not group:
            continue
        line = [name, f"{flops / 1e12:,.0f}" if flops else "", str(len(group))]
        for off in ([one.plain for one in group], [one.examined for one in group], [one.power for one in group]):
            line += [f"{statistics.fmean(off):+.1%}", f"{statistics.fmean(map(abs, off)):.1%}"]
            line.append(f"{max(map(abs, off)):.1%}")
        lines.append(line)
    columns = ("mean", "mean error", "largest")
    headings = [f"{what}: {column}" for what in ("data sheet", "as examined", "power") for column in columns]
    return render(["run", "TFLOP/s", "layouts", *headings], lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="+", metavar="TFLOPS MEASURED")
    given = parser.parse_args(argv).given
    if len(given) % 2:
        parser.error("figures and files come in pairs")
    found = {}
    for tflops, file in zip(given[::2], given[1::2], strict=True):
        try:
            flops = 1e12 * float(tflops)
        except ValueError:
            parser.error(f"{tflops} is no number of TFLOP/s")
        rows = [row for row in read(Path(file)) if "full" in row]
        found[Path(file).name.split(".")[0]] = (flops, list(points(rows, flops)))
    if not all(of_file for _, of_file in found.values()):
        parser.error("a file has no measured layout that does not wait for the CPU")
    print(table(found))


if __name__ == "__main__":
    main()
