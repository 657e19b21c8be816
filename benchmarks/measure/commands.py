"""How long a person waits for an answer: every command that reads, and `plan`, ten times each.

    python -m benchmarks.measure.commands

On a record of ten searches in a state directory of its own, each with the 15 trials of the search over Llama-3-8B of
which benchmarks/data has the record, and three more of its first two layouts as finalists. Wall and CPU time are those
of a process per command, from its start to its end; what the commands print is thrown away.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from benchmarks import DATA, ROOT
from service.home import Home
from service.record.tracking import Tracker
from service.result import Purpose, TrialResult
from service.spec import load_spec

SPEC = ROOT / "examples" / "llama3_8b_4xh200.yaml"
NODE = ROOT / "examples" / "llama3_8b_8xh200.yaml"
SEARCHES = 10
REPEATS = 3


def commands(search: str) -> list[list[str]]:
    """Whose time is taken."""
    reading = [[command, search] for command in ("status", "best", "pareto", "report", "why")]
    return [["--help"], ["list"], *reading, ["plan", str(SPEC)], ["plan", str(NODE)]]


def record(home: Home) -> str:
    """Fill the state directory; the id of its last search."""
    problem = load_spec(SPEC)
    tracker = Tracker(home.tracking_uri, home)
    told = json.loads((DATA / "llama3_8b_4xh200.json").read_text())["trials"]
    trials = [TrialResult.from_dict(values) for values in told]
    finalists = [replace(trial, purpose=Purpose.FINALIST) for trial in trials[:2] for _ in range(REPEATS)]
    for number in range(SEARCHES):
        search = f"{problem.name}-{number}"
        tracker.start_search(search, problem, {})
        for place, trial in enumerate([*trials, *finalists]):
            result = replace(trial, trial_id=f"{search}-{place}")
            tracker.start_trial(result.trial_id, result.layout, result.purpose)
            tracker.finish_trial(result)
        tracker.finish_search("finished", {})
    return search


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a command."""
    before, began = os.times(), time.monotonic()
    subprocess.run([sys.executable, "-m", "service.cli", *command], check=True, capture_output=True)
    wall, after = time.monotonic() - began, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlflow", "optuna", "pydantic", "numpy"))
    print(f"{os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}, {versions}")
    print(f"load average {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"WATTUNE_HOME": folder, "PYTHONPATH": str(ROOT)}
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        search = record(Home.locate())
        print(f"{'median of ' + str(runs):34}  {'wall s':>6}  {'(range)':>13}  {'CPU s':>6}")
        for command in commands(search):
            walls, cpus = zip(*(timed(command) for _ in range(runs)), strict=True)
            name = " ".join(Path(word).name for word in command)
            spread = f"({min(walls):.2f} - {max(walls):.2f})"
            print(
                f"{name:34}  {statistics.median(walls):6.2f}  {spread:>13}  {statistics.median(cpus):6.2f}", flush=True
            )


if __name__ == "__main__":
    main()
