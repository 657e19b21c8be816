"""What the devices of a node attain at their best: matrix products, memory, launches, and the links between them.

`probe` runs a process for each device, this file as a program, which ends in any case: no driver that hangs holds it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from trainables.platforms.base import Platform


@dataclass(frozen=True)
class Sizes:
    """What a probe of one kind of devices takes: seconds, the width of square matrices, bytes."""

    warm_s: float
    products_s: float
    width: int
    memory_bytes: int
    message_bytes: int


GPU = Sizes(warm_s=4.0, products_s=8.0, width=8192, memory_bytes=2**31, message_bytes=2**28)
"""Products begin to be timed when power and clocks have settled."""

HOST = Sizes(warm_s=0.2, products_s=1.0, width=512, memory_bytes=2**27, message_bytes=2**20)
"""Beyond the caches of most processors, and of less than a moment."""

ROUNDS, LAUNCHES = 5, 2000

DEADLINE_S = 50.0
"""After which a process of a probe ends, whatever it waits for."""


@dataclass(frozen=True)
class Attained:
    """What one device attained; None is what was not measured.

    `device` is its UUID as `telemetry` spells it, None of the host. `flops`: FLOP/s of matrix products, in bf16 on a
    GPU and fp32 on the host, over `start_ns` to `end_ns` of the node's monotonic clock. `memory_bytes_per_s`: of a
    copy, read and written bytes together. `launch_s`: for the host to give the device one smallest piece of work.
    `all_reduce_bytes_per_s`: bus bandwidth as nccl-tests counts it, with all devices of the probe. `pairs`: by UUID of
    the other, or its number where it has none, one way while both send.
    """

    device: str | None
    versions: Mapping[str, str]
    flops: float
    start_ns: int
    end_ns: int
    memory_bytes_per_s: float
    launch_s: float
    all_reduce_bytes_per_s: float | None = None
    pairs: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Probed:
    """What came of a probe of several devices, in their order, and for each that attained nothing or lacks its links
    why, in a line."""

    attained: tuple[Attained | None, ...]
    errors: tuple[str | None, ...]


def probe(platform: str, devices: int, environment: Mapping[str, str] | None = None) -> Probed:
    """Probe the first devices of a kind, a module of `trainables.platforms`, all at once; takes up to `DEADLINE_S`.

    `environment` has variables for the processes, such as those that say which devices there are.
    """
    with tempfile.TemporaryDirectory(prefix="wattune-probe-") as folder:
        with tempfile.TemporaryFile("w+", dir=folder) as log:
            command = [sys.executable, "-m", "trainables.probes", platform, folder, str(devices)]
            paths = {"PYTHONPATH": os.pathsep.join(filter(None, [_root(), *sys.path]))}
            running = [
                subprocess.Popen(
                    [*command, str(rank)],
                    env=dict(os.environ) | paths | dict(environment or {}),
                    stdout=subprocess.DEVNULL,
                    stderr=log if rank == 0 else subprocess.DEVNULL,
                )
                for rank in range(devices)
            ]
            for process in running:
                process.wait()
        found = [_read(Path(folder, f"{rank}.json")) for rank in range(devices)]
    attained = [None if at is None else Attained(**at) for at, _ in found]
    errors = [
        error or _ended(process.returncode) if one is None or process.returncode else error
        for one, (_, error), process in zip(attained, found, running, strict=True)
    ]
    return Probed(tuple(attained), tuple(errors))


def rounds(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of `ranks` ranks once, in rounds of disjoint pairs (the circle method of round-robin tournaments)."""
    seats: list[int | None] = [*range(ranks), *([None] * (ranks % 2))]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        opposite = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(one, other), max(one, other)) for one, other in opposite if one is not None and other is not None]
        seats[1:] = [seats[-1], *seats[1:-1]]


def _root() -> str:
    return str(Path(__file__).parents[1])


def _ended(code: int) -> str:
    if code == -signal.SIGALRM:
        return f"it did not answer within {DEADLINE_S:.0f} s"
    return f"its process ended with {code}"


def _read(file: Path) -> tuple[dict[str, Any] | None, str | None]:
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError):
        return None, None
    return values["attained"], values["error"]


