"""What telemetry costs training.

    python -m benchmarks.measure.pacing SPEC [--seconds 230] --out FILE.json
    python -m benchmarks.measure.pacing FILE.json...

While one long trial trains the spec's first legal layout on all devices, telemetry is turned off, on, and to other
rates every few seconds: what polling costs the trial, by pairs of neighbouring stretches of the same process, what it
costs the CPU, how late its ticks are, and energy by counter and by power over the last half minute. Of files of earlier
runs it shows these figures again, and what polling costs by the pairs of all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from scipy import stats

from benchmarks.measure.runs import parse_run
from benchmarks.measure.telemetry import show
from service.cluster import ray_session
from service.problem import Problem
from service.result import TrialResult
from service.spec import load_spec
from service.trials.bench import Bench
from service.trials.evaluate import run_trial
from service.trials.gang import Gang, close_gangs
from telemetry.actor import Fleet, Telemetry
from telemetry.sampler import Sampler
from trainables.training import Training

STRETCH_S = 8.0
ENERGY_S = 34.0
SETTLED_S = 2.0
RATES_HZ = (10, 10, 10, 10, 10, 1, 10, 10, 10, 10, 10, 50, 10, 10, 10, 10, 10, 100)
"""What is compared with no polling, in turn."""


class Paced(Telemetry):
    """A node's telemetry, whose rate can be changed, and which knows what it costs."""

    def pace(self, hertz: int) -> None:
        """Poll so often from now on; 0 is not at all."""
        before = self._sampler
        before.stop()
        if hertz:
            self._sampler = Sampler(self._devices, self._buffer, self._node_id, 1 / hertz)
            self._sampler._full_ns = before._full_ns  # a new sampler would read everything in full at once
            self._sampler.start()

    def cost(self) -> dict[str, float]:
        """Seconds of CPU so far: of the present sampler's thread, and of the whole process."""
        thread = self._sampler._thread
        assert thread.ident is not None
        polling = time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) if thread.is_alive() else 0.0
        times = psutil.Process().cpu_times()
        return {"sampler_s": polling, "process_s": times.user + times.system}

    def rows(self, start_ns: int, end_ns: int) -> pa.Table:
        return self._between(start_ns, end_ns)


@dataclass(frozen=True)
class PacedStretch:
    """Some seconds of one rate, and the seconds of CPU that telemetry took in it."""

    hertz: int
    start_ns: int
    end_ns: int
    cost: dict[str, float] = field(default_factory=dict)

    def steps(self, ends_ns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """The steps that began and ended in it."""
        return seconds[(ends_ns - seconds * 1e9 >= self.start_ns) & (ends_ns <= self.end_ns)]


def paced_stretch(telemetry: Any, hertz: int, stay: Callable[[], object]) -> PacedStretch:
    """Poll at this rate until `stay` returns."""
    ray.get(telemetry.pace.remote(hertz))
    before, start_ns = ray.get(telemetry.cost.remote()), time.monotonic_ns()
    stay()
    after, end_ns = ray.get(telemetry.cost.remote()), time.monotonic_ns()
    return PacedStretch(hertz, start_ns, end_ns, {name: after[name] - before[name] for name in after})


def alternate(telemetry: Any, until: float) -> list[PacedStretch]:
    """Until then, stretches of no polling beside stretches of each rate; which is first changes from pair to pair."""
    stretches: list[PacedStretch] = []
    for number, rate in enumerate(itertools.cycle(RATES_HZ)):
        if time.monotonic() > until:
            break
        for hertz in (0, rate) if number % 2 else (rate, 0):
            stretches.append(paced_stretch(telemetry, hertz, lambda: time.sleep(STRETCH_S)))
    return stretches


def slowdowns(records: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """By rate of two pairs or more: how much longer the median step is than in the stretch beside it without polling;
    the mean of the runs' pairs, half of its 95% confidence interval, pairs."""
    ratios: dict[int, list[float]] = defaultdict(list)
    for record in records:
        seconds = np.array(record["step_times_s"])
        ends_ns = record["window_start_ns"] + np.cumsum(seconds) * 1e9
        stretches = [PacedStretch(*stretch) for stretch in record["stretches"]]
        for one, other in zip(stretches[::2], stretches[1::2], strict=True):
            polled, quiet = (one, other) if one.hertz else (other, one)
            with_, without = polled.steps(ends_ns, seconds), quiet.steps(ends_ns, seconds)
            if len(with_) and len(without):
                ratios[polled.hertz].append(float(np.median(with_) / np.median(without) - 1))
    by_rate = {}
    for hertz, values in sorted(ratios.items()):
        if len(values) > 1:
            half = float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))
            by_rate[hertz] = {"slowdown": statistics.fmean(values), "confidence": half, "pairs": len(values)}
    return by_rate


