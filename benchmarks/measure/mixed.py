"""Searches that mix layouts of all sizes side by side while ranks are killed, hang and run out of memory.

    python -m benchmarks.measure.mixed [SPEC] --out FOLDER [--searches 2] [--gpus N] [--seconds 150] [--seed 0]

One search, or two that share the machine, each on its share of N GPUs, explore a spec for so many seconds. Meanwhile,
as often as there are searches, a rank's process in the midst of its work is stopped, so that the trial hangs to its
deadline, and another one killed; layouts that need more memory than there is are in the spec. Where processors train,
a rank is refused more memory.

Meanwhile each GPU's memory in use is read ten times a second (`memory.csv`), and which trial has it every second
(`works.jsonl`). Printed are, of each search, the share of its GPUs' time that trials had and that they trained or
measured in, and the median of what trials cost beside that; and for each trial that failed, within what time its GPUs'
memory was back to what it was before all (`figures.json`). Of processors it is the machine's, which is not judged.

Exit code 1 if a search did not come to its end, no trial failed of one of the three kinds, or memory was not back
within 5 s.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import ray

from benchmarks import SPECS, import_path
from benchmarks.measure.busy import Busy, busy
from benchmarks.measure.sized import Fields, of_size, read, write
from service.cluster import ray_session
from service.home import tracking_uri
from service.queue.policy import VARIABLE as POLICY
from service.record.results import Results, SearchRecord, TrialRecord
from service.spec import load_spec
from service.top import poll
from telemetry.devices import Device, count_gpus, discover, is_host
from trainables.leftovers import MEMORY_GIB, MEMORY_S
from trainables.status import Status

READ_S, ASKED_S = 0.1, 1.0
PAUSE_S = 4.0
"""Between two faults."""

END_S = 10.0
"""How long a search that is to end may take for it."""

FAILURES = (Status.CRASH, Status.HANG, Status.OOM)
SHARING = "exclusive: false\nslice_minutes: 1\n"
"""The cluster's policy: two searches may have gangs on its one node at a time, or take turns where there is one GPU."""


@dataclass(frozen=True)
class Fault:
    """What befalls a rank's process that is `at_s` to `until_s` seconds old, in the midst of its work."""

    name: str
    befall: Callable[[psutil.Process], None]
    at_s: float = 2.5
    until_s: float = 6.0


def refuse_memory(process: psutil.Process) -> None:
    """No more than the process has now, as where the machine's is used up."""
    used = process.memory_info().vms
    process.rlimit(psutil.RLIMIT_AS, (used, used))


HUNG = Fault("stopped", lambda process: process.send_signal(signal.SIGSTOP))
KILLED = Fault("killed", lambda process: process.send_signal(signal.SIGKILL))
NO_MEMORY = Fault("refused memory", refuse_memory, 1.0, 2.5)
"""Which some library may meet that does not say so: the trial is a crash then, and not out of memory."""


