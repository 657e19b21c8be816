"""What `wattune watch --run` and `wattune doctor` cost a training that they run beside.

    python -m benchmarks.measure.watching [SPEC] [--seconds 105] --out FILE.json
    python -m benchmarks.measure.watching FILE.json...

The spec's first legal layout trains by torchrun, on all of its devices, as a run of a user's does
(`benchmarks.measure.beside`), while every moment one of three things is so, in orders that change from round to round:

- `alone`: nothing runs beside it;
- `watch`: its ranks call the hook after each step, and `wattune watch --run` hears them and reads telemetry;
- `doctor`: `wattune doctor` examines the machine, again as soon as it is through. It leaves what is in use alone.

Between their turns both are halted as processes are (SIGSTOP), so that all is of one run. Printed is how much longer
the median step is than in the same round `alone`, and where that lies with 95% confidence. What they do once in a
while, a look of the watcher's or full readings, they do as often as in thrice the time. Of several files the same is
printed of all their rounds together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT, import_path
from benchmarks.measure.beside import Board
from benchmarks.measure.runs import add_run_arguments, parse_run
from service.answers.tables import render
from service.paired import difference
from service.problem import Problem
from service.spec import load_spec
from trainables.launch import Launch
from trainables.leftovers import end_with_parent
from trainables.training import Training

ALONE, WATCH, DOCTOR = "alone", "watch", "doctor"
ORDERS = ((ALONE, WATCH, DOCTOR), (DOCTOR, WATCH, ALONE), (WATCH, ALONE, DOCTOR), (DOCTOR, ALONE, WATCH))

WINDOW_S, EDGE_S = 3.0, 0.15
"""Of a turn, and of its beginning that is left out. In turns half as long medians vary twice as much."""

STARTED_S, SETTLED_S = 100.0, 6.0
"""How long a training may take to its first steps, and how long it is then left to warm the machine up."""

BOUND = 0.001
"""Of a step: what both may cost."""


@dataclass(frozen=True)
class Turn:
    """From `start_ns` to `end_ns` one of the three things was so."""

    beside: str
    start_ns: int
    end_ns: int


@contextlib.contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command with all that it starts, in a group that is killed in the end."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def while_training(spec: Problem, seconds: float) -> dict[str, Any]:
    """All that is recorded of one run of so many seconds. Raises SystemExit if the training ends by itself, or has no
    time for two rounds."""
    ending_s = time.monotonic() + seconds
    layout = spec.legal.layouts[0]
    assert spec.data is not None
    training = Training(spec.workload.shape, spec.data, spec.sequence_length, spec.seed)
    launch = Launch(layout, training, spec.cluster.accelerator, spec.cluster.gpus_per_node)
    with tempfile.TemporaryDirectory(prefix="watching-") as name, contextlib.ExitStack() as ending:
        folder = Path(name)
        run, board = folder / "run.json", Board(folder / "board", new=True)
        run.write_text(json.dumps(launch.to_dict()))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "WATTUNE_"))}
        environment |= {"PYTHONPATH": import_path(), "WATTUNE_HOME": str(folder / "home"), "WATTUNE_RUN": address}
        wattune = [sys.executable, "-m", "service.cli"]
        watcher = [*wattune, "watch", "--run", "--listen", address]
        examining = ["sh", "-c", 'while true; do "$@"; done', "sh", *wattune, "doctor"]
        watching = ending.enter_context(running(watcher, environment, folder / WATCH))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ranks = ["--nproc-per-node", str(layout.num_gpus), "-m", "benchmarks.measure.beside", str(run), str(board.path)]
        trained = ending.enter_context(running([*torchrun, *ranks], environment, folder / "training"))
        until = time.monotonic() + STARTED_S
        while len(board.ends_ns) < 3 and trained.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(SETTLED_S)
        # Not before: a machine on which nothing trains yet is put to work by the doctor.
        beside = {WATCH: watching, DOCTOR: ending.enter_context(running(examining, environment, folder / DOCTOR))}
        for process in beside.values():
            os.killpg(process.pid, signal.SIGSTOP)
        turns = list(in_turns(board, beside, ending_s))
        if trained.poll() is not None or len(board.ends_ns) < 3:
            raise SystemExit(f"the training did not go on:\n{(folder / 'training').read_text()[-2000:]}")
        if len(turns) < 2 * len(ORDERS[0]):
            raise SystemExit(f"{seconds:.0f} s are over before two rounds: give more --seconds")
        seen = {one: (folder / one).read_text() for one in beside}
        return {
            "on": device_name(spec),
            "layout": layout.to_dict(),
            "label": layout.label,
            "ends_ns": board.ends_ns.tolist(),
            "turns": [asdict(turn) for turn in turns],
            "examinations": seen[DOCTOR].count("\n--  host "),
            "heard": "ranks tell of their steps" in seen[WATCH],
        }


def in_turns(board: Board, beside: Mapping[str, subprocess.Popen[bytes]], until: float) -> Iterator[Turn]:
    """Let whole rounds pass until then, by `time.monotonic`."""
    number = 0
    while time.monotonic() + len(ORDERS[0]) * WINDOW_S < until:
        for one in ORDERS[number % len(ORDERS)]:
            board.watch(one == WATCH)
            start_ns = time.monotonic_ns()
            if one in beside:
                os.killpg(beside[one].pid, signal.SIGCONT)
            time.sleep(WINDOW_S)
            if one in beside:
                os.killpg(beside[one].pid, signal.SIGSTOP)
            yield Turn(one, start_ns, time.monotonic_ns())
        number += 1


def device_name(spec: Problem) -> str:
    import torch

    return "CPU" if spec.cluster.accelerator == "cpu" else torch.cuda.get_device_name()


def medians(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """The median step of each round, by what was beside it, of rounds in which all have steps."""
    ends_ns = np.array(record["ends_ns"])
    began_ns, ended_ns, size = ends_ns[:-1], ends_ns[1:], len(ORDERS[0])
    turns = [Turn(**one) for one in record["turns"]]
    found: dict[str, list[float]] = {one: [] for one in ORDERS[0]}
    for first in range(0, len(turns), size):
        of_round = {}
        for turn in turns[first : first + size]:
            inside = (began_ns >= turn.start_ns + EDGE_S * 1e9) & (ended_ns <= turn.end_ns)
            if inside.any():
                of_round[turn.beside] = float(np.median((ended_ns - began_ns)[inside])) / 1e9
        if len(of_round) == size:
            for one, step_s in of_round.items():
                found[one].append(step_s)
    return found


def show(records: Sequence[Mapping[str, Any]]) -> None:
    for record in records:
        heard = "the watcher heard of its steps" if record["heard"] else "NO STEP CAME TO THE WATCHER"
        count = record["examinations"]
        print(f"{record['label']} on {record['on']}: {heard}, {count} examinations by the doctor left it alone")
    by_round = [medians(record) for record in records]
    alone, rows = [one for each in by_round for one in each[ALONE]], []
    for beside in (WATCH, DOCTOR):
        costs = difference(alone, [one for each in by_round for one in each[beside]])
        most, least = (-end for end in costs.interval or (-math.inf, math.inf))
        verdict = "yes" if most < BOUND else "no" if least > BOUND else "not told"
        rows.append([beside, str(costs.pairs), f"{-costs.saves:+.4%}", f"{least:+.4%} to {most:+.4%}", verdict])
    print(f"steps of {np.median(alone):.4f} s alone\n")
    print(render(("beside it", "rounds", "steps are longer by", "95% interval", f"below {BOUND:.1%}"), rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser, "slowed_2gpu.yaml")
    parser.add_argument("--seconds", type=float, default=105.0, help="of all, of which some 30 to 40 are to start")
    given = parse_run(parser, argv)
    if given.out is None:
        show([json.loads(path.read_text()) for path in given.paths])
        return
    record = while_training(load_spec(given.paths[0]).located(), given.seconds)
    given.out.write_text(json.dumps(record))
    show([record])


if __name__ == "__main__":
    main()