def costs(stretches: list[PacedStretch]) -> dict[int, dict[str, float]]:
    """By rate: share of one core."""
    shares = {}
    for hertz in sorted({stretch.hertz for stretch in stretches}):
        those = [stretch for stretch in stretches if stretch.hertz == hertz]
        seconds = sum(stretch.end_ns - stretch.start_ns for stretch in those) / 1e9
        names = ("sampler", "process")
        shares[hertz] = {
            f"{name}_core": sum(stretch.cost[f"{name}_s"] for stretch in those) / seconds for name in names
        }
    return shares


def lateness(stretches: list[PacedStretch], read_ns: np.ndarray) -> dict[int, dict[str, float]]:
    """By rate: milliseconds of ticks after (or before) their time, and the share of ticks within 20 ms of it.

    `read_ns` [n] are the times of all ticks; one that was skipped is late by its period.
    """
    late_parts: dict[int, list[np.ndarray]] = defaultdict(list)
    for stretch in stretches:
        times = read_ns[(read_ns >= stretch.start_ns) & (read_ns <= stretch.end_ns)]
        if stretch.hertz and len(times) >= 3:
            late_parts[stretch.hertz].append(np.abs(late_s(times, 1 / stretch.hertz)))
    by_rate = {}
    for hertz, parts in sorted(late_parts.items()):
        late = np.concatenate(parts) * 1e3
        p50, p99, p999 = (float(np.percentile(late, q)) for q in (50, 99, 99.9))
        by_rate[hertz] = {
            "ticks": len(late),
            "p50_ms": p50,
            "p99_ms": p99,
            "p999_ms": p999,
            "within_20_ms": float(np.mean(late <= 20)),
        }
    return by_rate


def late_s(times_ns: np.ndarray, period_s: float) -> np.ndarray:
    """By how much ticks were late, of a schedule of which only the period is known: that of most of them. Each tick is
    the latest one that was due then, unless a later tick was. A skipped one is late by the period."""
    periods = (times_ns - times_ns[0]) / (period_s * 1e9)
    usual = np.angle(np.mean(np.exp(2j * np.pi * periods))) / (2 * np.pi)
    usual += np.median((periods - usual + 0.5) % 1 - 0.5)
    order = np.arange(len(periods))
    latest = np.floor(periods - usual + 0.1) - order
    number = np.minimum.accumulate(latest[::-1])[::-1] + order
    skipped = round(number[-1] - number[0]) + 1 - len(number)
    return np.append(periods - usual - number, np.ones(skipped)) * period_s


