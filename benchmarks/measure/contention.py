"""By how much matrix products take longer beside a collective of NCCL's, and beside what stands in for it in slices,
and how long the CPU needs for a call of either.

    python -m benchmarks.measure.contention [--sizes MIB ...] [--kinds KIND ...] [--rounds N]

On two GPUs, a process each. In each round products run alone, beside NCCL's collective, and beside the stand-in's,
which takes as long as NCCL's took alone. A message (`send`) is one that its receiver awaits for `AWAITED_S`, as a
pipeline's rank does while it computes. Prints the medians of the rounds: by how much longer the products took, as a
share of the collective's own time, how long the stand-in took in what it was to, and microseconds until a call returns.
GPUs are at their power limit by then, as they are in training: products run for some seconds before.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore
from torch.multiprocessing.spawn import spawn

from search_spaces.network import Collective
from service.answers.tables import render
from trainables.collectives import KINDS, PRODUCTS_LAST, WIDTHS, collective
from trainables.platforms.base import Platform
from trainables.platforms.cuda import PLATFORM as CUDA
from trainables.platforms.cuda import SPIN_HZ
from trainables.standin.group import Peers
from trainables.standin.join import BACKEND, register
from trainables.standin.ledger import Ledger

Found = TypeVar("Found")
"""What is found of one point."""

RANKS = 2
AWAITED_S = 5e-3
"""How long a message's receiver waits for its sender."""

CALLS, HELD_S = 100, 0.05
"""Calls that are timed on the CPU while the GPU is held up."""

ROUND_S = 0.05
"""Seconds that the collectives of a round take together."""

HEATED_S = 5.0
"""Seconds of products before anything is measured."""


@dataclass(frozen=True)
class Contention:
    """Of one collective of `size` bytes: seconds that NCCL's takes alone, and by what share of them products beside it
    take longer, likewise beside the stand-in, which took `paced` times as long as it was to. A call took `called_s`
    seconds, of the stand-in `stood_in_s`."""

    kind: Collective
    size: int
    seconds: float
    nccl: float
    standin: float
    paced: float
    called_s: float
    stood_in_s: float


