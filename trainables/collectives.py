"""The program that measures how long collectives of a gang's devices take, alone and beside matrix products."""

from __future__ import annotations

import math
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from search_spaces.layout import Layout
from search_spaces.network import Collective, Curve, group_of
from trainables.platforms.base import Platform
from trainables.program import Place, Progress, RankProgram, RankReport, TrialRequest
from trainables.world import GangWorld, World

KINDS = (
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_REDUCE,
    Collective.ALL_TO_ALL,
    Collective.SEND,
    Collective.BROADCAST,
)
"""What is measured; those that take layouts most time come first."""

ROUNDS = 3
"""Times that each size is measured, for the median."""

ROUND_S, MOST = 4e-3, 20
"""Seconds that the collectives of one round take together, and the most of them."""

LONG_ENOUGH_S = 1e-4
"""Of a collective that is also measured beside matrix products: a shorter one is over before it is slowed."""

PRODUCTS_LAST = 2.0
"""How long matrix products last, in what the collectives beside them take alone."""

WIDTHS = {"cuda": 4096, "cpu": 128}
"""Of the square matrices that are multiplied, by torch's kind of device."""


@dataclass(frozen=True)
class Collectives(RankProgram):
    """Measures collectives of `sizes` bytes, ascending, in groups of all powers of two, and of all ranks.

    Like the groups of a layout, all groups of one size work at the same time. What has not begun after `budget_s`
    seconds is left out.
    """

    sizes: tuple[int, ...]
    budget_s: float

    @staticmethod
    def preload(layouts: Iterable[Layout]) -> list[str]:
        """This module, which imports torch."""
        return [__name__]

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        """Measure. Collective over the ranks, whose reports all have the same curves."""
        warnings.filterwarnings("ignore", module="torch")  # of names that torch 2.11 knows alone
        on_progress(Progress())
        world = GangWorld(request, place)
        device = place.platform.identity(world.device)
        on_progress(Progress("collectives", device))
        curves = tuple(_Bench(world, place.platform, self).curves())
        environment = {"torch": str(torch.__version__)} | place.platform.versions(world.device)
        return RankReport(world.rank, {}, device, {}, (), (), None, environment, curves=curves)


def groupings(nodes: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Groups of one size at a time, by the nodes that ranks are on: of neighbours, then of ranks of several nodes."""
    counts = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    across = sorted(range(len(nodes)), key=lambda rank: (counts[rank], nodes[rank]))
    for order, most in ((range(len(nodes)), len(nodes)), (across, len(set(nodes)))):
        for size in sorted({2**power for power in range(1, most.bit_length())} | {most} - {1}):
            yield [tuple(order[first : first + size]) for first in range(0, len(nodes) - size + 1, size)]


class _Bench:
    """One rank's part in measuring. All methods are collective over all ranks."""

    def __init__(self, world: World, platform: Platform, program: Collectives) -> None:
        self.world, self.platform, self.program, self.began = world, platform, program, time.monotonic()
        hosts = [""] * world.size
        dist.all_gather_object(hosts, socket.gethostname())
        self.nodes = [hosts.index(host) for host in hosts]
        count = program.sizes[-1] // torch.float32.itemsize
        self.ours, self.theirs = (torch.zeros(count, device=world.device) for _ in range(2))
        width = WIDTHS[world.device.type]
        precision = torch.bfloat16 if world.device.type == "cuda" else torch.float32
        self.factor, self.product = (torch.randn(width, width, device=world.device, dtype=precision) for _ in range(2))
        self.product_s = 0.1 * self.race(lambda: self.multiply(10), lambda: self.multiply(10))[0]

    def curves(self) -> Iterator[Curve]:
        """Of each kind, in all groupings."""
        for members in groupings(self.nodes):
            ranks = len(members[0])
            groups = [dist.new_group(list(group)) for group in members]
            mine = next((group for group, those in zip(groups, members, strict=True) if self.world.rank in those), None)
            together = min(group_of([self.nodes[rank] for rank in those], 1, None).together for those in members)
            for kind in KINDS:
                points = {} if kind == Collective.SEND and ranks > 2 else dict(self.points(kind, ranks, mine))
                if points:
                    alone, beside, slowed = zip(*points.values(), strict=True)
                    yield Curve(kind, ranks, together, tuple(points), alone, beside, slowed)

    def points(
        self, kind: Collective, ranks: int, group: ProcessGroup | None
    ) -> Iterator[tuple[int, tuple[float, float, float]]]:
        """Sizes with the seconds alone, those beside products, and how much slower the products are for them."""
        for size in self.program.sizes:
            if self.world.slowest(time.monotonic() - self.began) > self.program.budget_s:
                return
            once = self.task(kind, max(1, size // torch.float32.itemsize // ranks), ranks, group)
            (seconds,) = self.race(once, once)
            count = max(1, min(MOST, math.ceil(ROUND_S / seconds)))

            def several(once: Callable[[], object] = once, count: int = count) -> None:
                for _ in range(count):
                    once()

            alone = statistics.median(self.race(once, several)[0] for _ in range(ROUNDS)) / count
            yield size, (alone, *self.beside(once, several, count, alone))

    def beside(
        self, once: Callable[[], object], several: Callable[[], None], count: int, alone: float
    ) -> tuple[float, float]:
        """Of `several`, `count` collectives that take `alone` seconds each: see `points`."""
        if alone < LONG_ENOUGH_S:
            return alone, 0.0
        products = math.ceil(PRODUCTS_LAST * count * alone / self.product_s)
        rounds = [self.race(once, several, lambda: self.multiply(products)) for _ in range(ROUNDS)]
        both, multiplying = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
        return both / count, max(0.0, multiplying - products * self.product_s) / (count * alone)

    def race(self, first: Callable[[], object], *tasks: Callable[[], object]) -> list[float]:
        """As the platform's, of the slowest rank."""
        return [self.world.slowest(seconds) for seconds in self.platform.race(first, *tasks)]

    def multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self.factor, self.factor, out=self.product)

    def task(self, kind: Collective, count: int, ranks: int, group: ProcessGroup | None) -> Callable[[], object]:
        """One collective of `group`, of `count` numbers for each of its ranks; nothing for a rank without a group."""
        if group is None:
            return lambda: None
        return collective(kind, self.ours[: count * ranks], self.theirs[: count * ranks], group)


def collective(kind: Collective, ours: Tensor, theirs: Tensor, group: ProcessGroup) -> Callable[[], object]:
    """What does one collective of `group` with two buffers of its size, a piece for each rank."""
    count = ours.numel() // group.size()
    match kind:
        case Collective.ALL_GATHER:
            return lambda: dist.all_gather_into_tensor(theirs, ours[:count], group=group)
        case Collective.REDUCE_SCATTER:
            return lambda: dist.reduce_scatter_tensor(theirs[:count], ours, group=group)
        case Collective.ALL_TO_ALL:
            return lambda: dist.all_to_all_single(theirs, ours, group=group)
        case Collective.BROADCAST:
            return lambda: dist.broadcast(ours, group=group, group_src=0)
        case Collective.SEND if group.rank() == 0:
            return lambda: dist.send(ours, group=group, group_dst=1)
        case Collective.SEND:
            return lambda: dist.recv(ours, group=group, group_src=0)
        case _:
            return lambda: dist.all_reduce(ours, group=group)
