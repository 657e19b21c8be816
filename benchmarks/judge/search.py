"""How many trials a sampler needs to find what an exhaustive sweep found.

    python -m benchmarks.judge.search TABLE.csv... [--samplers auto gp tpe nsga2 random] [--seeds 20] [--blind]

A table has one row for each layout that was really tried; benchmarks/data/README.md describes its columns. It stands in
for the cluster: each sampler asks for layouts of the table, one after the other, and is told their rows. `random` draws
from the rows that ended well alone. A spec beside the table, TABLE.yaml, gives the others what a search knows before
its first trial, the cost model's predictions by the accelerator's data sheet and the memory model; `--blind` takes it
away.

Printed is the median over the seeds of the trials and GPU-seconds until the trials so far reach 90, 95 and 99% of the
hypervolume of the whole table; how many times as many trials `random` needs to 95%; and the share of all launches that
ran out of memory. Hypervolumes are up to a reference 10% beyond the worst value of each objective in the table, of the
range from best to worst. With one objective, it is the share of the best value that counts.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from benchmarks.judge.committed import as_it_ran
from search_spaces.cost import data_sheet
from search_spaces.layout import Layout
from search_spaces.memory import MemoryModel
from service.errors import InputError
from service.goals import Goals
from service.metrics import DIRECTIONS, Direction
from service.pareto import REFERENCE, hypervolume, pareto_front, scaled
from service.problem import Problem
from service.result import TrialResult
from service.sampling.study import SearchStudy
from service.sampling.warmup import first_points, predictions
from service.spec import load_spec
from trainables.status import Status

OBJECTIVES = {name: DIRECTIONS[name] for name in ("tokens_per_s", "joules_per_token", "throttle_ratio")}
ALONE = {name: DIRECTIONS[name] for name in ("tokens_per_s_per_gpu", "mfu", "step_time_s")}
"""Measures of speed, of which the first is the objective of a table that has none of `OBJECTIVES`."""

SHARES = (0.90, 0.95, 0.99)
SAMPLERS = ("random", "nsga2", "tpe", "gp", "auto")


class Table:
    """The rows of a sweep, as results by layout, and the spec beside it, if there is one.

    Raises ValueError, which names the row, if it cannot be read.
    """

    def __init__(self, path: Path, blind: bool = False, among: Collection[Layout] | None = None) -> None:
        """`blind`: without the spec. `among`: of these layouts alone, whatever their global batch."""
        beside = path.with_suffix(".yaml")
        self.spec = load_spec(beside) if beside.exists() and not blind else None
        with path.open(newline="") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
        self.results: dict[Layout, TrialResult] = {}
        self.gpu_seconds: dict[Layout, float] = {}
        for number, row in enumerate(rows, start=1):
            try:
                layout, result, seconds = _parse(str(number), row, self.spec)
            except (TypeError, ValueError, yaml.YAMLError) as error:
                raise ValueError(f"{path}: row {number}: {error}") from None
            if among is not None and of_any_batch(layout) not in among:
                continue
            if layout in self.results:
                raise ValueError(f"{path}: row {number}: the same layout as row {self.results[layout].trial_id}")
            self.results[layout], self.gpu_seconds[layout] = result, seconds
        if not self.results and among is not None:
            raise ValueError(f"{path}: no row of the table is among the layouts asked for")
        self.good = [layout for layout, result in self.results.items() if result.status == Status.OK]
        self.objectives: dict[str, Direction] = {}
        for name, way in (OBJECTIVES | ALONE).items():
            values = [self.results[layout].metrics.get(name) for layout in self.good]
            if set(values) == {None} or (name in ALONE and self.objectives):
                continue
            if None in values:
                lacking = self.results[self.good[values.index(None)]].trial_id
                raise ValueError(f"{path}: row {lacking}: no {name}, which other rows have")
            if len(set(values)) > 1:  # one that is the same for all decides nothing
                self.objectives[name] = way
        if not self.objectives:
            raise ValueError(f"{path}: no objective differs between rows: give {', '.join(OBJECTIVES | ALONE)}")
        places = scaled(self._costs(self.good))
        self.front = [self.good[i] for i in pareto_front(places)]
        self.places = dict(zip(self.good, places, strict=True))
        self.full = self.reached(self.good)

    def reached(self, layouts: Sequence[Layout]) -> float:
        """Hypervolume of layouts, each objective scaled to 1 over all that ran; with one, share of its best value."""
        good = [layout for layout in layouts if layout in self.places]
        if not good:
            return 0.0
        if len(self.objectives) == 1:
            lowest, best = self._costs(good).min(), self._costs(self.good).min()
            return float(lowest / best if best < 0 else best / lowest)
        return hypervolume(np.array([self.places[layout] for layout in good]), np.full(len(self.objectives), REFERENCE))

    def study(self, sampler: str, seed: int) -> SearchStudy:
        """A study of the table's layouts."""
        if sampler == "random":
            return SearchStudy("table", self.good, Goals(self.objectives), sampler, seed)
        layouts = list(self.results)
        if self.spec is None:
            return SearchStudy("table", layouts, Goals(self.objectives), sampler, seed)
        memory, predicted = MemoryModel(self.spec.workload), self.predicted()
        first = first_points([], {} if sampler == "auto" else predicted, self.objectives, memory)
        return SearchStudy(
            "table", layouts, Goals(self.objectives), sampler, seed, first=first, memory=memory, predicted=predicted
        )

    def predicted(self) -> dict[Layout, dict[str, float]]:
        """Metrics by the cost model, of layouts of which it knows the machine."""
        coefficients = data_sheet(self.spec.cluster.accelerator) if self.spec else None
        if self.spec is None or coefficients is None:
            return {}
        ran = {as_it_ran(layout): layout for layout in self.results}
        return {ran[layout]: metrics for layout, metrics in predictions(ran, self.spec.workload, coefficients).items()}

    def _costs(self, layouts: Sequence[Layout]) -> np.ndarray:
        return np.array(
            [
                [way.cost(float(self.results[layout].metrics[name] or 0.0)) for name, way in self.objectives.items()]
                for layout in layouts
            ]
        )


