"""The cost model of `search_spaces.cost` against every committed measurement on H200, and against tables of layouts.

    python -m benchmarks.judge.cost [TABLE.csv ...]

A table is one of benchmarks/data, with `step_time_s` and `mean_power_w`, and beside it the spec of its sweep, of the
same name in YAML. Rows with context parallelism are of the `megatron` engine before it had attention in parts, and are
foretold as that (`megatron-flash-2`). Prints each measured layout with what the data sheet's coefficients foretell;
then, by engine, the mean and the largest error with these, and with coefficients fitted to a few of the measurements,
on the others. Of a table these few are the `design` of a random half of it, of the committed records a random draw: one
for each seed.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from benchmarks.judge.committed import as_it_ran, measurements
from benchmarks.judge.search import Table
from search_spaces.cost import Coefficients, data_sheet, predict
from search_spaces.layout import Layout
from search_spaces.workload import Workload
from service.answers.tables import render
from service.fitting import Observation, design, fit, ratios
from service.spec import load_spec

COUNT = 16
"""Measurements that coefficients are fitted to."""


def records() -> list[Observation]:
    """All committed measurements."""
    return [
        observation(as_it_ran(one.layout), one.work, one.result["metrics"])
        for one in measurements()
        if one.result["status"] == "ok"
    ]


def sweep(path: Path) -> list[Observation]:
    """The layouts of a table that ran, as they ran. Raises ValueError or OSError if it or its spec cannot be read."""
    work = load_spec(path.with_suffix(".yaml")).workload
    return [
        observation(replace(as_it_ran(result.layout), global_batch_size=work.global_batch_size), work, result.metrics)
        for result in Table(path).results.values()
        if result.status == "ok"
    ]


def observation(layout: Layout, work: Workload, metrics: Mapping[str, Any]) -> Observation:
    """By the figures of a trial, or of a row of a table."""
    total = metrics.get("mean_power_w")
    return Observation(layout, work, metrics["step_time_s"], None if total is None else total / layout.num_gpus)


def relative_errors(observed: Observation, coefficients: Coefficients) -> tuple[float, float | None]:
    """Of step time and of power, relative to what was measured."""
    slower, hotter = ratios(observed, coefficients)
    return slower - 1, None if hotter is None else hotter - 1


def table(measured: Sequence[Observation], coefficients: Coefficients) -> str:
    """One row a measurement."""
    rows = []
    for one in measured:
        model, prediction = one.work.shape, predict(one.layout, one.work, coefficients)
        slower, hotter = relative_errors(one, coefficients)
        parts = sorted(prediction.parts.items(), key=lambda part: -part[1])
        rows.append(
            [
                one.layout.label,
                f"{model.layers} x {model.hidden}" + (" moe" if model.num_experts else ""),
                str(one.layout.gradient_accumulation_steps),
                f"{one.step_time_s:.3f}",
                f"{prediction.step_time_s:.3f}",
                f"{slower:+.1%}",
                "" if one.power_w is None else f"{one.power_w:.0f}",
                f"{prediction.power_w:.0f}",
                "" if hotter is None else f"{hotter:+.1%}",
                ", ".join(f"{name} {seconds / prediction.step_time_s:.0%}" for name, seconds in parts[:4]),
            ]
        )
    headings = [
        "layout",
        "layers x width",
        "microbatches",
        "s",
        "predicted",
        "error",
        "W",
        "predicted",
        "error",
        "most",
    ]
    return render(headings, rows)


def summary(measured: Sequence[Observation], sheet: Coefficients, seeds: int, designed: bool) -> str:
    """Mean and largest errors by engine; layouts that spread experts, which no formula foretells, are left out."""
    known = [one for one in measured if one.layout.expert_parallel_size == 1]
    rows = _rows("data sheet", [(one, relative_errors(one, sheet)) for one in known])
    held_out = []
    worst = 0.0
    for seed in range(seeds):
        drawn = _drawn(known, sheet, random.Random(seed), designed)
        fitted = fit(drawn, sheet)
        others = [(one, relative_errors(one, fitted)) for one in known if one not in drawn]
        worst = max(worst, statistics.mean(abs(slower) for _, (slower, _) in others))
        held_out += others
    rows += _rows(f"fitted to {COUNT}", held_out)
    headings = ["coefficients", "engine", "points", "step time", "largest", "power", "largest"]
    pairs = [(predict(one.layout, one.work, sheet).step_time_s, one.step_time_s) for one in known]
    return (
        f"{render(headings, rows)}\nfitted: {seeds} seeds, mean error in step time of the worst: {worst:.1%}\n"
        f"data sheet: rank correlation of step times {spearmanr(*zip(*pairs, strict=True)).statistic:.2f}"
    )


def _drawn(
    known: Sequence[Observation], sheet: Coefficients, chance: random.Random, designed: bool
) -> list[Observation]:
    if not designed:
        return chance.sample(list(known), COUNT)
    half = chance.sample(list(known), len(known) // 2)
    chosen = design([one.layout for one in half], known[0].work, sheet, COUNT)
    return [one for one in half if one.layout in chosen]


def _rows(name: str, errors: Sequence[tuple[Observation, tuple[float, float | None]]]) -> list[list[str]]:
    rows = []
    for engine in ("megatron", "deepspeed", "both"):
        these = [error for one, error in errors if engine == "both" or one.layout.engine.startswith(engine)]
        if not these:
            continue
        slower, hotter = [abs(error) for error, _ in these], [abs(error) for _, error in these if error is not None]
        row = [name, engine, str(len(these)), f"{statistics.mean(slower):.1%}", f"{max(slower):.1%}"]
        rows.append(row + ([f"{statistics.mean(hotter):.1%}", f"{max(hotter):.1%}"] if hotter else ["", ""]))
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args(argv)
    sets = {"committed measurements": (records(), data_sheet("h200"))}
    for path in arguments.tables:
        try:
            sets[path.name] = sweep(path), data_sheet(load_spec(path.with_suffix(".yaml")).cluster.accelerator)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    for name, (measured, sheet) in sets.items():
        if sheet is None:
            parser.error(f"{name}: nothing is known of its accelerator")
        mean_errors = summary(measured, sheet, arguments.seeds, designed=name.endswith(".csv"))
        print(f"\n{name}\n\n{table(measured, sheet)}\n\n{mean_errors}")


if __name__ == "__main__":
    main()
