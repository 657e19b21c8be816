"""Layouts that nobody has measured, foretold by slices or by the cost model first and measured on all their GPUs after.

    python -m benchmarks.measure.blind predict SPEC... --layouts N --seed SEED --out FILE.jsonl [--not-in TABLE.csv]
        [--seconds S]
    python -m benchmarks.measure.blind sliced FILE.jsonl --out SLICES.jsonl [--seconds S]
    python -m benchmarks.measure.blind calibrated SPEC... --layouts N --seed SEED --out FILE.jsonl
    python -m benchmarks.measure.blind foretell SPEC... --layouts N --seed SEED --out FILE.jsonl
    python -m benchmarks.measure.blind measure FILE.jsonl [--out MEASURED.jsonl] [--seconds S]
    python -m benchmarks.measure.blind tell FILE.jsonl[.xz] MEASURED.jsonl[.xz]...

`predict` draws N legal layouts of each spec, on several GPUs, spread over all axes, which a table of a sweep does not
have if one is named, and runs slices of each on the GPUs at hand, several at once where there are several. A line of
FILE is one layout: its spec, the result by slices, its seconds, and what the cost model foretells. `sliced` does so for
the layouts of a FILE. `calibrated` does what `wattune calibrate` does, for each spec, and writes what the cost model
foretells then, of layouts on any number of GPUs that are none of those it tried; also what it foretells by measured
operators without the fit to trials, and what it did before. `foretell` writes what the models say as they are, on any
machine. `measure` runs the same layouts by all their ranks, on as many GPUs, and prints every point, worst first: by
how much slices or the models were off, by how much the others, and which layouts wait for the CPU; then means and
largest errors by model and of all; then the same of the models, where slices foretold. `tell` prints that of what is
there; given SLICES.jsonl in place of what was measured, by how much the models were off these.

All specs must name the same cluster. Lines are written as they come. After S seconds no other layout begins; the same
command goes on with what is left. Of several specs one layout each comes in turn.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks import text_of
from benchmarks.judge.search import Table, of_any_batch
from benchmarks.measure.gang import RunTrial, sliced, some_gangs, spread
from benchmarks.measure.off import errors, over, percent, worst_first
from search_spaces.cost import predicted_metrics
from search_spaces.layout import AXES, Layout
from search_spaces.memory import estimate
from service.answers.tables import render
from service.calibrate import calibrate
from service.cluster import ray_session
from service.fitting import as_measured, expected
from service.fitting import load as load_calibration
from service.home import Home
from service.home import tracking_uri as store_uri
from service.metrics import heading
from service.problem import Problem
from service.record.results import Results
from service.result import TrialResult
from service.spec import load_spec

SHOWN = ("step_time_s", "mean_power_w", "joules_per_token", "peak_memory_gib")

IDLE = 0.1
"""Share of a step in which a GPU waits for a CPU, from which on that is told of its layout."""

MODELS = "cost model's s/step"
"""The heading of what the models foretold beside slices."""

Row = dict[str, Any]
"""A line of a file, with `spec` and `config`: of `predict` `slices`, `seconds` and `foretold`, of `calibrated`
`foretold`, what it was `by_operators` alone and `before`, of `foretell` `foretold`, of `measure` `full`."""


def draw(layouts: Sequence[Layout], count: int, seed: int) -> list[Layout]:
    """So many of some layouts, one after the other the one whose settings are the rarest among those drawn before."""
    left, drawn = list(layouts), list[Layout]()
    random.Random(seed).shuffle(left)
    seen: Counter[tuple[str, Any]] = Counter()
    while left and len(drawn) < count:
        rarest = max(left, key=lambda layout: sum(1 / (1 + seen[setting]) for setting in _settings(layout)))
        left.remove(rarest)
        drawn.append(rarest)
        seen.update(_settings(rarest))
    return drawn


def _settings(layout: Layout) -> list[tuple[str, Any]]:
    """A schedule says something of pipelines alone."""
    of_layout = [(name, getattr(layout, name)) for name in (*AXES, "data_parallel_size")]
    return [one for one in of_layout if one[0] != "pipeline_schedule" or layout.pipeline_parallel_size > 1]


def predict(
    specs: Mapping[str, Problem], known: Collection[Layout], layouts: int, seed: int, out: Path, until: float
) -> None:
    """Append a line to `out` for each layout that has none there yet. None is drawn that is `known`, at any batch."""
    rows = []
    for path, spec in specs.items():
        new = [one for one in spec.legal.layouts if one.num_gpus > 1 and of_any_batch(one) not in known]
        rows += [row_of(path, layout) for layout in draw(new, layouts, seed)]
    run_slices(specs, rows, out, until)


def run_slices(specs: Mapping[str, Problem], rows: Sequence[Row], out: Path, until: float) -> None:
    """Append a line to `out` for each of `rows` whose layout has none there yet."""
    if not (todo := left(rows, out)):
        return
    cluster = specs[todo[0]["spec"]].cluster
    with some_gangs(cluster, 1, [layout_of(row) for row in todo], most=cluster.size) as gangs:

        def one(number: int, row: Row, run: RunTrial) -> Row | None:
            if (began := time.monotonic()) > until:
                return None
            spec, layout = specs[row["spec"]], layout_of(row)
            result = run(f"slices-{number}", layout, sliced(spec))
            return row_of(row["spec"], layout) | {
                "slices": result.to_dict(),
                "seconds": time.monotonic() - began,
                "foretold": foretold(spec, layout),
            }

        found = spread(gangs, [partial(one, number, row) for number, row in enumerate(todo)])
        write(out, (row for row in found if row is not None), _step)


def left(rows: Iterable[Row], out: Path) -> list[Row]:
    """Those whose layout has no line in a file yet, of each spec one in turn."""
    done = {_key(row) for row in read(out)}
    by_spec = defaultdict[str, list[Row]](list)
    for row in rows:
        if _key(row) not in done:
            by_spec[row["spec"]].append(row)
    return [row for turn in zip_longest(*by_spec.values()) for row in turn if row is not None]


def foretold(spec: Problem, layout: Layout) -> dict[str, float]:
    """By the cost model as it is on this machine, calibrated or not, and by the memory model."""
    calibration = load_calibration(Home.locate(), spec.cluster)
    speed = {} if calibration is None else predicted_metrics(layout, spec.workload, calibration)
    return speed | {"peak_memory_gib": estimate(layout, spec.workload.run).peak_bytes / 2**30}


def predict_calibrated(specs: Mapping[str, Problem], layouts: int, seed: int, out: Path) -> None:
    """Append lines to `out` for each spec that has none there yet, once the cost model is calibrated to it."""
    done = {row["spec"] for row in read(out)}
    left = {path: spec for path, spec in specs.items() if path not in done}
    with ray_session(next(iter(specs.values())).cluster):
        rows = _calibrated(left, layouts, seed)
        write(
            out, rows, lambda row: f"{row['before']['step_time_s']:.4g} s, now {row['foretold']['step_time_s']:.4g} s"
        )


def _calibrated(specs: Mapping[str, Problem], layouts: int, seed: int) -> Iterator[Row]:
    """What is foretold of layouts that no calibration tried, one spec after the other."""
    for path, spec in specs.items():
        before = expected(spec.cluster)
        if before is None:
            raise SystemExit(f"{path}: there is no cost model of {spec.cluster.accelerator} to calibrate")
        came = calibrate(spec)
        tried = {trial.layout for trial in Results(store_uri(None)).search(came.search_id).trials}
        new = [layout for layout in spec.legal.layouts if layout not in tried]
        print(f"{path}: {came.trials} trials, in {came.took}")
        if (operators := came.operators) is not None:
            print(f"{operators.measured} of {operators.wanted} operators measured", *operators.left_out, sep="\n")
        alone = as_measured(before, Home.locate(), spec.cluster)
        for layout in draw(new, layouts, seed):
            yield row_of(path, layout) | {
                "foretold": foretold(spec, layout),
                "by_operators": predicted_metrics(layout, spec.workload, alone),
                "before": predicted_metrics(layout, spec.workload, before),
            }


def foretell(specs: Mapping[str, Problem], layouts: int, seed: int, out: Path) -> None:
    """Append lines to `out` for each spec that has none there yet, by the models as they are."""
    done = {row["spec"] for row in read(out)}
    rows = (
        row_of(path, layout) | {"foretold": foretold(spec, layout)}
        for path, spec in specs.items()
        if path not in done
        for layout in draw(spec.legal.layouts, layouts, seed)
    )
    write(out, rows, lambda row: f"{row['foretold']['peak_memory_gib']:.4g} GiB")


def measure(specs: Mapping[str, Problem], rows: Sequence[Row], out: Path, until: float) -> None:
    """Append a line to `out` for each of `rows` whose layout has none there yet."""
    if not (todo := left(rows, out)):
        return
    cluster = specs[todo[0]["spec"]].cluster
    with some_gangs(cluster, cluster.size, [layout_of(row) for row in todo], most=1) as (run,):
        write(out, _measured(run, specs, todo, until), _step)


def _measured(run: RunTrial, specs: Mapping[str, Problem], rows: Iterable[Row], until: float) -> Iterator[Row]:
    """Whole batches by whole gangs, and where the time of a step goes."""
    for number, row in enumerate(rows):
        if time.monotonic() > until:
            return
        spec = specs[row["spec"]]
        full = replace(spec.measurement, explore="gang", short_trials=False, breakdown=True)
        result = run(f"full-{number}", layout_of(row), replace(spec, measurement=full, borderline="risk"))
        yield row_of(row["spec"], layout_of(row)) | {"full": result.to_dict()}


def write(out: Path, rows: Iterable[Row], came: Callable[[Row], str]) -> None:
    """Append lines to a file as they come, and say what `came` of each."""
    with out.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{row['spec']}: {row['layout']}: {came(row)}", flush=True)


def _step(row: Row) -> str:
    result = row.get("full") or row["slices"]
    step_s = result["metrics"].get("step_time_s")
    took = f", told in {row['seconds']:.1f} s" if "seconds" in row else ""
    return f"{step_s:.4g} s a step{took}" if step_s else f"{result['status']}: {result['cause']}"


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in text_of(path).splitlines()] if path.exists() else []


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Of a command that runs layouts of a file such as these, with what `chosen` needs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[""], help="texts, of which a spec's path and a label have one")
    parser.add_argument("--seconds", type=float, default=400.0, help="after which no other layout begins")
    return parser


def chosen(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[Row]:
    """The lines of `given.file` that have one of the texts `given.only`. Ends the command if there are none."""
    rows = [row for row in read(given.file) if any(text in f"{row['spec']} {row['layout']}" for text in given.only)]
    if not rows:
        parser.error(f"{given.file} has no such layout")
    return rows


def row_of(spec: str, layout: Layout) -> Row:
    """What tells a line of a file from others."""
    return {"spec": spec, "layout": layout.label, "config": layout.to_dict()}


def layout_of(row: Row) -> Layout:
    return Layout.from_dict(row["config"])


def _key(row: Row) -> tuple[str, Layout]:
    return row["spec"], layout_of(row)


def points(foretold: Iterable[Row], measured: Iterable[Row]) -> list[Row]:
    """What was foretold and measured, by layout: `error`, as `benchmarks.measure.off.errors` has it, of slices or of
    the cost model where it was foretold by that, `beside` the same of what else was foretold, by its heading, and the
    share of a step that a GPU was `idle`. What slices found counts as measured where there is nothing else."""
    full = {_key(row): TrialResult.from_dict(row.get("full") or row["slices"]).metrics for row in measured}
    found = []
    for row in foretold:
        if (metrics := full.get(_key(row))) is not None:
            first, beside = _foretold(row)
            found.append(
                {name: row[name] for name in ("spec", "layout")}
                | {"error": errors(first, metrics)}
                | {"beside": {told: errors(figures, metrics) for told, figures in beside.items()}}
                | {"idle": waited_share(metrics, first)}
            )
    return found


def waited_share(metrics: Mapping[str, Any], foretold: Mapping[str, Any]) -> float | None:
    """Share of a step in which a GPU waits for a CPU, by what it does in the profiled one, of which only waits are
    longer: its own, or another rank's, for which it waits in a collective that would be over by what slices
    foretold."""
    span_s, idle_s, step_s = map(metrics.get, ("breakdown_span_s", "breakdown_idle_s", "step_time_s"))
    if not span_s or not step_s or idle_s is None:
        return None
    awaited_s = max(0.0, _exposed_s(metrics) - _exposed_s(foretold)) if "breakdown_span_s" in foretold else 0.0
    return float(1 - (span_s - idle_s - awaited_s) / step_s)


def _exposed_s(metrics: Mapping[str, Any]) -> float:
    """Seconds of a step in which a GPU does nothing but communicate, and not with other stages of a pipeline."""
    exposed = metrics.get("breakdown_exposed_communication_s", 0.0) - metrics.get("breakdown_exposed_send_recv_s", 0.0)
    return float(exposed)


def _foretold(row: Row) -> tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]:
    """The figures that are told first, and those beside them, by heading."""
    if "slices" in row:
        return row["slices"]["metrics"], {MODELS: row["foretold"]}
    if "before" not in row:
        return row["foretold"], {}
    if "by_operators" not in row:  # foretold by operators alone
        return row["foretold"], {"s/step without operators": row["before"]}
    return row["foretold"], {"s/step by operators alone": row["by_operators"], "before calibration": row["before"]}


def table(rows: Sequence[Row]) -> str:
    """Every point that has errors, worst first, then means and largest of each spec, and of all. All have the same
    headings `beside` them."""
    ok, lines = worst_first(rows), list[list[str]]()
    headings = list(ok[0]["beside"])
    for row in ok:
        waits = f"waits for the CPU: {row['idle']:.0%} idle" if (row["idle"] or 0.0) >= IDLE else ""
        cells = [percent(row["error"].get(name)) for name in SHOWN]
        cells += [percent(row["beside"][told].get("step_time_s")) for told in headings]
        lines.append([Path(row["spec"]).stem, row["layout"], *cells, waits])
    groups = {name: [row for row in ok if row["spec"] == name] for name in dict.fromkeys(row["spec"] for row in ok)}
    steady = [row for row in ok if (row["idle"] or 0.0) < IDLE]
    for name, group in (*groups.items(), ("all but those that wait for the CPU", steady), ("all", ok)):
        for title, of in (("mean", statistics.fmean), ("largest", max)):
            cells = over([row["error"] for row in group], of, SHOWN)
            for told in headings:
                cells += over([row["beside"][told] for row in group], of, ("step_time_s",))
            lines.append([Path(name).stem, f"{title} of {len(group)}", *cells, ""])
    return render(["model", "layout", *map(heading, SHOWN), *headings, ""], lines)


def failures(foretold: Iterable[Row], measured: Iterable[Row]) -> Iterator[str]:
    """A line for each layout that did not end well, by slices or in full."""
    for row in (*foretold, *measured):
        for how in ("slices", "full"):
            if (result := row.get(how)) is not None and result["status"] != "ok":
                yield f"{row['spec']}: {row['layout']}: {how}: {result['status']}: {result['cause']}"


def tell(rows: Sequence[Row], measured: Sequence[Row]) -> None:
    """Print every point, and why there is none; of slices also what the models foretold beside them."""
    found = points(rows, measured)
    by_models = [row | {"error": row["beside"][MODELS], "beside": {}} for row in found if MODELS in row["beside"]]
    if compared := [row for row in found if row["error"]]:
        print(table(compared))
    if compared := [row for row in by_models if row["error"]]:
        print("\nBy the models alone:\n")
        print(table(compared))
    for line in failures(rows, measured):
        print(line)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    halves = parser.add_subparsers(dest="half", required=True)
    first = halves.add_parser("predict")
    first.add_argument("specs", nargs="+", metavar="SPEC")
    first.add_argument("--layouts", type=int, required=True)
    first.add_argument("--seed", type=int, required=True)
    first.add_argument("--out", type=Path, required=True)
    first.add_argument("--not-in", type=Path, metavar="TABLE.csv")
    second = halves.add_parser("sliced")
    second.add_argument("file", type=Path)
    second.add_argument("--out", type=Path, required=True)
    third = halves.add_parser("measure")
    third.add_argument("file", type=Path)
    third.add_argument("--out", type=Path)
    for alone in (halves.add_parser("calibrated"), halves.add_parser("foretell")):
        alone.add_argument("specs", nargs="+", metavar="SPEC")
        alone.add_argument("--layouts", type=int, required=True)
        alone.add_argument("--seed", type=int, required=True)
        alone.add_argument("--out", type=Path, required=True)
    last = halves.add_parser("tell")
    last.add_argument("file", type=Path)
    last.add_argument("measured", type=Path, nargs="+")
    for half in (first, second, third):
        half.add_argument("--seconds", type=float, default=1e6)
    arguments = parser.parse_args(argv)
    if arguments.half == "tell":
        tell(read(arguments.file), [row for file in arguments.measured for row in read(file)])
        return
    if arguments.half in ("calibrated", "foretell"):
        specs = {path: load_spec(path).located() for path in arguments.specs}
        tell_of = predict_calibrated if arguments.half == "calibrated" else foretell
        tell_of(specs, arguments.layouts, arguments.seed, arguments.out)
        return
    until = time.monotonic() + arguments.seconds
    if arguments.half == "predict":
        specs = {path: load_spec(path).located() for path in arguments.specs}
        known = Table(arguments.not_in).results if arguments.not_in else {}
        predict(specs, {of_any_batch(one) for one in known}, arguments.layouts, arguments.seed, arguments.out, until)
        return
    rows = read(arguments.file)
    if not rows:
        parser.error(f"{arguments.file}: there are no lines")
    specs = {path: load_spec(path).located() for path in dict.fromkeys(row["spec"] for row in rows)}
    if arguments.half == "sliced":
        run_slices(specs, rows, arguments.out, until)
        return
    out = arguments.out or arguments.file.with_suffix(".measured.jsonl")
    measure(specs, rows, out, until)
    print()
    tell(rows, read(out))


if __name__ == "__main__":
    main()
