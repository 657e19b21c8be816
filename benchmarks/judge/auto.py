"""Whether `space: auto` has the layouts that others published, and how far these are behind the best that is foretold.

    python -m benchmarks.judge.auto [LAYOUTS.yaml] [--seconds]

By default of `benchmarks/data/published_h100.yaml`. Each layout is looked at twice, by the data sheet of H100:

- as Wattune trains it, in the space that a spec without `space` has: whether it is there, recomputing as much as was
  published or, where that does not fit, the least that is in the space; and by what share its step is longer than that
  of the best layout that is expected to fit, as `wattune plan` has it;
- as the program trains it that it was published of (`search_spaces.engines.others`), among the same axes with what that
  program offers (`OFFERED`) and what needs no more memory than it, as that ran: whether the cost model agrees with
  those who tried.

Below, the parts of all four steps, in seconds. With `--seconds` also how long `wattune plan` takes, as a command.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from search_spaces import memory
from search_spaces.coefficients import data_sheet
from search_spaces.cost import Prediction, predict
from search_spaces.layout import Layout
from search_spaces.space import Space, canonical, enumerate_space
from search_spaces.workload import Workload
from service.answers.tables import render
from service.problem import Problem
from service.spec import make_problem

LAYOUTS = Path(__file__).parents[1] / "data" / "published_h100.yaml"

ACCELERATOR, GPUS_PER_NODE = "h100", 8

MEGATRON: dict[str, list[Any]] = {"zero_stage": [1], "recompute": ["none", "full"]}
"""Its distributed optimizer is ZeRO-1; it recomputes whole blocks, or single modules, for which there is no word."""

OFFERED = {"megatron-lm": MEGATRON, "megatron-bridge": MEGATRON, "torchtitan": {"zero_stage": [3]}}
"""Program -> the values that it has of axes, where not all."""

RECOMPUTED = ("none", "selective", "full")


@dataclass(frozen=True)
class Rated:
    """A layout beside the best of a space: `behind` is the share by which its step is longer."""

    layout: Layout
    is_there: bool
    behind: float
    step: Prediction
    best: Layout
    best_step: Prediction


@dataclass(frozen=True)
class Published:
    """What others published: `settings` by the names of axes."""

    model: str
    gpus: int
    sequence_length: int
    global_batch_size: int
    program: str
    settings: Mapping[str, Any]
    source: str
    note: str

    @property
    def spec(self) -> dict[str, Any]:
        """The least that a spec says to have its space follow from the model and the cluster."""
        cluster = {"nodes": max(1, self.gpus // GPUS_PER_NODE), "gpus_per_node": min(self.gpus, GPUS_PER_NODE)}
        sizes = {"sequence_length": self.sequence_length, "global_batch_size": self.global_batch_size}
        return {"model": self.model, **sizes, "cluster": {**cluster, "accelerator": ACCELERATOR}}

    def layout(self, engine: str, work: Workload, recompute: str, compiled: bool = True) -> Layout:
        """The layout as one of `engine`, without settings that have no effect."""
        settings = {**self.settings, "recompute": recompute, "sequence_parallel": True, "compile": compiled}
        return canonical(Layout(engine, self.gpus, self.global_batch_size, **settings), _roomy(work))


def read(path: Path = LAYOUTS) -> list[Published]:
    """Raises OSError, ValueError, TypeError or `yaml.YAMLError` for what is no such file."""
    rows = []
    for fields in yaml.safe_load(path.read_text(encoding="utf-8")):
        lists = {name: tuple(value) for name, value in fields["settings"].items() if isinstance(value, list)}
        rows.append(Published(**{**fields, "settings": {**fields["settings"], **lists}}))
    return rows


def here(one: Published) -> Rated:
    """As Wattune trains it."""
    problem = make_problem(one.spec)
    wanted = one.settings.get("recompute", "none")
    tried = [wanted, *(each for each in RECOMPUTED if each != wanted)]
    modes = itertools.product(tried, (True, False))
    layouts = [one.layout("megatron", problem.workload, recompute, compiled) for recompute, compiled in modes]
    found = [layout for layout in layouts if layout in problem.legal.layouts]
    return _rated([*found, *layouts][0], problem.legal, problem.workload, 1.0)


def there(one: Published) -> Rated:
    """As its own program does."""
    problem = make_problem(one.spec)
    space = enumerate_space(_offered(problem, one.program), _roomy(problem.workload))
    layout = one.layout(one.program, problem.workload, one.settings.get("recompute", "none"))
    share = memory.estimate(layout, problem.workload).share
    return _rated(layout, space, problem.workload, max(1.0, share or 0.0))


def _offered(problem: Problem, program: str) -> dict[str, list[Any]]:
    return {**problem.axes, "engine": [program], **OFFERED[program]}


def _roomy(work: Workload) -> Workload:
    """The same where memory refuses nothing."""
    return replace(work, accelerator=replace(work.accelerator, memory_gib=None))


def _rated(layout: Layout, space: Space, work: Workload, room: float) -> Rated:
    """Beside those that need at most this share of a GPU's memory."""
    sheet = data_sheet(ACCELERATOR)
    assert sheet is not None
    fitting = [each for each in space.layouts if (memory.estimate(each, work).share or 0.0) <= room]
    steps = {each: predict(each, work, sheet) for each in fitting}
    best = min(steps, key=lambda each: steps[each].step_time_s)
    step = predict(layout, work, sheet)
    behind = step.step_time_s / steps[best].step_time_s - 1
    return Rated(layout, layout in space.layouts, behind, step, best, steps[best])


