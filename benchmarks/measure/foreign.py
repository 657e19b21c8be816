"""Wattune's own training as a program of the user's, beside itself.

    python -m benchmarks.measure.foreign SPEC --out FILE.jsonl [--rounds 3]

Every legal layout of the spec is trained built-in and by the command `python -m trainables.launch`, which runs the same
code outside Wattune and tells of its steps by the hook: in rounds, in one gang, in an order drawn anew for each round.
Each line of the output file is one trial. Printed is what the command's figures are of the built-in ones, by round and
of the means.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import IO

from benchmarks.measure.gang import one_gang, require_ok
from search_spaces.layout import Layout
from search_spaces.trainer import Trainer
from service.problem import Problem
from service.spec import load_spec
from trainables.launch import Launch
from trainables.training import Training

METRICS = ("tokens_per_s", "joules_per_token")
ENDLESS = 10**9
FORMS = ("built-in", "command")

Rounds = dict[tuple[str, str], list[dict[str, float]]]
"""The metrics of each round, by a layout's label and its form."""


def as_command(spec: Problem, layout: Layout) -> Problem:
    """The spec with a trainer that trains the layout by `trainables.launch`."""
    assert spec.data is not None
    training = Training(spec.workload.shape, spec.data, spec.sequence_length, spec.seed)
    launch = Launch(layout, training, spec.cluster.accelerator, spec.cluster.gpus_per_node)
    trainer = Trainer(
        name="launch",
        command=("python", "-m", "trainables.launch", "{trial_dir}/run.json", "--steps", str(ENDLESS)),
        files=(("run.json", json.dumps(launch.to_dict())),),  # which is YAML too
    )
    return replace(spec, trainer=trainer)


def measured(spec: Problem, rounds: int, out: IO[str]) -> Rounds:
    """Run all rounds. Raises SystemExit where a trial does not end well."""
    rng, found = random.Random(spec.seed), Rounds()
    with one_gang(spec, spec.gang_size) as run:
        for number in range(rounds):
            order = [(layout, form) for layout in spec.legal.layouts for form in FORMS]
            rng.shuffle(order)
            for layout, form in order:
                problem = spec if form == "built-in" else as_command(spec, layout)
                result = run(f"{number}-{form}-{layout.label}", layout, problem)
                out.write(json.dumps({"round": number, "form": form} | result.to_dict()) + "\n")
                out.flush()
                metrics = require_ok(result)
                print(f"round {number + 1}: {form:8} {layout.label}: {shown(metrics)}", flush=True)
                found.setdefault((layout.label, form), []).append(metrics)
    return found


def shown(metrics: dict[str, float]) -> str:
    return ", ".join(f"{metrics[name]:.6g} {name}" for name in METRICS if name in metrics)


def ratios(found: Rounds, label: str) -> list[str]:
    """A line for each metric: the command's figure by the built-in one."""
    lines = []
    for metric in METRICS:
        forms = [[each[metric] for each in found[label, form] if metric in each] for form in FORMS]
        if all(forms) and len(forms[0]) == len(forms[1]):
            each = ", ".join(f"{command / own - 1:+.2%}" for own, command in zip(*forms, strict=True))
            own, command = map(statistics.fmean, forms)
            lines.append(f"{label}: {metric}: {command / own - 1:+.3%} on average; by round {each}")
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--out", type=argparse.FileType("w"), required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    spec = load_spec(arguments.spec).located()
    found = measured(spec, arguments.rounds, arguments.out)
    for label in dict.fromkeys(label for label, _ in found):
        for line in ratios(found, label):
            print(line)


if __name__ == "__main__":
    main()
