"""Slows one of a trial's devices by a drawn share while the trial trains, window after window: a program for the ranks,
and one beside each that competes with it.

    python -m benchmarks.measure.slowing FOLDER RANK DRAWS

competes with a rank, by a JSON of `Draws`, and ends with the trial. On a GPU it has matrix products of `BURST_S` done
there now and then: no setting of the GPU is touched. On CPU it halts the rank for a while, as a cgroup's
quota does. How often takes which share is measured first, in windows of their own. What the ranks tell of each window
is in FOLDER, which has nothing of what is drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import ROOT
from trainables.breakdown import Profile, mean
from trainables.leftovers import end_with_parent
from trainables.program import InvalidTrial, Place, Progress, RankReport, TrialRequest
from trainables.rank import Rank
from trainables.training import Training
from trainables.world import GangWorld

CLEAN, NEAR = 0.38, 0.5
"""Of the windows that are drawn, this share is without a slow rank; of the others this share is near `AIMED`, the rest
anywhere, all shares of the same ratio being as likely."""

AIMED = (0.018, 0.024)

BURST_S, OFTEN_S = 0.0006, 0.02
"""How long a rank is kept from its device at once, and how often while it is found out what that costs: in 2 to 3% of
the time, for oftener is not as much dearer."""

PROFILES, PROFILES_ALONE = 3, 2
"""Of some steps each in a window, where GPUs compute: as long as it takes the clocks of several to even out, and fewer
of one alone, whose clock is held against nobody's."""

HALT_S = 0.004
"""How long a rank on CPU is halted at once, which costs just that."""

PRODUCT = 4096


@dataclass(frozen=True)
class Draws:
    """Who is slowed in which window, and by what share of its time: drawn from `least` to `most`.

    In the first `history` windows nobody is. In the next `calibrating` ones, for each rank in turn, that one is slowed
    often enough to tell what it costs to do so once. If there are any, `listed` say in place of a draw which rank is
    slowed in each window from then on, None for nobody, and by what share.
    """

    seed: int
    ranks: int
    least: float
    most: float
    history: int
    calibrating: int
    listed: Sequence[tuple[int | None, float]] = ()

    @property
    def first(self) -> int:
        """The first window that is drawn."""
        return self.history + self.calibrating * self.ranks

    def calibrated(self, window: int) -> int | None:
        """The rank of which it is found out in a window what it costs to slow it; None in all others."""
        return (window - self.history) // self.calibrating if self.history <= window < self.first else None

    def drawn(self, window: int) -> tuple[int | None, float]:
        """The slow rank, None where there is none, and by which share it is to take longer."""
        if self.listed:
            beyond = not self.first <= window < self.first + len(self.listed)
            return (None, 0.0) if beyond else self.listed[window - self.first]
        draw = random.Random(f"{self.seed} {window}")
        if window < self.first or draw.random() < CLEAN:
            return None, 0.0
        rank = draw.randrange(self.ranks)
        low, high = AIMED if self.least < AIMED[0] < self.most and draw.random() < NEAR else (self.least, self.most)
        return rank, float(low * (high / low) ** draw.random())


class Board:
    """What ranks and those that compete with them see of each other: the window, and each rank's seconds in the last.

    A file of `folder`, of 2 + 2 `ranks` numbers: whether the trial is over, the window, and for each rank the last one
    that it has ended with its own seconds of a step there.
    """

    def __init__(self, folder: Path, ranks: int = 0) -> None:
        """Of `ranks` ranks for whoever makes it; for others what there is."""
        path = folder / "board"
        if ranks:
            np.full(2 + 2 * ranks, -1.0).tofile(path)
        self._numbers = np.memmap(path, dtype=np.float64, mode="r+")

    @property
    def over(self) -> bool:
        return self._numbers[0] > 0

    def end(self) -> None:
        self._numbers[0] = 1.0

    @property
    def window(self) -> int:
        return int(self._numbers[1])

    def begin(self, window: int) -> None:
        self._numbers[1] = window

    def tell(self, rank: int, window: int, seconds: float) -> None:
        self._numbers[2 + 2 * rank : 4 + 2 * rank] = window, seconds

    def told(self, rank: int) -> tuple[int, float]:
        """The last window that the rank has ended, -1 before the first, and its own seconds of a step there."""
        window, seconds = self._numbers[2 + 2 * rank : 4 + 2 * rank]
        return int(window), float(seconds)


@dataclass(frozen=True)
class Watched(Training):
    """Trains, and after its own window for `seconds` in windows of some profiled steps each, `fewest` at least, told in
    `folder`."""

    folder: str
    seconds: float
    fewest: int

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        """Raises `InvalidTrial` where a step cannot be profiled, and what `Training.run` does."""
        return WatchedRank(self, request, place, on_progress, GangWorld).watched(place)