class _Bench:
    """One device of a probe, in a process of its own."""

    def __init__(self, platform: Platform, sizes: Sizes, rank: int, ranks: int) -> None:
        self.platform, self.sizes, self.rank, self.ranks = platform, sizes, rank, ranks
        self.device: torch.device = platform.device(0) if platform.ray_resource is None else platform.take(rank)

    def alone(self) -> Attained:
        """What the device attains by itself."""
        start_ns, end_ns, flops = self.products()
        return Attained(
            device=self.platform.identity(self.device),
            versions=self.platform.versions(self.device),
            flops=flops,
            start_ns=start_ns,
            end_ns=end_ns,
            memory_bytes_per_s=self.memory(),
            launch_s=self.launches(),
        )

    def products(self) -> tuple[int, int, float]:
        import torch

        width = self.sizes.width
        precision = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        factor, product = (torch.randn(width, width, device=self.device, dtype=precision) for _ in range(2))

        def multiply(seconds: float) -> tuple[int, int, int]:
            self.platform.synchronize()
            start_ns, times = time.monotonic_ns(), 0
            while time.monotonic_ns() < start_ns + seconds * 1e9:
                for _ in range(20):  # a wait for the device after each would be part of their time
                    torch.mm(factor, factor, out=product)
                self.platform.synchronize()
                times += 20
            return start_ns, time.monotonic_ns(), times

        multiply(self.sizes.warm_s)
        start_ns, end_ns, times = multiply(self.sizes.products_s)
        return start_ns, end_ns, 2.0 * width**3 * times / ((end_ns - start_ns) / 1e9)

    def memory(self) -> float:
        import torch

        ours, theirs = (torch.ones(self.sizes.memory_bytes, device=self.device, dtype=torch.uint8) for _ in range(2))
        return 2 * self.sizes.memory_bytes / self.usual(lambda: theirs.copy_(ours))

    def launches(self) -> float:
        import torch

        one = torch.zeros(1, device=self.device)

        def launch() -> float:
            self.platform.synchronize()
            began = time.perf_counter()
            for _ in range(LAUNCHES):
                one.add_(1)
            self.platform.synchronize()
            return (time.perf_counter() - began) / LAUNCHES

        return min(launch() for _ in range(ROUNDS))  # what else the host does only adds to it

    def links(self, folder: str) -> tuple[float, dict[int, float]]:
        """Bus bandwidth of an all-reduce, and bytes a second from and to each other rank. Collective."""
        import torch
        import torch.distributed as dist

        store = dist.FileStore(str(Path(folder, "store")), self.ranks)
        of_gpus = self.platform.ray_resource is not None
        dist.init_process_group(
            self.platform.backend,
            store=store,
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=DEADLINE_S),
            device_id=self.device if of_gpus else None,
        )
        size = self.sizes.message_bytes
        ours, theirs = (torch.zeros(size // 4, device=self.device) for _ in range(2))
        all_reduce_s = self.usual(lambda: dist.all_reduce(ours))
        pairs = {}
        for those in rounds(self.ranks):
            peer = next((sum(pair) - self.rank for pair in those if self.rank in pair), None)
            dist.barrier()
            if peer is not None:
                pairs[peer] = size / self.usual(lambda: _exchange(ours, theirs, peer))  # noqa: B023
        dist.barrier()
        return 2 * (1 - 1 / self.ranks) * size / all_reduce_s, pairs

    def usual(self, task: Callable[[], object]) -> float:
        """Median seconds of a task."""
        task()
        return statistics.median(self.platform.race(task, task)[0] for _ in range(ROUNDS))


def _exchange(ours: torch.Tensor, theirs: torch.Tensor, peer: int) -> None:
    import torch.distributed as dist

    both = [dist.P2POp(dist.isend, ours, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def main() -> None:
    """Probe as one rank of several, and write what it attained into `FOLDER/RANK.json`, with its links once known."""
    parser = argparse.ArgumentParser()
    parser.add_argument("platform")
    parser.add_argument("folder")
    parser.add_argument("ranks", type=int)
    parser.add_argument("rank", type=int)
    chosen = parser.parse_args()
    signal.alarm(round(DEADLINE_S))
    warnings.filterwarnings("ignore", module="torch")
    platform: Platform = importlib.import_module(f"trainables.platforms.{chosen.platform}").PLATFORM
    attained: Attained | None = None

    def write(error: str | None) -> None:
        half = Path(chosen.folder, f"{chosen.rank}.half")
        half.write_text(json.dumps({"attained": attained and asdict(attained), "error": error}))
        half.rename(Path(chosen.folder, f"{chosen.rank}.json"))

    try:
        sizes = HOST if platform.ray_resource is None else GPU
        bench = _Bench(platform, sizes, chosen.rank, chosen.ranks)
        attained = bench.alone()
        write("its links were not measured in time" if chosen.ranks > 1 else None)
        if chosen.ranks > 1:
            import torch.distributed as dist

            all_reduce, by_rank = bench.links(chosen.folder)
            names: list[str | None] = [None] * chosen.ranks
            dist.all_gather_object(names, attained.device)
            pairs = {names[peer] or str(peer): rate for peer, rate in by_rank.items()}
            attained = replace(attained, all_reduce_bytes_per_s=all_reduce, pairs=pairs)
            write(None)
            dist.destroy_process_group()
    except Exception as error:  # of torch or of what it drives, whatever it is
        write((str(error).strip() or type(error).__name__).splitlines()[0])


if __name__ == "__main__":
    main()