class Bench:
    """One rank's part in measuring. All methods are collective over all ranks."""

    def __init__(self, platform: Platform, device: torch.device, largest: int, round_s: float = ROUND_S) -> None:
        """`largest`: bytes of the largest collective."""
        self.platform, self.device, self.round_s = platform, device, round_s
        self.takes: dict[tuple[Collective, int], float] = {}
        register(Peers(device, lambda kind, size, ranks, beside: self.takes[kind, size], Ledger()))
        world = dist.group.WORLD
        assert world is not None
        self.real: ProcessGroup = world
        self.stood_in: ProcessGroup = dist.new_group(backend=BACKEND)
        self.ours, self.theirs = (torch.zeros(largest // 4, device=device) for _ in range(2))
        width, dtype = WIDTHS[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
        self.factor, self.product = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
        self.product_s = self.race(lambda: self.multiply(1), lambda: self.multiply(10))[0] / 10

    def heat(self, seconds: float) -> None:
        """Multiply for so long."""
        for _ in range(self.agreed(seconds / self.round_s)):
            self.race(lambda: None, lambda: self.multiply(self.agreed(self.round_s / self.product_s)))

    def measure(self, kind: Collective, size: int, rounds: int) -> Contention:
        """One point, of which every round has all three ways, so that what drifts is in all of them."""
        buffers = self.ours[: size // 4], self.theirs[: size // 4]
        count, alone_s = self.alone(kind, buffers, rounds)
        self.takes[kind, size] = self.from_first(alone_s)
        products = self.agreed(PRODUCTS_LAST * count * alone_s / self.product_s)
        longer: dict[ProcessGroup, list[float]] = {self.real: [], self.stood_in: []}
        paced = []
        for _ in range(rounds):
            (multiplying,) = self.race(lambda: self.multiply(1), lambda: self.multiply(products))
            for group, seconds in longer.items():
                seconds.append(self.race_collectives(kind, buffers, group, count, products)[1] - multiplying)
            paced.append(self.race_collectives(kind, buffers, self.stood_in, count)[0])
        of_all = count * alone_s
        nccl, standin = (statistics.median(seconds) / of_all for seconds in longer.values())
        called = [self.called_s(rounds, kind, buffers, group) for group in longer]
        return Contention(kind, size, alone_s, nccl, standin, statistics.median(paced) / of_all, *called)

    def alone(self, kind: Collective, buffers: tuple[Tensor, Tensor], rounds: int) -> tuple[int, float]:
        """How many of NCCL's collectives a round takes, and the seconds of one, in the median of rounds."""
        (once_s,) = self.race(self.task(kind, buffers, self.real, 1), self.task(kind, buffers, self.real, 1))
        count = self.agreed(self.round_s / once_s)
        return count, self.median(rounds, lambda: self.race_collectives(kind, buffers, self.real, count)[0]) / count

    def measure_awaited(self, size: int, rounds: int) -> Contention:
        """The same of a message that comes late, which keeps its receiver's processors from then on when it is awaited.
        Only the receiver's products tell."""
        message, products = self.ours[: size // 4], self.agreed(2 * AWAITED_S / self.product_s)
        receives = self.real.rank() == 0

        def exchange() -> None:
            if receives:
                dist.recv(message, group=self.real, group_src=1)
                return
            torch.cuda._sleep(round(SPIN_HZ * AWAITED_S))
            dist.send(message, group=self.real, group_dst=0)

        def multiply() -> None:
            self.multiply(products if receives else 1)

        def wait() -> None:
            from trainables.standin.device import spin

            spin(Collective.SEND, AWAITED_S, torch.cuda.current_stream())

        alone_s = self.median(rounds, lambda: self.race(exchange, exchange)[0])
        longer: dict[Callable[[], None], list[float]] = {exchange: [], wait: []}
        for _ in range(rounds):
            (multiplying,) = self.race(lambda: self.multiply(1), multiply)
            for task, seconds in longer.items():
                seconds.append(self.race(lambda: self.multiply(1), task, multiply)[1] - multiplying)
        nccl, standin = (statistics.median(seconds) / AWAITED_S for seconds in longer.values())
        paced = self.median(rounds, lambda: self.race(lambda: self.multiply(1), wait)[0]) / AWAITED_S
        called = [self.platform.handed_s(task, HELD_S) for task in longer]
        return Contention(Collective.SEND, size, alone_s, nccl, standin, paced, *called)

    def called_s(self, rounds: int, kind: Collective, buffers: tuple[Tensor, Tensor], group: ProcessGroup) -> float:
        """Seconds of the CPU for one of several calls, while the device is held up."""
        calls = self.task(kind, buffers, group, CALLS)
        return self.median(rounds, lambda: self.platform.handed_s(calls, HELD_S)) / CALLS

    def race_collectives(
        self, kind: Collective, buffers: tuple[Tensor, Tensor], group: ProcessGroup, count: int, products: int = 0
    ) -> list[float]:
        """Seconds of `count` collectives and, if there are any, of the products beside them."""
        beside = [lambda: self.multiply(products)] if products else []
        return self.race(self.task(kind, buffers, group, 1), self.task(kind, buffers, group, count), *beside)

    def race(self, first: Callable[[], object], *tasks: Callable[[], object]) -> list[float]:
        """As the platform's, of the slowest rank."""
        seconds = torch.tensor(self.platform.race(first, *tasks), device=self.device, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return [float(each) for each in seconds]

    def multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self.factor, self.factor, out=self.product)

    def agreed(self, count: float) -> int:
        """A number of times, at least 1, which ranks must not each find for themselves: the first one's."""
        return math.ceil(self.from_first(max(1.0, count)))

    def from_first(self, value: float) -> float:
        told = torch.tensor(value, device=self.device, dtype=torch.float64)
        dist.broadcast(told, 0)
        return told.item()

    @staticmethod
    def median(rounds: int, seconds: Callable[[], float]) -> float:
        return statistics.median(seconds() for _ in range(rounds))

    @staticmethod
    def task(kind: Collective, buffers: tuple[Tensor, Tensor], group: ProcessGroup, count: int) -> Callable[[], object]:
        once = collective(kind, *buffers, group)

        def several() -> None:
            for _ in range(count):
                once()

        return several


def table(found: Iterable[Contention]) -> str:
    """A row for each kind and size."""
    rows = [
        [
            f"{one.kind} of {one.size / 2**20:g} MiB",
            f"{one.seconds * 1e3:.3f}",
            *(f"{share:.2f}" for share in (one.nccl, one.standin, one.paced)),
            *(f"{seconds * 1e6:.0f}" for seconds in (one.called_s, one.stood_in_s)),
        ]
        for one in found
    ]
    header = ["beside", "NCCL's ms", "products longer by", "beside the stand-in", "which took"]
    return render([*header, "NCCL's us a call", "stand-in's"], rows)


def points(bench: Bench, kinds: Sequence[Collective], sizes: Sequence[int], rounds: int) -> list[Contention]:
    """Of each kind and size."""
    return [
        bench.measure_awaited(size, rounds) if kind is Collective.SEND else bench.measure(kind, size, rounds)
        for kind in kinds
        for size in sizes
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 256], metavar="MIB")
    parser.add_argument("--kinds", type=Collective, nargs="+", choices=KINDS, default=KINDS[:5], metavar="KIND")
    parser.add_argument("--rounds", type=int, default=9)
    start(parser, parser.parse_args(argv), 2**20, points, table)


def start(
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
    unit: int,
    measure: Callable[[Bench, Sequence[Collective], Sequence[int], int], list[Found]],
    table: Callable[[list[Found]], str],
) -> None:
    """Have a process for each of two GPUs `measure` kinds of collectives of some sizes, given in units of so many
    bytes, in some rounds; the first one prints the `table`."""
    if min(*given.sizes, given.rounds) < 1:
        parser.error("--sizes and --rounds must be positive")
    if torch.version.hip is not None or torch.cuda.device_count() < RANKS:
        parser.exit(2, f"{parser.prog}: takes {RANKS} GPUs of NVIDIA's; here are {torch.cuda.device_count()}\n")
    os.environ.update(CUDA.environment)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sizes = [unit * size for size in given.sizes]
    spawn(_rank, (store.port, (given.kinds, sizes, given.rounds), measure, table), nprocs=RANKS)


def _rank(
    number: int,
    port: int,
    given: tuple[Sequence[Collective], Sequence[int], int],
    measure: Callable[[Bench, Sequence[Collective], Sequence[int], int], list[Found]],
    table: Callable[[list[Found]], str],
) -> None:
    """One of the two processes."""
    warnings.filterwarnings("ignore", module="torch")  # of names that torch 2.11 knows alone
    device = CUDA.take(number)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(CUDA.backend, store=store, rank=number, world_size=RANKS)
    bench = Bench(CUDA, device, max(given[1]))
    bench.heat(HEATED_S)
    found = measure(bench, *given)
    if number == 0:
        print(torch.cuda.get_device_name(device), "torch", torch.__version__, time.strftime("%Y-%m-%d"))
        print(table(found))
    dist.destroy_process_group(bench.real)


if __name__ == "__main__":
    main()
