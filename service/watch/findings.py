"""What is found of a run in training, window by window, from its steps and its GPUs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.result import SlowCause
from service.student import next_deviation, student_t
from service.trials.slow_cause import HOT, explains, held_by, lower_clock, share_of
from service.watch.stamps import Pace
from telemetry.windows.device import THERMAL, DeviceWindow

WINDOWS = 6
"""Windows of which what is usual is made, once one has passed in which things settle."""

CONFIRMED = 2
"""Windows in a row in which a thing is so, or is so no more, before it is told."""

BEYOND = 2.0
"""How many times the 95% interval of one more window a step must be off what is usual: a day has thousands."""

SLOWER_STEP, SLOWER_RANK, SLOWER_CLOCK = 0.005, 0.02, 0.01
"""Shares from which on a step, a rank's own step and a GPU's clock are slower, however little they vary."""

BRAKED, CAPPED = 0.01, 0.1
"""Shares of a window in which the power brake, and the power limit more than usual, hold a clock down."""


@dataclass(frozen=True)
class Finding:
    """Something that is so of a run now.

    `kind` is `slow` (a rank or a GPU that the others wait for), `slower` (all steps), `heat`, `power` (the limit or the
    brake holds a clock down more than it did), `below` (the run attains less than the search measured) or `outdated`
    (another layout would do better now). `of`: of whom, a GPU's UUID, ``rank 3`` or ``run``.
    """

    kind: str
    of: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)


class Confirmed:
    """Findings that hold, each told once when it is sure, and once when it is over."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], int] = {}
        self._told: dict[tuple[str, str], Finding] = {}

    def of(self, kind: str) -> list[Finding]:
        """What was told and is not over, of a kind."""
        return [one for one in self._told.values() if one.kind == kind]

    def update(self, found: Iterable[Finding]) -> Iterator[tuple[Finding, bool]]:
        """What is to be told after another window, and whether it is over."""
        now = {(one.kind, one.of): one for one in found}
        for key in {**self._held, **now}:
            held = self._held.get(key, 0)
            self._held[key] = max(held, 0) + 1 if key in now else min(held, 0) - 1
            if key in now and self._held[key] >= CONFIRMED and key not in self._told:
                self._told[key] = now[key]
                yield now[key], False
            if self._held[key] <= -CONFIRMED:
                del self._held[key]
                if key in self._told:
                    yield self._told.pop(key), True


class Steps:
    """What a run's steps take, against what they took when it had settled."""

    def __init__(self) -> None:
        self._settled = False
        self._usual: list[float] = []
        self._devices: list[DeviceWindow] = []
        self._faster = 0

    def judge(self, pace: Pace, devices: Sequence[DeviceWindow] = ()) -> list[Finding]:
        """Of another window's steps. `devices`: the run's as far as they are known, in this window."""
        return [*self._slower(pace, devices), *_slow_rank(pace)]

    def _slower(self, pace: Pace, devices: Sequence[DeviceWindow]) -> Iterator[Finding]:
        if not self._settled:
            self._settled = True
            return
        if len(self._usual) < WINDOWS:
            self._usual.append(pace.step_s)
            self._devices.extend(devices)
            return
        usual = statistics.fmean(self._usual)
        expected = student_t(len(self._usual) - 1) * next_deviation(self._usual)
        bound = max(BEYOND * expected, SLOWER_STEP * usual)
        # What held it up from its beginning is gone: that was not what is usual.
        self._faster = self._faster + 1 if pace.step_s < usual - bound else 0
        if self._faster == CONFIRMED:
            self._usual, self._devices, self._faster = [], [], 0
        if pace.step_s > usual + bound:
            share = pace.step_s / usual - 1
            text = f"a step takes {pace.step_s:.4g} s, {share:.1%} more than the {usual:.4g} s that it took"
            details: dict[str, Any] = {"step_s": pace.step_s, "usual_s": usual, "bound_s": bound}
            slowest, lower = self._slowest(devices)
            if slowest is not None and lower > SLOWER_CLOCK and explains(lower, share):
                cause = held_by(slowest)
                text += f": {slowest.device}'s clock is {lower:.1%} lower than it was; {cause}"
                details |= {"device": slowest.device, "cause": str(cause)}
            yield Finding("slower", "run", text, details)

    def _slowest(self, devices: Sequence[DeviceWindow]) -> tuple[DeviceWindow | None, float]:
        """The GPU whose clock is most below what it was when the run had settled, and by what share."""
        lower = [lower_clock(one, [then for then in self._devices if then.device == one.device]) for one in devices]
        return max(zip(devices, lower, strict=True), key=lambda one: one[1], default=(None, 0.0))


