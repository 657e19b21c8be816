"""Two searches at once on a Ray cluster of three nodes of this machine, while faults of every kind befall them.

    python -m benchmarks.measure.soak --minutes 20 --seed 1 [--trials 30] [--out FILE.json]

A head, two nodes and an MLflow server run in a Linux namespace of their own, which takes `unshare` and the right to use
it. At random moments, drawn by the seed, a process is killed or stopped, a node lost and back, the store away, the disk
full, the head started anew. A driver that ends is resumed; a search that has ended is followed by another, as long as
there is time. Then no more faults come, all searches are taken to their end, and what is left of them is looked for.

Exit code 1 if a search was lost, a finished trial is not recorded exactly once, or anything is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml
from ray.util.placement_group import placement_group_table

from benchmarks.measure.apart import apart, inside, possible
from service.record.results import Results
from service.record.store import reachable
from service.result import Purpose
from service.sampling.agenda import settled
from service.search import results_of

SPEC: dict[str, Any] = {
    "name": "soak",
    "model": "tiny-llama",
    "data": "synthetic",
    "sequence_length": 64,
    "global_batch_size": 16,
    "cluster": {"gpus_per_node": 2, "accelerator": "cpu", "cpus_per_worker": 1},
    "space": {
        "engine": "megatron",
        "num_gpus": [1, 2],
        "zero_stage": [0, 1, 3],
        "micro_batch_size": [1, 2, 4, 8],
        "recompute": ["none", "full"],
        "precision": "fp32",
    },
    "measurement": {"window_s": 0.5, "window_min_steps": 3, "warmup_max_s": 0.5, "deadline_s": 40},
    "finalists": {"count": 1, "repeats": 2, "window_s": 0.5},
    "sentinel_every": 10,
}
CPUS = 2
"""Of each node: two searches of two workers each fit on two of the three."""

DISK_MIB = 600
GRACE_S = 420.0
"""How long no trial may end, once no more faults come, before the searches under way are lost: a busy machine takes
minutes to bring up what a trial needs."""

PAUSE_S = (4.0, 12.0)
"""Between the end of one fault and the next."""

_OUTCOME = re.compile(r"^\[ *\d+:\d\d\] (?:ok|oom|crash|hang|invalid|pruned) +(.*?)(?: \((\w+)\))?: (.*)$")
_RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::_AutoscalingCoordinatorActor")


def titles() -> dict[psutil.Process, str]:
    """All processes of the namespace that are alive."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process] = " ".join(process.cmdline())
    return found


def named(title: str) -> list[psutil.Process]:
    return [process for process, its in titles().items() if its.startswith(title)]


def trial_processes() -> list[psutil.Process]:
    """The ranks of trials under way: what fork servers have started."""
    servers = [process for process, title in titles().items() if "trainables.child" in title]
    return [process for process in servers if process.parent() in servers]


