"""Many trials in one search, and many searches in one record: does the driver grow, and how long do answers take?

    python -m benchmarks.measure.many [--trials 500] [--searches 200]

Runs one search of so many trials of a tiny model in a state directory of its own, and notes the driver's memory, the
time, and the CPU time that the driver had at the end of each, as other processes may have the cores as well. Then asks
for its best layout, writes records of further searches, and asks for their list.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

from service.home import Home
from service.record.tracking import Tracker
from service.result import TrialResult
from service.spec import make_problem
from trainables.status import Status

SPEC: dict[str, Any] = {
    "name": "many",
    "model": "tiny-llama",
    "data": "synthetic",
    "sequence_length": 32,
    "global_batch_size": 32,
    "cluster": {"gpus_per_node": 2, "accelerator": "cpu"},
    "space": {
        "engine": ["megatron", "deepspeed"],
        "num_gpus": [1, 2],
        "tensor_parallel_size": [1, 2],
        "pipeline_parallel_size": [1, 2],
        "zero_stage": [0, 1, 2, 3],
        "micro_batch_size": [1, 2, 4, 8, 16, 32],
        "recompute": ["none", "selective", "full"],
        "precision": ["fp32", "bf16"],
        "reduce_precision": ["fp32", "bf16"],
    },
    "measurement": {"window_s": 0.1, "window_min_steps": 2, "warmup_max_s": 0.1, "deadline_s": 120},
    "finalists": {"count": 0},
    "sentinel_every": 0,
    "sampler": "random",
}
WATTUNE = [sys.executable, "-m", "service.cli"]
SHARE = 5
"""The first and the last fifth of the trials are held against each other."""


@dataclass(frozen=True)
class Moment:
    """A driver as a trial of it ends: its memory in MiB, and seconds by the clock and of CPU."""

    memory_mib: float
    clock_s: float
    cpu_s: float


def driven(trials: int, folder: Path) -> list[Moment]:
    """Run a search. Returns its driver at the end of each trial."""
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC | {"budget": {"trials": trials}}))
    command = [*WATTUNE, "run", str(folder / "spec.yaml"), "--search-id", "many"]
    moments = list[Moment]()
    with psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        said = list[str]()
        for line in driver.stdout:
            said.append(line)
            if line.startswith("         trial "):
                cpu = driver.cpu_times()
                moments.append(Moment(driver.memory_info().rss / 2**20, time.monotonic(), cpu.user + cpu.system))
    if driver.returncode:
        raise SystemExit("".join(said[-20:]))
    return moments


def held(what: str, seconds: list[float], part: int) -> None:
    """Print what a trial takes, by the median of the first and of the last."""
    gaps = [later - earlier for earlier, later in pairwise(seconds)]
    early, late = statistics.median(gaps[:part]), statistics.median(gaps[-part:])
    print(f"{what}: {early:.2f} s in the first fifth, {late:.2f} in the last: {late / early - 1:+.1%}")


def answered(*arguments: str) -> float:
    """Seconds that a command takes, at best of five."""
    seconds = []
    for _ in range(5):
        began = time.monotonic()
        subprocess.run([*WATTUNE, *arguments], check=True, capture_output=True)
        seconds.append(time.monotonic() - began)
    return min(seconds)


def record_searches(searches: int, trials: int) -> None:
    """Write records of searches that were not run."""
    problem, home = make_problem(SPEC), Home.locate()
    for number in range(searches):
        tracker = Tracker(home.tracking_uri, home)
        tracker.start_search(f"recorded-{number}", problem, {})
        for trial, layout in enumerate(problem.legal.layouts[:trials]):
            figures: dict[str, float | None] = {"tokens_per_s": 1.0 + trial}
            tracker.finish_trial(TrialResult(f"{number}-{trial}", layout, Status.OK, None, figures))
        tracker.finish_search("finished", {})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--searches", type=int, default=200, help="In the list, that one included.")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WATTUNE_HOME"] = str(Path(folder) / "home")
        for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
            os.environ.pop(name, None)
        os.environ |= {"RAY_worker_niceness": "0"}  # or its workers stand back behind all else on the machine
        moments = driven(arguments.trials, Path(folder))
        part = max(1, len(moments) // SHARE)
        memory = [moment.memory_mib for moment in moments]
        first, last = statistics.median(memory[part : 2 * part]), statistics.median(memory[-part:])
        print(f"driver's memory: {first:.0f} MiB in the second fifth, {last:.0f} in the last: {last / first - 1:+.1%}")
        held("a trial", [moment.clock_s for moment in moments], part)
        held("the driver's CPU time for a trial", [moment.cpu_s for moment in moments], part)
        print(f"best, of {len(moments)} trials: {answered('best', 'many'):.2f} s", flush=True)
        record_searches(arguments.searches - 1, trials=10)
        print(f"list, of {arguments.searches} searches: {answered('list'):.2f} s")


if __name__ == "__main__":
    main()