def _slow_rank(pace: Pace) -> Iterator[Finding]:
    """The rank whose own steps take longest, where ranks do not end each together: then all take as long."""
    if len(pace.of_ranks) < 2:
        return
    rank = max(pace.of_ranks, key=pace.of_ranks.__getitem__)
    others = statistics.median(seconds for other, seconds in pace.of_ranks.items() if other != rank)
    cost = pace.of_ranks[rank] / others - 1
    if cost > SLOWER_RANK:
        text = f"rank {rank} takes {pace.of_ranks[rank]:.4g} s for a step, {cost:.1%} more than others"
        yield Finding("slow", f"rank {rank}", text, {"rank": rank, "cost": cost, "cause": str(SlowCause.UNKNOWN)})


class Devices:
    """What holds a run's GPUs back, against each other and, for the power limit, against when the run had settled."""

    def __init__(self) -> None:
        self._settled = False
        self._capped: dict[str, list[float]] = {}

    def judge(
        self, windows: Sequence[DeviceWindow], ranks: Mapping[str, int], stages: Mapping[int, int] | None = None
    ) -> list[Finding]:
        """Of another window. `ranks`: by UUID, of those that told. `stages`: by rank, the pipeline stage, whose GPUs
        alone have the same work; where that is not known all are taken to have it."""
        alike: dict[int | None, list[DeviceWindow]] = {}
        for one in windows:
            rank = ranks.get(one.device)
            alike.setdefault(None if rank is None else (stages or {}).get(rank), []).append(one)
        slow = [finding for some in alike.values() for finding in _slow_gpu(some, ranks)]
        found = [*_hot(windows), *self._limited(windows), *slow]
        self._settled = True
        return found

    def _limited(self, windows: Sequence[DeviceWindow]) -> Iterator[Finding]:
        for one in windows:
            braked, capped = share_of(one, ["hw_brake"]), share_of(one, ["power_cap"])
            if braked is not None and braked > BRAKED:
                text = f"{one.device}: the power brake held the clock down for {braked:.0%} of the time"
                yield Finding("power", one.device, text, {"cause": "hw_brake", "share": braked})
                continue
            usual = self._capped.setdefault(one.device, [])
            if capped is None or not self._settled:
                continue
            if len(usual) < WINDOWS:
                usual.append(capped)
            elif capped > statistics.fmean(usual) + CAPPED:
                text = (
                    f"{one.device}: the power limit held the clock down for {capped:.0%} of the time, "
                    f"{statistics.fmean(usual):.0%} before"
                )
                yield Finding("power", one.device, text, {"cause": "power_cap", "share": capped})


def _hot(windows: Sequence[DeviceWindow]) -> Iterator[Finding]:
    for one in windows:
        share = share_of(one, THERMAL)
        if share is not None and share > HOT:
            peak = one.peak_gpu_temp_c
            warm = "" if peak is None else f", at up to {peak:.0f} degC"
            text = f"{one.device}: heat held the clock down for {share:.0%} of the time{warm}"
            yield Finding("heat", one.device, text, {"share": share, "peak_gpu_temp_c": peak})


def _slow_gpu(windows: Sequence[DeviceWindow], ranks: Mapping[str, int]) -> Iterator[Finding]:
    """The GPU with the lowest clock, if that is below the others': where all wait for each other, for it."""
    clocks = {one.device: one.mean_sm_clock_mhz for one in windows if one.mean_sm_clock_mhz}
    if len(clocks) < 2:
        return
    slowest = min(clocks, key=clocks.__getitem__)
    others = statistics.median(clock for device, clock in clocks.items() if device != slowest)
    if clocks[slowest] >= (1 - SLOWER_CLOCK) * others:
        return
    (window,) = (one for one in windows if one.device == slowest)
    cause = held_by(window)
    cost = others / clocks[slowest] - 1
    rank = ranks.get(slowest)
    whose = slowest if rank is None else f"{slowest} (rank {rank})"
    text = f"{whose} runs at {clocks[slowest]:,.0f} MHz, others at {others:,.0f}: up to {cost:.1%} of a step; {cause}"
    yield Finding("slow", slowest, text, {"device": slowest, "rank": rank, "cost": cost, "cause": str(cause)})


def errors(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What errors a GPU had between two of its samples, in words; None if it had none that are known of."""
    told = []
    for column, words in (("ecc_uncorrected", "memory errors that were not corrected"), ("xid_errors", "XID errors")):
        grown = (now.get(column) or 0) - (before.get(column) or 0)
        if before.get(column) is not None and grown > 0:
            last = f", the last one {now['xid']}" if column == "xid_errors" and now.get("xid") is not None else ""
            told.append(f"{grown} {words}{last}")
    return "; ".join(told) or None
