"""What a trial costs beside training: on a warm gang, and with a Ray Train run started for it alone.

    python -m benchmarks.measure.overhead examples/tiny_cpu.yaml --trials 3

Runs the first legal layouts of a spec, one after the other, in one gang; then each of them again in a gang of its own.
Overhead is all the time that a trial holds the devices less compiling, warm-up and window; the median is to be quoted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import ray

from benchmarks.measure.gang import require_ok
from search_spaces.layout import Layout
from service.cluster import ray_session
from service.problem import Problem
from service.spec import load_spec
from service.trials.bench import Bench
from service.trials.evaluate import run_trial
from service.trials.gang import Gang, close_gangs
from telemetry.actor import Fleet, start_telemetry, stop_telemetry
from trainables.training import Training

USEFUL = ("compile_time_s", "warmup_time_s", "window_time_s")


def warm(spec: Problem, layouts: list[Layout], telemetry: Fleet, storage: Path) -> list[float]:
    """Seconds of overhead of each trial in one gang; the start of the gang is not among them."""
    gang = Gang("warm", spec.gang_size, spec.cluster, storage, telemetry, Training.preload(spec.legal.layouts))
    ray.get(gang.mailbox.ready.remote())
    seconds = []
    for number, layout in enumerate(layouts):
        result = run_trial(Bench(spec, gang.mailbox, telemetry, {}), f"warm-{number}", layout)
        seconds.append(require_ok(result)["trial_overhead_s"])
        _say("warm", layout, seconds[-1])
    close_gangs([gang])
    return seconds


def cold(spec: Problem, layouts: list[Layout], telemetry: Fleet, storage: Path) -> list[float]:
    """Seconds of overhead of each trial in a gang of its own, from its start to its end."""
    seconds = []
    for number, layout in enumerate(layouts):
        began = time.monotonic()
        gang = Gang(
            f"cold-{number}", spec.gang_size, spec.cluster, storage, telemetry, Training.preload(spec.legal.layouts)
        )
        result = run_trial(Bench(spec, gang.mailbox, telemetry, {}), f"cold-{number}", layout)
        close_gangs([gang])
        figures = require_ok(result)
        seconds.append(time.monotonic() - began - sum(figures[name] for name in USEFUL))
        _say("cold", layout, seconds[-1])
    return seconds


def _say(kind: str, layout: Layout, seconds: float) -> None:
    print(f"{kind}  {layout.label:56}  {seconds:6.2f} s", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--trials", type=int, default=3)
    arguments = parser.parse_args(argv)
    spec = load_spec(arguments.spec).located()
    layouts = list(spec.legal.layouts[: arguments.trials])
    with tempfile.TemporaryDirectory() as storage, ray_session(spec.cluster):
        telemetry = start_telemetry()
        figures = {
            "warm_s": warm(spec, layouts, telemetry, Path(storage)),
            "cold_s": cold(spec, layouts, telemetry, Path(storage)),
        }
        stop_telemetry(telemetry)
    medians = {name: statistics.median(seconds) for name, seconds in figures.items()}
    print(f"median overhead of a trial: warm {medians['warm_s']:.2f} s, cold {medians['cold_s']:.2f} s")
    print(json.dumps({"spec": str(arguments.spec), **figures}))


if __name__ == "__main__":
    main()
