"""Why a GPU is slow: by which part of its steps takes longer, and by what telemetry saw of it beside others."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

from search_spaces.engines import ENGINES
from search_spaces.layout import Layout
from service.result import RankRecord, SlowCause
from telemetry.windows.device import POWER, THERMAL, DeviceWindow
from trainables.breakdown import Breakdown

SLOWER_CLOCK, HOT, CAPPED = 0.005, 0.01, 0.1
"""Shares from which on a clock is lower than that of the others, and heat or the power limit is what held it down."""

EXPLAINS = 0.5
"""A lower clock is the cause of what the GPU takes longer if this share of that is due to it."""

INTERRUPTED = 0.5
"""Other programs are the cause if kernels are interrupted for this share of what the rank takes longer: where it is so,
they are for one to 1.3 times as much, else for nothing (benchmarks/results/slowed_{1,2}xh200.txt)."""

OFTEN, MANY_INTERRUPTIONS = 0.25, 0.02
"""Where they take much of a GPU, most steps have the same kernels interrupted, which then count as usual. So a quarter
is enough where that alone is 2% of a step, five standard deviations of what nobody's programs interrupt in a second."""

PARTS: Mapping[SlowCause, Callable[[Breakdown], float]] = {
    SlowCause.HOST: lambda one: one.idle_s,
    SlowCause.LINK: lambda one: one.memory_copy_s,
    SlowCause.UNKNOWN: lambda one: one.compute_s,
}
"""Of a rank's own time: before its GPU has work, on the way to it, and on the GPU, for which there are several causes.
"""

Profiled = tuple[RankRecord, Breakdown]


def cause_of(
    slow: Profiled,
    others: Sequence[Profiled],
    windows: Sequence[DeviceWindow],
    others_windows: Sequence[DeviceWindow],
    layout: Layout,
    cost_s: float,
    part: SlowCause,
    longer_s: float,
) -> SlowCause:
    """Why a rank takes `cost_s` more for a step than the others, of which it takes `longer_s` in a part of it."""
    device = slow[0].device
    if device is None:
        return SlowCause.HOST  # which is what computes
    if _interrupted(slow, others, cost_s):
        return SlowCause.SHARED
    if part is not SlowCause.UNKNOWN:
        return part
    mine = next((window for window in windows if window.device == device), None)
    of_others = {other.device for other, _ in others}
    theirs = [window for window in others_windows if window.device in of_others]
    if mine is not None and explains(lower_clock(mine, theirs), longer_s / slow[1].compute_s):
        return held_by(mine)
    evenly = layout.engine in ENGINES and ENGINES[layout.engine].routes_evenly
    return SlowCause.EXPERT if layout.expert_parallel_size > 1 and not evenly else SlowCause.UNKNOWN


def lower_clock(mine: DeviceWindow, theirs: Sequence[DeviceWindow]) -> float:
    """By what share a GPU's clock is below the median of `theirs`; 0 where that is not known."""
    clocks = [one.mean_sm_clock_mhz for one in theirs if one.mean_sm_clock_mhz is not None]
    if mine.mean_sm_clock_mhz is None or not clocks:
        return 0.0
    return 1 - mine.mean_sm_clock_mhz / statistics.median(clocks)


def explains(lower: float, longer: float) -> bool:
    """Whether a clock that is lower by a share is why a GPU takes longer by another."""
    return lower > max(SLOWER_CLOCK, EXPLAINS * longer)


def held_by(window: DeviceWindow) -> SlowCause:
    """What held a GPU's clock down in a window in which it was lower."""
    if (share_of(window, THERMAL) or 0.0) > HOT:
        return SlowCause.HEAT
    return SlowCause.POWER_CAP if (share_of(window, POWER) or 0.0) > CAPPED else SlowCause.CLOCK


def share_of(window: DeviceWindow, causes: Collection[str]) -> float | None:
    """Of the window, in which the one of some causes that did so most held the clock down; None where nobody counts."""
    known = [seconds for cause in causes if (seconds := window.throttle_s.get(cause)) is not None]
    return max(known) / window.duration_s if known else None


def _interrupted(slow: Profiled, others: Sequence[Profiled], cost_s: float) -> bool:
    """Whether the slow rank's kernels are interrupted for so much longer than those of others that it is the cause."""
    of_others = [one.interrupted_s for one, _ in others if one.interrupted_s is not None]
    if slow[0].interrupted_s is None or not of_others:
        return False
    longer_s = slow[0].interrupted_s - statistics.median(of_others)
    return longer_s > (OFTEN if longer_s > MANY_INTERRUPTIONS * slow[1].span_s else INTERRUPTED) * cost_s