def _parse(trial_id: str, row: Mapping[str, str], spec: Problem | None) -> tuple[Layout, TrialResult, float]:
    values = {name: yaml.safe_load(cell) for name, cell in row.items() if cell not in ("", None)}
    axes = {field.name for field in dataclasses.fields(Layout)}
    layout = Layout.from_dict(
        {"engine": "megatron", "global_batch_size": spec.global_batch_size if spec else 1}
        | {name: values.pop(name) for name in axes & set(values)}
    )
    status = Status(values.pop("status", Status.OK))
    seconds = float(values.pop("gpu_seconds", layout.num_gpus))
    return layout, TrialResult(trial_id, layout, status, metrics=values), seconds


@dataclasses.dataclass(frozen=True)
class Effort:
    """What one search took: trials and GPU-seconds until each of `SHARES`, and launches that ran out of memory."""

    trials: list[int]
    gpu_seconds: list[float]
    out_of_memory: int


@dataclasses.dataclass(frozen=True)
class Launch:
    """A trial of a search that is replayed. Only what was run in full counts as found."""

    layout: Layout
    gpu_seconds: float
    full: bool = True


def effort(table: Table, launches: Iterator[Launch]) -> Effort:
    """What a search takes of a table that makes these trials; of those in full it counts how many and which fail."""
    tried: list[Layout] = []
    spent_s = 0.0
    trials, spent = [], []
    for share in SHARES:
        while table.reached(tried) < share * table.full and (launch := next(launches, None)) is not None:
            spent_s += launch.gpu_seconds
            if launch.full:
                tried.append(launch.layout)
        trials.append(len(tried))
        spent.append(spent_s)
    return Effort(trials, spent, sum(table.results[layout].status == Status.OOM for layout in tried))


def replay(table: Table, sampler: str, seed: int) -> Effort:
    return effort(table, by_gang(table, sampler, seed))


def by_gang(table: Table, sampler: str, seed: int) -> Iterator[Launch]:
    """Every trial by all ranks of its layout."""
    study = table.study(sampler, seed)
    while (layout := study.ask()) is not None:
        study.tell(layout, table.results[layout])
        yield Launch(layout, table.gpu_seconds[layout])


def medians(efforts: Sequence[Effort]) -> tuple[list[float], list[float]]:
    """Of the trials and of the GPU-seconds to each of `SHARES`."""
    return (
        [statistics.median(counts) for counts in zip(*(effort.trials for effort in efforts), strict=True)],
        [statistics.median(spent) for spent in zip(*(effort.gpu_seconds for effort in efforts), strict=True)],
    )


def of_any_batch(layout: Layout) -> Layout:
    """The layout whatever its global batch: a table without a spec beside it does not tell that."""
    return dataclasses.replace(layout, global_batch_size=0)


def comparison(table: Table, name: str, samplers: Sequence[str], seeds: int) -> Iterator[str]:
    """Lines that say how the samplers fare on a table."""
    statuses = [result.status for result in table.results.values()]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    yield (
        f"{name}: {len(statuses)} layouts ({counts}), {len(table.front)} on the front of "
        f"{' and '.join(table.objectives)}; medians of {seeds} seeds"
    )
    for metric, error in _errors(table).items():
        yield f"{metric} is predicted with a mean error of {error:.1%}"
    heads = [f"{what} {share:.0%}" for what in ("trials", "GPU-s") for share in SHARES]
    yield f"{'sampler':8}" + "".join(f"{head:>12}" for head in [*heads, "random 95%", "oom"])
    among_random: float | None = None
    for sampler in sorted(samplers, key=lambda name: name != "random"):
        efforts = [replay(table, sampler, seed) for seed in range(seeds)]
        trials, spent = medians(efforts)
        among_random = trials[1] if sampler == "random" else among_random
        ratio = f"{among_random / trials[1]:.1f}x" if among_random else "-"
        launches, failed = sum(effort.trials[-1] for effort in efforts), sum(effort.out_of_memory for effort in efforts)
        cells = [f"{value:.1f}" for value in trials] + [f"{value:.0f}" for value in spent]
        yield f"{sampler:8}" + "".join(f"{cell:>12}" for cell in [*cells, ratio, f"{failed / launches:.1%}"])


def _errors(table: Table) -> dict[str, float]:
    """Mean relative error of what is predicted of each objective."""
    predicted = table.predicted()
    return {
        name: statistics.mean(
            abs(predicted[row][name] / float(table.results[row].metrics[name] or 0.0) - 1) for row in table.good
        )
        for name in table.objectives
        if predicted and name in predicted[table.good[0]]
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=SAMPLERS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--blind", action="store_true")
    arguments = parser.parse_args(argv)
    for path in arguments.tables:
        try:
            for line in comparison(Table(path, arguments.blind), path.name, arguments.samplers, arguments.seeds):
                print(line, flush=True)
            print()
        except (OSError, ValueError, InputError) as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
