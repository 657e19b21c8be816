"""Run every legal layout of some specs, one after the other, in one gang, and print what each reaches.

    python -m benchmarks.measure.layouts SPEC... --out FILE.jsonl [--repeat 10]

All specs must name the same cluster. Each line of the output file is one trial: the spec's name and the whole result,
with its losses, step times, ranks and breakdowns. With `--repeat`, every layout runs that often in a row, and the
differences within the pairs of neighbouring runs are printed: how well a figure can be had again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import IO, Any

from benchmarks.measure.gang import one_gang
from search_spaces.layout import Layout
from service.problem import Problem
from service.result import TrialResult
from service.spec import load_spec

COLUMNS = {
    "tokens_per_s_per_gpu": ("tok/s/GPU", ".1f"),
    "mfu": ("MFU", ".3f"),
    "joules_per_token": ("J/token", ".4f"),
    "mean_power_w": ("W", ".0f"),
    "peak_gpu_temp_c": ("GPU degC", ".0f"),
    "peak_hbm_temp_c": ("HBM degC", ".0f"),
    "throttle_ratio": ("thermal", ".3f"),
    "power_cap_ratio": ("cap", ".2f"),
    "peak_memory_gib": ("GiB", ".1f"),
    "trial_overhead_s": ("overhead s", ".1f"),
}
REPEATED = ("tokens_per_s_per_gpu", "joules_per_token")


def run_all(specs: list[Problem], repeat: int, out: IO[str]) -> list[list[TrialResult]]:
    """The results of each layout's runs, of those that failed as well."""
    results: list[list[TrialResult]] = []
    with one_gang(specs[0], max(spec.gang_size for spec in specs)) as run:
        for spec in specs:
            print(f"\n{spec.name}: {spec.workload.shape.layers} layers, global batch {spec.global_batch_size}")
            print(f"{'layout':66}" + "".join(f"{title:>12}" for title, _ in COLUMNS.values()), flush=True)
            for layout in spec.legal.layouts:
                results.append([])
                for number in range(repeat):
                    result = run(f"{spec.name}-{len(results)}-{number}", layout, spec)
                    results[-1].append(result)
                    out.write(json.dumps({"spec": spec.name} | result.to_dict()) + "\n")
                    out.flush()
                    print(row(layout, result), flush=True)
    return results


def row(layout: Layout, result: TrialResult) -> str:
    if result.status != "ok":
        return f"{layout.label:66}  {result.status}: {(result.cause or '')[:120]}"
    cells = [(result.metrics.get(name), form) for name, (_, form) in COLUMNS.items()]
    return f"{layout.label:66}" + "".join(
        f"{'-' if value is None else format(value, form):>12}" for value, form in cells
    )


def differences(runs: list[TrialResult]) -> list[str]:
    """How far two runs are apart, by metric: first and second, third and fourth, ... of those that ended well."""
    lines = []
    for metric in REPEATED:
        values: list[Any] = [run.metrics.get(metric) for run in runs if run.status == "ok"]
        pairs = zip(values[::2], values[1::2], strict=False)
        apart = [abs(a - b) / a for a, b in pairs if a and b]
        if apart:
            each = " ".join(f"{100 * value:.2f}" for value in apart)
            lines.append(f"{metric} differs by {each} %, median {100 * statistics.median(apart):.2f} %")
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="+", type=Path)
    parser.add_argument("--out", type=argparse.FileType("w"), required=True)
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args(argv)
    specs = [load_spec(path).located() for path in arguments.specs]
    if any(spec.cluster != specs[0].cluster for spec in specs):
        parser.error("the specs must name the same cluster")
    for runs in run_all(specs, arguments.repeat, arguments.out):
        for line in differences(runs):
            print(f"{runs[0].layout.label}: {line}")


if __name__ == "__main__":
    main()