def tree(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def send(number: int, processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Machines:
    """The cluster's three nodes and the MLflow server, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.port, self.store_port = free_port(), free_port()
        (folder / "tmp").mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        self.environment = kept | {
            "RAY_ADDRESS": f"127.0.0.1:{self.port}",
            "RAY_worker_niceness": "0",
            "WATTUNE_HOME": str(self.home),
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.store_port}",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "tmp"),
        }
        self.nodes: list[psutil.Popen | None] = [None, None, None]
        self.server: psutil.Popen | None = None

    def start(self, number: int) -> None:
        """Have a node join, of which number 0 is the head."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={CPUS}"]
        command += ["--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0"]
        if number == 0:
            command += ["--head", f"--port={self.port}", f"--temp-dir={self.folder / 'ray'}"]
            command += [f"--ray-client-server-port={free_port()}", f"--dashboard-port={free_port()}"]
        else:
            command += [f"--address=127.0.0.1:{self.port}"]
        self.nodes[number] = self._run(command, f"node{number}")

    def start_all(self) -> None:
        self.start(0)
        self.await_port(self.port)
        self.start(1)
        self.start(2)

    def lose(self, number: int) -> None:
        node = self.nodes[number]
        if node is not None:
            send(signal.SIGKILL, tree(node))
            node.wait()
        self.nodes[number] = None

    def start_store(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.store_port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.home}/mlflow.db"]
        command += ["--artifacts-destination", str(self.home / "kept")]
        self.server = self._run(command, "store")
        self.await_store()

    def await_store(self) -> None:
        until = time.monotonic() + 120
        while not reachable(self.environment["MLFLOW_TRACKING_URI"]):
            assert time.monotonic() < until, "the store does not start"
            time.sleep(0.5)

    @staticmethod
    def await_port(port: int) -> None:
        until = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < until, f"nothing listens at {port}"
            time.sleep(0.2)

    def stop_store(self) -> None:
        assert self.server is not None
        send(signal.SIGKILL, tree(self.server))
        self.server.wait()

    def close(self) -> None:
        for number in (1, 2, 0):
            self.lose(number)
        self.stop_store()

    def _run(self, command: list[str], name: str) -> psutil.Popen:
        with (self.folder / f"{name}.log").open("a") as log:
            return psutil.Popen(command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)


@dataclass
class Search:
    """One search, whose driver is started anew whenever it has ended before its search."""

    machines: Machines
    name: str
    trials: int
    seed: int
    driver: psutil.Popen | None = None
    over: bool = False
    starts: int = 0
    exits: Counter[str] = field(default_factory=Counter)
    not_before: float = 0.0
    printed: int = 0

    @property
    def output(self) -> Path:
        return self.machines.folder / f"{self.name}.txt"

    def drive(self) -> None:
        """Start its driver, if it has none and the search is not over."""
        if self.driver is not None and self.driver.poll() is not None:
            self.exits[str(self.driver.returncode)] += 1
            said = self.output.read_text()[self.printed :]
            self.over = self.driver.returncode == 0 and "\nstopped\n" not in said
            if self.driver.returncode == 2:
                self.not_before = time.monotonic() + 5
            self.driver = None
        if self.over or self.driver is not None or time.monotonic() < self.not_before:
            return
        command = [sys.executable, "-m", "service.cli", "resume", self.name]
        if not self._recorded():
            spec = self.machines.folder / f"{self.name}.yaml"
            spec.write_text(yaml.safe_dump(SPEC | {"seed": self.seed, "budget": {"trials": self.trials}}))
            command = [sys.executable, "-m", "service.cli", "run", str(spec), "--search-id", self.name]
        self.starts += 1
        with self.output.open("a") as output:
            self.printed = self.output.stat().st_size
            output.write(f"--- start {self.starts}\n")
            output.flush()
            self.driver = psutil.Popen(
                command, env=self.machines.environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def outcomes(self) -> list[re.Match[str]]:
        """What its drivers said of trials that ended."""
        if not self.output.exists():
            return []
        return [match for line in self.output.read_text().splitlines() if (match := _OUTCOME.match(line))]

    def _recorded(self) -> bool:
        return self.output.exists() and f"search {self.name}:" in self.output.read_text()


class Soak:
    """Searches, and the faults that befall them."""

    def __init__(self, machines: Machines, trials: int, seed: int) -> None:
        self.machines, self.trials, self.seed = machines, trials, seed
        self.draw = random.Random(seed)
        self.searches: list[Search] = []
        self.faults: Counter[str] = Counter()
        self.kinds: dict[str, tuple[int, Callable[[], Iterator[float]]]] = {
            "trial process killed": (3, lambda: self.signalled(trial_processes, signal.SIGKILL)),
            "trial process stopped": (1, lambda: self.signalled(trial_processes, signal.SIGSTOP)),
            "worker killed": (3, lambda: self.signalled(lambda: named("ray::RayTrainWorker"), signal.SIGKILL)),
            "worker stopped": (1, lambda: self.signalled(lambda: named("ray::RayTrainWorker"), signal.SIGSTOP)),
            "mailbox killed": (1, lambda: self.signalled(lambda: named("ray::Mailbox"), signal.SIGKILL)),
            "pool killed": (1, lambda: self.signalled(lambda: named("ray::Pool"), signal.SIGKILL)),
            "telemetry killed": (2, lambda: self.signalled(lambda: named("ray::Telemetry"), signal.SIGKILL)),
            "Tune's trial killed": (1, lambda: self.signalled(lambda: named("ray::evaluate"), signal.SIGKILL)),
            "gang's controller killed": (
                1,
                lambda: self.signalled(lambda: named("ray::TrainController"), signal.SIGKILL),
            ),
            "driver killed": (2, lambda: self.signalled(self.drivers, signal.SIGKILL)),
            "driver interrupted": (1, lambda: self.signalled(self.drivers, signal.SIGTERM)),
            "node lost and back": (2, self.lose_node),
            "head started anew": (1, self.restart_head),
            "store killed and back": (1, self.restart_store),
            "store silent": (1, self.silence_store),
            "disk full": (1, self.fill_disk),
        }

    def signalled(self, candidates: Callable[[], list[psutil.Process]], number: int) -> Iterator[float]:
        """Send a signal to one of some processes, once there is any."""
        for _ in range(40):
            if found := sorted(candidates(), key=lambda process: process.pid):
                send(number, [self.draw.choice(found)])
                return
            yield 0.5

    def drivers(self) -> list[psutil.Process]:
        return [search.driver for search in self.searches if search.driver is not None]

    def lose_node(self) -> Iterator[float]:
        number = self.draw.choice((1, 2))
        self.machines.lose(number)
        yield self.draw.uniform(5, 20)
        self.machines.start(number)

    def restart_head(self) -> Iterator[float]:
        for number in (0, 1, 2):
            self.machines.lose(number)
        yield 5
        self.machines.start_all()
        yield 5

    def restart_store(self) -> Iterator[float]:
        self.machines.stop_store()
        yield self.draw.uniform(5, 30)
        self.machines.start_store()

    def silence_store(self) -> Iterator[float]:
        assert self.machines.server is not None
        processes = tree(self.machines.server)
        send(signal.SIGSTOP, processes)
        yield self.draw.uniform(10, 60)
        send(signal.SIGCONT, processes)

    def fill_disk(self) -> Iterator[float]:
        filler = self.machines.home / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        yield self.draw.uniform(5, 20)
        filler.unlink()

    def run(self, minutes: float) -> None:
        """Befall searches for so long, then take all to their end."""
        began = time.monotonic()
        deck: list[str] = []
        fault: Iterator[float] | None = None
        due = progressed = began
        ended = 0
        while (left := began + 60 * minutes - time.monotonic()) > 0 or time.monotonic() < progressed + GRACE_S:
            under_way = [search for search in self.searches if not search.over]
            if left > 0 or not self.searches:
                for _ in range(2 - len(under_way)):
                    number = len(self.searches)
                    self.searches.append(Search(self.machines, f"soak-{number}", self.trials, self.seed + number))
            elif not under_way and fault is None:
                return
            for search in self.searches:
                search.drive()
            if left > 0 or ended < (ended := sum(len(search.outcomes()) for search in self.searches)):
                progressed = time.monotonic()
            if time.monotonic() >= due and (self.faults or trial_processes()):  # once the first gang is up
                if fault is None and left > 0:
                    if not deck:
                        deck = [name for name, (times, _) in self.kinds.items() for _ in range(times)]
                        self.draw.shuffle(deck)
                    name = deck.pop()
                    self.faults[name] += 1
                    say(f"{time.monotonic() - began:5.0f} s  {name}")
                    fault = self.kinds[name][1]()
                if fault is not None:
                    pause = next(fault, None)
                    fault = None if pause is None else fault
                    due = time.monotonic() + (self.draw.uniform(*PAUSE_S) if pause is None else pause)
            time.sleep(0.2)


@dataclass(frozen=True)
class Ended:
    """What became of one search: the trials that count, those that the machines failed, and what is wrong with it."""

    name: str
    status: str
    explored: int
    finished: int
    failed_by_machines: int
    statuses: dict[str, int]
    starts: int
    exits: dict[str, int]
    tracebacks: int
    wrong: list[str]


def judged(search: Search) -> Ended:
    """Hold a search's record against what its drivers said."""
    output = search.output.read_text()
    record = Results(search.machines.environment["MLFLOW_TRACKING_URI"]).search(search.name)
    results = results_of(record)
    counted = settled(results)
    explored = Counter(result.layout.label for result in counted if result.purpose == Purpose.SEARCH)
    said = Counter(
        (match[1], match[2] or "search") for match in search.outcomes() if not match[3].endswith("; it is run again")
    )
    there = Counter((result.layout.label, str(result.purpose)) for result in counted)
    wrong = [f"{label} is recorded {times} times" for label, times in explored.items() if times > 1]
    wrong += [f"{label} ({purpose}) was finished and is not recorded" for label, purpose in said - there]
    ids = Counter(trial.trial_id for trial in record.trials)
    wrong += [f"trial {trial} is recorded {times} times" for trial, times in ids.items() if times > 1]
    wrong += [f"trial {trial.trial_id} is still {trial.status}" for trial in record.trials if trial.status == "running"]
    if record.status != "finished":
        wrong.append(f"lost: {record.status}; its last words: {output.splitlines()[-1]}")
    elif sum(explored.values()) != search.trials:
        wrong.append(f"{sum(explored.values())} of {search.trials} trials")
    return Ended(
        name=search.name,
        status=record.status,
        explored=sum(explored.values()),
        finished=len(counted),
        failed_by_machines=sum(result.infrastructure for result in results),
        statuses=dict(Counter(str(result.status) for result in counted)),
        starts=search.starts,
        exits=dict(search.exits),
        tracebacks=output.count("Traceback (most recent call last)"),
        wrong=wrong,
    )


def left_in_cluster(address: str) -> list[str]:
    """What ended searches hold of a cluster that goes on: actors, placement groups, resources, processes."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    until = time.monotonic() + 60
    while True:
        groups = [one for one in placement_group_table().values() if one["state"] != "REMOVED"]
        have, free = ray.cluster_resources(), ray.available_resources()
        held = {name: have[name] - free.get(name, 0) for name in ("CPU",) if have[name] - free.get(name, 0) > 1e-6}
        left = [f"placement group {one['name'] or one['placement_group_id']}" for one in groups]
        left += [f"{amount:g} of Ray's {name}" for name, amount in held.items()]
        left += [
            f"process {process.pid}: {title[:100]}"
            for process, title in titles().items()
            if (title.startswith("ray::") and not title.startswith(_RAYS_OWN)) or "trainables." in title
        ]
        if not left or time.monotonic() > until:
            ray.shutdown()
            return left
        time.sleep(1)


def left_on_machine(folder: Path) -> list[str]:
    """What is left of all, once cluster and store have ended: processes, shared memory, temporary files."""
    until = time.monotonic() + 90  # Ray's agents take about a minute to see that their node is gone
    me = psutil.Process()
    while True:
        mine = {me.pid, 1, me.ppid()}
        left = [f"process {one.pid}: {title[:100]}" for one, title in titles().items() if one.pid not in mine]
        if not left or time.monotonic() > until:
            break
        time.sleep(1)
    left += [f"shared memory {path.name}" for path in Path("/dev/shm").iterdir()]
    return left + [f"temporary {path.name}" for path in (folder / "tmp").glob("wattune-*")]


def say(text: str) -> None:
    print(text, flush=True)


def soak(folder: Path, minutes: float, trials: int, seed: int) -> dict[str, Any]:
    """Run it. Returns its figures."""
    machines = Machines(folder)
    machines.start_store()
    machines.start_all()
    run = Soak(machines, trials, seed)
    began = time.monotonic()
    run.run(minutes)
    ended = [judged(search) for search in run.searches]
    in_cluster = left_in_cluster(machines.environment["RAY_ADDRESS"])
    machines.close()
    on_machine = left_on_machine(folder)
    return {
        "seed": seed,
        "minutes": (time.monotonic() - began) / 60,
        "faults": dict(run.faults),
        "searches": [asdict(one) for one in ended],
        "left_in_cluster": in_cluster,
        "left_on_machine": on_machine,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--out", type=Path, help="File for the figures, as JSON.")
    parser.add_argument("--keep", type=Path, help="Folder for what drivers, nodes and the store print.")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not inside():
        if not possible():
            raise SystemExit("soak: needs a namespace of its own, and `unshare` is not allowed to make one here")
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            (Path(folder) / "home").mkdir()
            given = [*(sys.argv[1:] if argv is None else argv), "--folder", folder]
            code = apart(__spec__.name, given, Path(folder) / "home", DISK_MIB)
            if arguments.keep:
                shutil.copytree(folder, arguments.keep, ignore=lambda *_: ["ray", "tmp", "home"], dirs_exist_ok=True)
        sys.exit(code)
    figures = soak(arguments.folder, arguments.minutes, arguments.trials, arguments.seed)
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")
    say(f"{sum(figures['faults'].values())} faults in {figures['minutes']:.1f} minutes, seed {figures['seed']}")
    for name, times in sorted(figures["faults"].items()):
        say(f"  {times:3} {name}")
    for one in figures["searches"]:
        say(
            f"{one['name']}: {one['status']}, {one['explored']} explored, {one['finished']} finished "
            f"{one['statuses']}, {one['failed_by_machines']} failed by the machines, {one['starts']} drivers "
            f"{one['exits']}, {one['tracebacks']} tracebacks"
        )
    wrong = [f"{one['name']}: {what}" for one in figures["searches"] for what in one["wrong"]]
    wrong += [f"left: {what}" for what in [*figures["left_in_cluster"], *figures["left_on_machine"]]]
    say("\n".join(wrong) or "every finished trial is recorded once, no search was lost, nothing is left behind")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
