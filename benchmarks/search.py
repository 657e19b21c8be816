"""How many trials a sampler needs to find what an exhaustive sweep found.

    python -m benchmarks.search TABLE.csv... [--samplers tpe gp nsga2 random] [--seeds 20]

A table has one row for each layout that was really tried; benchmarks/data/README.md describes its columns. It stands in
for the cluster: each sampler asks for layouts of the table, one after the other, and is told their rows. Printed is the
median over the seeds of the trials and GPU-seconds until the trials so far reach 90, 95 and 99% of the hypervolume of
the whole table (with one objective, that share of the best value), and the share of launches that ran out of memory.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from optuna._hypervolume import compute_hypervolume

from search_spaces.config import TrialConfig
from service.study import SearchStudy
from trainables.result import TrialResult

OBJECTIVES = {"tokens_per_s": "maximize", "joules_per_token": "minimize", "throttle_ratio": "minimize"}
SHARES = (0.90, 0.95, 0.99)
SAMPLERS = ("random", "nsga2", "tpe", "gp")


class Table:
    """The rows of a sweep, as results by layout. Raises ValueError, which names the row, if it cannot be read."""

    def __init__(self, path: Path) -> None:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
        self.results: dict[TrialConfig, TrialResult] = {}
        self.gpu_seconds: dict[TrialConfig, float] = {}
        for number, row in enumerate(rows, start=1):
            try:
                layout, result, seconds = _parse(str(number), row)
            except (TypeError, ValueError, yaml.YAMLError) as error:
                raise ValueError(f"{path}: row {number}: {error}") from None
            if layout in self.results:
                raise ValueError(f"{path}: row {number}: the same layout as row {self.results[layout].trial_id}")
            self.results[layout], self.gpu_seconds[layout] = result, seconds
        good = [result for result in self.results.values() if result.status == "ok"]
        self.objectives = {}
        for name, direction in OBJECTIVES.items():
            values = [result.metrics.get(name) for result in good]
            if None in values and set(values) != {None}:
                raise ValueError(f"{path}: row {good[values.index(None)].trial_id}: no {name}, which other rows have")
            if len(set(values)) > 1:  # one that is the same for all decides nothing
                self.objectives[name] = direction
        if not self.objectives:
            raise ValueError(f"{path}: no objective differs between rows: give {', '.join(OBJECTIVES)}")
        losses = np.array([self._losses(result) for result in good])
        self.worst, self.best = losses.max(axis=0), losses.min(axis=0)
        self.full = self.reached(list(self.results))

    def reached(self, layouts: Sequence[TrialConfig]) -> float:
        """Hypervolume of layouts, each objective scaled to 1 over all that ran; with one, share of its best value."""
        losses = [self._losses(self.results[layout]) for layout in layouts if self.results[layout].status == "ok"]
        if not losses:
            return 0.0
        if len(self.objectives) == 1:
            lowest, best = min(loss[0] for loss in losses), self.best[0]
            return float(lowest / best if best < 0 else best / lowest)
        scaled = (np.array(losses) - self.best) / (self.worst - self.best)
        return float(compute_hypervolume(scaled, np.full(len(self.objectives), 1.1)))

    def _losses(self, result: TrialResult) -> list[float]:
        signs = {"maximize": -1.0, "minimize": 1.0}
        return [signs[direction] * float(result.metrics[name] or 0.0) for name, direction in self.objectives.items()]


def _parse(trial_id: str, row: Mapping[str, str]) -> tuple[TrialConfig, TrialResult, float]:
    values = {name: yaml.safe_load(cell) for name, cell in row.items() if cell not in ("", None)}
    axes = {field.name for field in dataclasses.fields(TrialConfig)}
    layout = TrialConfig.from_dict(
        {"engine": "megatron", "global_batch_size": 1} | {name: values.pop(name) for name in axes & set(values)}
    )
    status = values.pop("status", "ok")
    seconds = float(values.pop("gpu_seconds", layout.num_gpus))
    return layout, TrialResult(trial_id, layout, status, metrics=values), seconds


def trials_to_shares(table: Table, sampler: str, seed: int) -> dict[str, float]:
    """Trials and GPU-seconds until each of `SHARES`, and the share of the launches that ran out of memory."""
    study = SearchStudy("table", list(table.results), table.objectives, [], sampler, seed)
    tried: list[TrialConfig] = []
    spent, found = 0.0, dict[str, float]()
    for share in SHARES:
        while table.reached(tried) < share * table.full and (layout := study.ask()) is not None:
            study.tell(layout, table.results[layout])
            tried.append(layout)
            spent += table.gpu_seconds[layout]
        found |= {f"trials {share:.0%}": len(tried), f"GPU-s {share:.0%}": spent}
    ran_out = sum(table.results[layout].status == "oom" for layout in tried)
    return found | {"out of memory": ran_out / len(tried)}


def show(path: Path, samplers: Sequence[str], seeds: int) -> None:
    table = Table(path)
    statuses = [result.status for result in table.results.values()]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    print(
        f"\n{path.name}: {len(statuses)} layouts ({counts}), {' and '.join(table.objectives)}, medians of {seeds} seeds"
    )
    for number, sampler in enumerate(samplers):
        runs = [trials_to_shares(table, sampler, seed) for seed in range(seeds)]
        medians: dict[str, Any] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        if not number:
            print(f"{'sampler':8}" + "".join(f"{name:>14}" for name in medians))
        cells = (f"{value:>14.1%}" if name == "out of memory" else f"{value:>14.1f}" for name, value in medians.items())
        print(f"{sampler:8}" + "".join(cells), flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=SAMPLERS)
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args(argv)
    for path in arguments.tables:
        try:
            show(path, arguments.samplers, arguments.seeds)
        except (OSError, ValueError) as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