def while_training(spec: Problem, seconds: float) -> dict[str, Any]:
    """All that is recorded during one trial with a window of so many seconds."""
    long = replace(spec, measurement=replace(spec.measurement, window_s=seconds))
    with tempfile.TemporaryDirectory() as storage, ray_session(spec.cluster):
        (node_id,) = (node["NodeID"] for node in ray.nodes() if node["Alive"])
        here = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        actor: Any = ray.remote(Paced)
        telemetry = actor.options(num_cpus=0, max_concurrency=16, scheduling_strategy=here).remote(
            node_id, "benchmark", Path(storage) / "spool"
        )
        devices = ray.get(telemetry.describe.remote())["devices"]
        handles = Fleet("benchmark", {node_id: telemetry})
        gang = Gang(
            "benchmark", spec.gang_size, spec.cluster, Path(storage), handles, Training.preload(spec.legal.layouts)
        )
        ray.get(gang.mailbox.ready.remote())
        results: list[TrialResult] = []
        bench = Bench(long, gang.mailbox, handles, {})
        trial = threading.Thread(target=lambda: results.append(run_trial(bench, "long", spec.legal.layouts[0])))
        began_ns = time.monotonic_ns()
        trial.start()
        while trial.is_alive() and not any(work.phase == "window" for work in ray.get(telemetry.state.remote()).works):
            time.sleep(0.2)
        until = time.monotonic() + seconds - ENERGY_S - STRETCH_S
        stretches = alternate(telemetry, until)
        marks_ns: list[int] = []

        def mark_and_join() -> None:
            for _ in range(2):  # what is read first has nothing before it to be held against
                ray.get(telemetry.mark.remote())
                time.sleep(SETTLED_S)
                marks_ns.append(time.monotonic_ns())
            trial.join()

        last = paced_stretch(telemetry, 10, mark_and_join)
        (result,) = results
        if result.status != "ok":
            raise SystemExit(f"the trial did not work: {result.status}: {result.cause}")
        table = ray.get(telemetry.rows.remote(began_ns, time.monotonic_ns()))
        window = result.windows[0]
        energy = ray.get(telemetry.window.remote(marks_ns[0], window.end_ns, window.devices))
        close_gangs([gang])
    first = table.filter(pc.field("index") == pc.min(table["index"]))["time_ns"].to_numpy()
    return {
        "devices": devices,
        "layout": result.layout.label,
        "steps": len(result.step_times_s),
        "step_s": statistics.median(result.step_times_s),
        "training energy": {
            "seconds": energy.duration_s,
            "energy_j": energy.energy_j,
            "method": energy.energy_method,
            "energy_ratio": energy.energy_ratio,
        },
        "problems": energy.problems,
        "stretches": [astuple(stretch) for stretch in stretches],
        "last stretch": astuple(last),
        "read_ns": first[first <= window.end_ns].tolist(),  # then the trial is taken down
        "window_start_ns": window.start_ns,
        "step_times_s": result.step_times_s,
    }


def figures(record: dict[str, Any]) -> dict[str, Any]:
    """What a record comes to."""
    stretches = [PacedStretch(*stretch) for stretch in (*record["stretches"], record["last stretch"])]
    return {
        "slowdown": slowdowns([record]),
        "cost": costs(stretches),
        "ticks": lateness(stretches, np.array(record["read_ns"])),
    }


def show_run(record: dict[str, Any]) -> None:
    count = len(record["devices"])
    print(f"{record['layout']} on {count} devices: {record['steps']} steps of {record['step_s']:.4f} s")
    show("Slowdown of training against no polling, by Hz", record["slowdown"])
    show("Cores, by Hz", record["cost"])
    show("Ticks, by Hz", record["ticks"])
    show("Energy of training, polled at 10 Hz", {"all devices": record["training energy"]})
    print("\n".join(record["problems"]))


def read_record(path: Path) -> dict[str, Any]:
    """Raises ValueError unless the file is of this benchmark."""
    try:
        record = json.loads(path.read_text())
        return record | (figures(record) if "read_ns" in record else {"slowdown": slowdowns([record])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no record of this benchmark: {error}") from None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", help="a spec to measure with, or files of earlier runs")
    parser.add_argument("--seconds", type=float, default=230.0, help="length of the trial's window")
    parser.add_argument("--out", type=Path, help="the file of this run")
    arguments = parse_run(parser, argv)
    if arguments.out is None:
        try:
            records = [read_record(path) for path in arguments.paths]
        except ValueError as error:
            parser.error(str(error))
        for record in records:
            show_run(record)
        if len(records) > 1:
            show("Slowdown of training against no polling in all these runs, by Hz", slowdowns(records))
        return
    record = while_training(load_spec(arguments.paths[0]).located(), arguments.seconds)
    arguments.out.write_text(json.dumps(record))
    show_run(record | figures(record))


if __name__ == "__main__":
    main()