class WatchedRank(Rank):
    """One rank of a training that goes on in windows."""

    training: Watched

    def watched(self, place: Place) -> RankReport:
        """What `Rank.report` is, and FOLDER/RANK.jsonl: what the rank is, and a line for each window as it ends.
        Collective."""
        folder, rank = Path(self.training.folder), self.world.rank
        introduce(folder, rank, place)
        report = super().report()
        board, window, began = Board(folder), 0, time.monotonic()
        self.enter("watched")
        with (folder / f"{rank}.jsonl").open("a", buffering=1) as file:
            head = {name: getattr(report, name) for name in ("device", "coordinates", "environment")}
            file.write(json.dumps(head) + "\n")
            while window < self.training.fewest or self.world.slowest(time.monotonic() - began) < self.training.seconds:
                began_ns = time.monotonic_ns()
                if rank == 0:
                    board.begin(window)
                self.step()  # partly as it was before
                self.platform.synchronize()
                start_ns = time.monotonic_ns()
                profile = self._profiles(window)
                stamps = {"began_ns": began_ns, "start_ns": start_ns, "end_ns": time.monotonic_ns()}
                file.write(json.dumps({"window": window, **stamps, **asdict(profile)}) + "\n")
                board.tell(rank, window, statistics.median(profile.own_s))
                window += 1
        self.world.slowest(0.0)
        if rank == 0:
            board.end()
        return report

    def _profiles(self, window: int) -> Profile:
        """As one, of all their steps."""
        times = PROFILES if self.layout.num_gpus > 1 else PROFILES_ALONE
        if self.platform.profiler_device is None:
            times = 1
        profiles = [self.profiled(f"window {window}") for _ in range(times)]
        breakdowns = [one.breakdown for one in profiles if one.breakdown is not None]
        if len(breakdowns) < times:
            raise InvalidTrial(next((one.problem for one in profiles if one.problem), "another rank's profiler failed"))
        interrupted = [one.interrupted_s for one in profiles if one.interrupted_s is not None]
        return Profile(
            mean(breakdowns),
            None,
            sum(one.time_s for one in profiles),
            tuple(own_s for one in profiles for own_s in one.own_s),
            statistics.fmean(interrupted) if len(interrupted) == times else None,
            tuple(alone_s for one in profiles for alone_s in one.compute_alone_s),
        )


def introduce(folder: Path, rank: int, place: Place) -> None:
    """Tell whoever competes with a rank where this process is it."""
    device = place.devices[place.local_rank] if place.devices else None
    (folder / f"{rank}.new").write_text(json.dumps({"pid": os.getpid(), "device": device}))
    (folder / f"{rank}.new").rename(folder / f"{rank}.json")


@contextlib.contextmanager
def competing(draws: Draws) -> Iterator[Path]:
    """What competes with each rank of a trial that is to begin, and the folder that its ranks need."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ending:
        Board(Path(name), draws.ranks)
        for rank in range(draws.ranks):
            command = [sys.executable, "-m", "benchmarks.measure.slowing", name, str(rank), json.dumps(asdict(draws))]
            process = subprocess.Popen(command, cwd=ROOT)
            ending.callback(process.wait)
            ending.callback(process.kill)
        yield Path(name)


def compete(folder: Path, rank: int, draws: Draws) -> None:
    """Slow the rank as it is drawn, until the trial is over."""
    board, about = Board(folder), folder / f"{rank}.json"
    while not about.exists():
        time.sleep(0.05)
    who = json.loads(about.read_text())
    burst = _halting(who["pid"]) if who["device"] is None else _multiplying(who["device"])
    clean: list[float] = []
    slowed: list[float] = []
    before, chance = -1, random.Random(rank)
    while not board.over:
        window = board.window
        if window != before:
            ended, seconds = board.told(rank)
            if 0 < ended < draws.history:
                clean.append(seconds)
            elif draws.calibrated(ended) == rank:
                slowed.append(seconds)
            before = window
        slow, share = draws.drawn(window)
        if draws.calibrated(window) == rank:
            every_s = OFTEN_S
        elif slow == rank:
            every_s = _cost_s(clean, slowed) * (1 + share) / share
        else:
            time.sleep(0.001)
            continue
        due = time.monotonic() + every_s * chance.uniform(0.8, 1.2)
        burst()
        while (left := due - time.monotonic()) > 0 and board.window == window and not board.over:
            time.sleep(min(left, 0.002))


def _cost_s(clean: Sequence[float], slowed: Sequence[float]) -> float:
    """Seconds of a rank's own that it loses each time, by those of its steps, clean and slowed every `OFTEN_S`."""
    if not clean or not slowed:
        return HALT_S
    return OFTEN_S * max(0.01, 1 - statistics.median(clean) / statistics.median(slowed))


def _multiplying(device: str) -> Callable[[], object]:
    """What keeps others from the GPU for `BURST_S`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = device
    factor, product = (torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def multiply(times: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            torch.mm(factor, factor, out=product)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    multiply(20)
    each_s = min(multiply(10) for _ in range(10)) / 10
    times = max(1, round(BURST_S / each_s))
    return partial(multiply, times)


def _halting(pid: int) -> Callable[[], None]:
    """What halts a process for `HALT_S`."""

    def halt() -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(HALT_S)
        finally:
            os.kill(pid, signal.SIGCONT)

    return halt


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("draws", type=json.loads)
    given = parser.parse_args(argv)
    end_with_parent()
    with contextlib.suppress(ProcessLookupError):  # the rank has ended
        compete(given.folder, given.rank, Draws(**given.draws))


if __name__ == "__main__":
    main()