def ranks() -> dict[psutil.Process, float]:
    """The ranks of trials under way on the Ray of this process, with how many seconds ago they were started: what fork
    servers have started."""
    forked, found = set(), {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "trainables.child" in " ".join(process.cmdline()):
                forked.add(process)
    for process in forked:
        with contextlib.suppress(psutil.Error):
            if process.parent() in forked:
                found[process] = time.time() - process.create_time()
    return found


def in_use_gib(device: Device) -> float | None:
    """A device's memory in use; None where it does not answer."""
    with contextlib.suppress(Exception):  # whatever a driver raises
        used: float | None = device.read(False).get("memory_used_gib")
        return used
    return None


@dataclass
class Watch:
    """Reads the devices' memory in use, in GiB, in a thread of its own, from `start` to `stop`."""

    devices: Sequence[Device]
    file: Path
    read: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """Times in Unix seconds, and what was in use then, by device."""

    def start(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        with self.file.open("w") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(["time_s", "device", "memory_used_gib"])
            while not self._over.wait(READ_S):
                for device in self.devices:
                    uuid, used = device.info.uuid, in_use_gib(device)
                    if used is not None:
                        self.read[uuid].append((time.time(), used))
                        lines.writerow([f"{time.time():.2f}", uuid[:12], f"{used:.3f}"])
                file.flush()


def back_s(read: Sequence[tuple[float, float]], before_gib: float, since: float) -> float | None:
    """Seconds after `since` until a device's memory in use was what it was before; None if it was not any more."""
    return next((at - since for at, used in read if at >= since and used <= before_gib + MEMORY_GIB), None)


class Searches:
    """Searches that share the Ray of this process, each driven by a process of its own."""

    def __init__(self, folder: Path, specs: Sequence[Path], address: str) -> None:
        name = time.strftime("mixed-%Y%m%d-%H%M%S")
        self.ids = [f"{name}-{number}" for number in range(len(specs))]
        environment = os.environ | {"RAY_ADDRESS": address, "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = import_path()
        self.drivers = []
        for number, (search, spec) in enumerate(zip(self.ids, specs, strict=True)):
            command = [sys.executable, "-m", "service.cli", "run", str(spec), "--search-id", search]
            with (folder / f"search-{number}.txt").open("w") as output:
                self.drivers.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))

    @property
    def over(self) -> bool:
        return all(driver.poll() is not None for driver in self.drivers)

    def end(self) -> None:
        for driver in self.drivers:
            driver.terminate()
        until = time.monotonic() + END_S
        for driver in self.drivers:
            try:
                driver.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                driver.kill()
                driver.wait()


def befall(
    searches: Searches, faults: Sequence[Fault], folder: Path, draw: random.Random, were: list[dict[str, Any]]
) -> None:
    """Have faults befall ranks, each added to those that `were`, until the searches are over. Keeps who has which
    device."""
    left = list(faults)
    due = asked = 0.0
    with (folder / "works.jsonl").open("w") as works:
        while not searches.over:
            time.sleep(0.2)
            if (now := time.time()) >= asked:
                asked = now + ASKED_S
                for state in poll():
                    for work in state.works:
                        works.write(json.dumps({"time_s": now} | asdict(work)) + "\n")
                works.flush()
            if not left or now < due:
                continue
            ripe = [process for process, age_s in ranks().items() if left[0].at_s <= age_s <= left[0].until_s]
            if not ripe:
                continue
            with contextlib.suppress(psutil.Error):
                victim = draw.choice(sorted(ripe, key=lambda process: process.pid))
                left[0].befall(victim)
                were.append({"fault": left.pop(0).name, "pid": victim.pid, "time_s": now})
                due = now + PAUSE_S
                print(f"{time.strftime('%H:%M:%S')}  rank {victim.pid} {were[-1]['fault']}", flush=True)


def last_seen(works: Iterator[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By trial, when it was last seen on each device."""
    seen: dict[str, dict[str, float]] = defaultdict(dict)
    for work in works:
        seen[work["trial_id"]][work["device"]] = work["time_s"]
    return dict(seen)


def recovered(
    trial: TrialRecord,
    devices: Collection[str],
    seen: Mapping[str, float],
    read: Mapping[str, Sequence[tuple[float, float]]],
    before_gib: Mapping[str, float],
) -> float | None:
    """Seconds until the memory of all `devices` of a failed trial was back, from when it was last `seen` on them, or
    ended if that was before. None if it was not, or one is not watched, or the record has none."""
    if not devices or trial.ended is None or not before_gib.keys() >= set(devices):
        return None
    ended = trial.ended.timestamp()
    times = [back_s(read[one], before_gib[one], min(seen.get(one, ended), ended)) for one in devices]
    known = [seconds for seconds in times if seconds is not None]
    return max(known) if len(known) == len(times) else None


def devices_of(results: Results, trial: TrialRecord) -> list[str]:
    """Those that a trial had, by its record."""
    result = results.result_of(trial)
    return [] if result is None else [one.device for one in result.devices]


def told(search: SearchRecord, exit_code: int) -> dict[str, Any]:
    """What became of a search, and how much of its GPUs' time was made use of."""
    counts = Counter(
        (trial.status, trial.layout.num_gpus, "beside" if trial.beside else "alone") for trial in search.trials
    )
    explored = any(trial.purpose.explores and trial.started and trial.ended for trial in search.trials)
    return {
        "id": search.id,
        "status": search.status,
        "exit_code": exit_code,
        "trials": [[*kind, count] for kind, count in sorted(counts.items())],
        "busy": asdict(busy(search)) if explored else None,
    }


def wrong(figures: Mapping[str, Any]) -> list[str]:
    """What is not as it should be."""
    said = [
        f"{one['id']}: {one['status']}, exit code {one['exit_code']}"
        for one in figures["searches"]
        if one["status"] != "finished" or one["exit_code"]
    ]
    kinds = {one["status"] for one in figures["failed"]}
    said += [f"no trial ended as {status}" for status in FAILURES if status not in kinds]
    if not figures["on_cpu"]:
        said += [
            f"{one['trial_id']}: {one['status']}: memory was not seen to be back within {MEMORY_S:.0f} s"
            for one in figures["failed"]
            if one["back_s"] is None or one["back_s"] > MEMORY_S
        ]
    return said


def mix(fields: Fields, folder: Path, count: int, gpus: int, seconds: float, seed: int) -> dict[str, Any]:
    """Run it. Returns its figures."""
    share, budget = of_size(fields, max(gpus // count, 1)), {**fields.get("budget", {}), "wall_time_s": seconds}
    specs = [folder / f"spec-{number}.yaml" for number in range(count)]
    for number, spec in enumerate(specs):
        write(share | {"budget": budget, "seed": seed + number}, spec)
    (folder / "policy.yaml").write_text(SHARING)
    os.environ[POLICY] = str(folder / "policy.yaml")
    watch = Watch(discover(), folder / "memory.csv")
    on_cpu = all(is_host(device.info.kind) for device in watch.devices)
    before = {device.info.uuid: in_use_gib(device) or 0.0 for device in watch.devices}
    were: list[dict[str, Any]] = []
    faults = [*([NO_MEMORY] if on_cpu else []), HUNG, KILLED]
    with ray_session(replace(load_spec(specs[0]).cluster, gpus_per_node=gpus)):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # Ray has one that ends it at once
        searches = Searches(folder, specs, ray.get_runtime_context().gcs_address)
        watch.start()
        try:
            befall(searches, [fault for fault in faults for _ in specs], folder, random.Random(seed), were)
            time.sleep(MEMORY_S)
        except SystemExit:
            pass  # by a signal: what there is by now is told
        finally:
            searches.end()
            watch.stop()
    with (folder / "works.jsonl").open() as lines:
        seen = last_seen(json.loads(line) for line in lines)
    results = Results(tracking_uri(None))
    recorded = [results.search(search) for search in searches.ids]
    failed = [
        {
            "search": search.id,
            "trial_id": trial.trial_id,
            "layout": trial.label,
            "status": trial.status,
            "cause": trial.cause,
            "devices": [device[:12] for device in devices],
            "back_s": recovered(trial, devices, seen.get(trial.trial_id, {}), watch.read, before),
        }
        for search in recorded
        for trial in search.trials
        if trial.status in FAILURES
        for devices in [devices_of(results, trial)]
    ]
    figures: dict[str, Any] = {
        "searches": [told(one, driver.returncode) for one, driver in zip(recorded, searches.drivers, strict=True)],
        "on_cpu": on_cpu,
        "faults": were,
        "failed": failed,
        "memory_gib": {
            "before": before,
            "after": {uuid: read[-1][1] for uuid, read in watch.read.items() if read},
        },
    }
    return figures | {"wrong": wrong(figures)}


def show(figures: Mapping[str, Any]) -> None:
    for one in figures["searches"]:
        print(f"{one['id']}: {one['status']}, exit code {one['exit_code']}")
        for status, gpus, how, count in one["trials"]:
            print(f"  {count:3} {status} on {gpus}, {how}")
        if one["busy"]:
            print(f"  {Busy(**one['busy'])}")
    for one in figures["failed"]:
        back = "memory was not seen to be back" if one["back_s"] is None else f"memory back in {one['back_s']:.1f} s"
        told = "" if figures["on_cpu"] else f"{back}: "
        print(f"{one['status']:5} {one['layout']}: {told}{(one['cause'] or '')[:120]}")
    for when, used in figures["memory_gib"].items():
        print(f"memory in use {when}: {' '.join(f'{gib:.2f}' for gib in used.values())} GiB")
    print("\n".join(figures["wrong"]) or "every search came to its end, with trials that failed in each of three ways")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path, nargs="?", default=SPECS / "mixed.yaml")
    parser.add_argument("--out", type=Path, required=True, help="Folder for all that is printed and read.")
    parser.add_argument("--searches", type=int, choices=(1, 2), default=1)
    parser.add_argument("--gpus", type=int, help="By default all there are; of processors, what the spec says.")
    parser.add_argument("--seconds", type=float, default=150, help="For which each search may begin trials.")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    fields = read(given.spec)
    gpus = given.gpus or count_gpus() or fields["cluster"]["gpus_per_node"]
    given.out.mkdir(parents=True, exist_ok=True)
    figures = mix(fields, given.out.absolute(), given.searches, gpus, given.seconds, given.seed)
    (given.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    show(figures)
    sys.exit(1 if figures["wrong"] else 0)


if __name__ == "__main__":
    main()
