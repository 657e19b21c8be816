"""How many launches of a trainer that Wattune has never seen run out of memory: searches of committed sweeps.

    python -m benchmarks.judge.unseen [--seeds 10] [--trials 30]

A table of benchmarks/data stands in for a trainer's program: its layouts have the name of no engine that is known, no
rule refuses one for its memory, and all that a search learns it learns from the rows that it asks for. What it begins
with is one of three:

- `model`: the trainer's spec names the model, so that estimates made for Wattune's own engines are what it begins with;
- `own axes`: so it does, but which framework trains, and ZeRO's stage and recomputation, on which memory depends most,
  are axes of the user's own, of which the estimates know nothing;
- `nothing`: of the model nothing is known, and nothing is predicted.

On the H200 of the tables hardly a layout runs out. So each is also replayed on GPUs of less memory, on which what
reserved more than torch can reserve there has run out: a little too much, since torch gives some back before it fails.

Printed are, for each, the share of the table's layouts that run out, that of the launches which do, over all seeds and
in the worst of them, and the share of the hypervolume of all that fits which the trials reach.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import DATA
from benchmarks.judge.search import Table
from search_spaces.coefficients import data_sheet
from search_spaces.expressions import Value
from search_spaces.layout import AXES, Layout
from search_spaces.memory import MemoryModel, usable_bytes
from search_spaces.trainer import Trainer
from service.answers.tables import render
from service.problem import Problem
from service.result import TrialResult
from service.sampling.study import SearchStudy
from service.sampling.warmup import predictions
from trainables.status import Status

NAME = "unseen"
TABLES = ("llama3_12l_4xh200.csv", "llama3_12l_2xh200.csv")
MEMORY_GIB = (None, 96.0, 80.0)
"""Of a GPU; None for the table's own."""

HIDDEN = {"engine": "framework", "zero_stage": "sharding", "recompute": "checkpointing"}
"""Axes, and the name that each has as one of the user's own."""

KNOWN = ("model", "own axes", "nothing")


@dataclass(frozen=True)
class Case:
    """What is replayed: the memory of a GPU in GiB, and which of `KNOWN` is known."""

    path: Path
    memory_gib: float | None
    known: str


@dataclass(frozen=True)
class Sweep:
    """A table as the layouts of a trainer: the problem of its search, and what became of each."""

    table: Table
    problem: Problem
    results: dict[Layout, TrialResult]
    tabled: dict[Layout, Layout]
    """By the trainer's layout, that of the table."""

    @property
    def out_of_memory(self) -> float:
        """Share of the layouts."""
        return statistics.fmean(one.status == Status.OOM for one in self.results.values())

    def reached(self, tried: Sequence[Layout]) -> float:
        """Share of the hypervolume of all that fits."""
        fitting = [self.tabled[layout] for layout, one in self.results.items() if one.status == Status.OK]
        found = [self.tabled[layout] for layout in tried if self.results[layout].status == Status.OK]
        return self.table.reached(found) / self.table.reached(fitting)


def sweep(case: Case) -> Sweep:
    """Raises ValueError if the table cannot be read."""
    table = Table(case.path)
    assert table.spec is not None, "each table has its spec beside it"
    hidden = HIDDEN if case.known == "own axes" else {}
    own: list[tuple[str, tuple[Value, ...] | None]] = [
        (name, tuple(sorted({getattr(layout, axis) for layout in table.results}))) for axis, name in hidden.items()
    ]
    trainer = Trainer(name=NAME, command=("train",), axes=tuple(own))
    cluster = replace(table.spec.cluster, memory_gib=case.memory_gib)
    problem = replace(table.spec, trainer=trainer, cluster=cluster)
    if case.known == "nothing":
        problem = replace(problem, model=None, shape=None)
    results, tabled = {}, {}
    for layout, result in table.results.items():
        named = unseen(layout, hidden)
        results[named], tabled[named] = on_gpus(problem, named, result), layout
    return Sweep(table, problem, results, tabled)


def unseen(layout: Layout, hidden: dict[str, str]) -> Layout:
    """A layout of the table as one of the trainer's. Engines differ in nothing that is known of it."""
    framework = layout.engine
    layout = replace(layout, engine=NAME, own=() if "engine" in hidden else (("framework", framework),))
    for axis, name in hidden.items():
        value = framework if axis == "engine" else getattr(layout, axis)
        layout = layout.having(name, value)
        if axis != "engine":
            layout = replace(layout, **{axis: AXES[axis].idle})
    return layout


def on_gpus(problem: Problem, layout: Layout, result: TrialResult) -> TrialResult:
    """What becomes of a layout on GPUs of the problem's memory, which is no more than the table's."""
    usable, peak = usable_bytes(problem.workload.accelerator), result.metrics.get("peak_memory_gib")
    assert usable is not None, "the tables are of GPUs whose memory is known"
    if result.status == Status.OK and peak is not None and peak * 2**30 > usable:
        return TrialResult(result.trial_id, layout, Status.OOM)
    return replace(result, layout=layout)


def search(sweep: Sweep, seed: int, trials: int) -> list[Layout]:
    """The layouts that a search asks for, in order. It knows what any search of the problem would."""
    problem, layouts = sweep.problem, list(sweep.results)
    coefficients = data_sheet(problem.cluster.accelerator)
    predicted: dict[Layout, dict[str, float]] = {}
    if problem.shape is not None and coefficients is not None:
        predicted = predictions(layouts, problem.workload, problem.cluster.as_stated(coefficients))
    memory, goals = MemoryModel(problem.workload), replace(problem.goals, objectives=sweep.table.objectives)
    study = SearchStudy("unseen", layouts, goals, "auto", seed, memory=memory, predicted=predicted)
    tried: list[Layout] = []
    while len(tried) < trials and (layout := study.ask()) is not None:
        study.tell(layout, sweep.results[layout])
        tried.append(layout)
    return tried


def row(case: Case, seeds: int, trials: int) -> list[str]:
    """A row of the table that is printed."""
    played = sweep(case)
    searches = [search(played, seed, trials) for seed in range(seeds)]
    failed = [statistics.fmean(played.results[one].status == Status.OOM for one in tried) for tried in searches]
    found = statistics.median(played.reached(tried) for tried in searches)
    gib = case.memory_gib or played.problem.cluster.device.memory_gib
    return [
        case.path.stem,
        f"{gib:.0f}",
        case.known,
        f"{len(played.results)}",
        f"{played.out_of_memory:.1%}",
        f"{statistics.fmean(failed):.1%}",
        f"{max(failed):.1%}",
        f"{found:.1%}",
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=30)
    given = parser.parse_args(argv)
    cases = [Case(DATA / name, gib, known) for name in TABLES for gib in MEMORY_GIB for known in KNOWN]
    headings = ["table", "GiB", "known", "layouts", "run out", "launches out", "worst seed", "found"]
    print(render(headings, [row(case, given.seeds, given.trials) for case in cases]))


if __name__ == "__main__":
    main()