def seconds_of_plan(one: Published) -> float:
    """That `wattune plan` takes as a command, from its start to its end."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.yaml"
        spec.write_text(yaml.safe_dump(one.spec), encoding="utf-8")
        command = [sys.executable, "-c", "from service.cli import main; main()", "plan", str(spec)]
        began = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "WATTUNE_HOME": folder})
        return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="?", type=Path, default=LAYOUTS)
    parser.add_argument("--seconds", action="store_true", help="time `wattune plan` of each, too")
    args = parser.parse_args()
    try:
        published = read(args.layouts)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise SystemExit(f"{args.layouts}: {error}") from None
    rated = [(one, here(one), there(one)) for one in published]
    print(summary(rated, [f"{seconds_of_plan(one):.1f}" if args.seconds else "" for one in published]))
    for one, ours, its in rated:
        print(f"\n{parts(one, ours, its)}")


def summary(rated: Sequence[tuple[Published, Rated, Rated]], seconds: Sequence[str]) -> str:
    """One row a layout."""
    headings = ["model", "GPUs", "sequences", "of", "plan, s", "in the space", "here, as", "behind", "there, behind"]
    rows = [
        [
            *(one.model, str(one.gpus), str(one.global_batch_size), f"{one.program}, {one.note.split(',')[0]}", took),
            *("yes" if ours.is_there else "no", ours.layout.label, f"{ours.behind:+.1%}", f"{its.behind:+.1%}"),
        ]
        for (one, ours, its), took in zip(rated, seconds, strict=True)
    ]
    return render(headings, rows)


def parts(one: Published, ours: Rated, its: Rated) -> str:
    """Where the seconds of a layout's step go and those of the best, here and there."""
    steps = [ours.step, ours.best_step, its.step, its.best_step]
    names = [name for name in ours.step.parts if any(step.parts[name] >= 0.0005 for step in steps)]
    rows = [[name, *(f"{step.parts[name]:.3f}" for step in steps)] for name in names]
    rows.append(["s a step", *(f"{step.step_time_s:.3f}" for step in steps)])
    table = render([one.model, "published, here", "best, here", f"published, {one.program}", "best of it"], rows)
    lines = [f"{one.source} ({one.note})", f"best here: {ours.best.label}", f"best of it: {its.best.label}"]
    return "\n".join([table, *lines])


if __name__ == "__main__":
    main()
