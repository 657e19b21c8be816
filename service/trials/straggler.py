"""Which GPU holds the others of its trial up, by how much, and why.

In a step that all ranks end together, a rank that waits for nobody is the one that the others wait for. Of ranks with
the same work, those of one pipeline stage, that is the one with most time of its own: the step less the communication
that nothing hides, of which waiting is a part. The profiled steps tell it, the more surely the more of them there are,
for what befalls one of them does not befall all; what telemetry saw of the whole window tells why. What ranks were
seen to differ by while all was well can be taken off. A rank without another is held against itself, as it was, part by
part of its time: a host that keeps its GPU waiting now longer, now less, hides nothing of what the GPU takes longer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from search_spaces.layout import Layout
from service.result import RankRecord, SlowCause, Straggler
from service.student import below
from telemetry.windows.device import THERMAL, DeviceWindow
from trainables.breakdown import FEWEST, Breakdown

COST = 0.01
"""Share of a step from which on a GPU is worth a word."""

NOISE, NOISE_OF_COMMUNICATION = 0.002, 0.02
"""Standard deviation of a rank's own time in one step, taken to be this share of the step, where whole windows repeat
within 0.0012, and this share of the communication beside it, of which each piece takes now more, now less."""

WEIGHT = 4
"""As many degrees of freedom this has beside what several steps are measured to vary by (the moderated t-test of Smyth
2004, section 3): a few steps that happen to be alike prove less than they seem to."""

WANDER = 0.003
"""Standard deviation of what two GPUs at their power limit take apart in a second of steps, as a share of it, and less
by the root of a longer time: their clocks wander, from one half second to the next, which a few steps in a row do not
show (benchmarks/results/slowed_2xh200.txt: 0.0052 in 0.33 s, 0.0019 in 4 s)."""

LEAST_NOISE = 0.001
"""That of the mean of several steps is not taken to be less: ranks begin them apart by as much, in one order."""

NOISE_OF_HOSTS = 0.05
"""Likewise where processors compute, which ranks share with each other and with whatever else runs there."""

CONFIDENT = 0.99

SLOWER_CLOCK, HOT, CAPPED = 0.005, 0.01, 0.1
"""Shares from which on a clock is lower than that of the others, and heat or the power limit is what held it down."""

EXPLAINS = 0.5
"""A cause is one that this share of what the GPU takes longer is due to."""

PARTS: Mapping[SlowCause, Callable[[Breakdown], float]] = {
    SlowCause.HOST: lambda one: one.idle_s,
    SlowCause.LINK: lambda one: one.memory_copy_s,
    SlowCause.UNKNOWN: lambda one: one.compute_s,
}
"""Of a rank's own time: before its GPU has work, on the way to it, and on the GPU, for which there are several causes.
"""

Profiled = tuple[RankRecord, Breakdown]


def straggler(
    ranks: Sequence[RankRecord],
    windows: Sequence[DeviceWindow],
    layout: Layout,
    usual: Mapping[int, float] | None = None,
) -> Straggler | None:
    """The slowest rank of those that have others to be held against; None where none costs `COST`, beyond doubt.

    `windows` are of the devices that worked. `usual`: by rank, by which share of a step it takes longer than others
    when all is well, as `service.result.behind` tells it; only what exceeds it counts.
    """
    stages: dict[int, list[Profiled]] = {}
    for rank in ranks:
        if rank.breakdown is not None:
            stages.setdefault(rank.coordinates["pp"], []).append((rank, rank.breakdown))
    found = [_slowest(stage, usual or {}) for stage in stages.values() if len(stage) > 1]
    if not found:
        return None
    cost, slow, others = max(found, key=lambda one: one[0])
    confidence = _confidence(cost, _apart(slow, others[0]), others)
    of_others = [usual.get(other.rank, 0.0) for other, _ in others] if usual else [0.0]
    usual_s = ((usual or {}).get(slow[0].rank, 0.0) - statistics.median(of_others)) * slow[1].span_s
    more = {part: _more(seconds, slow, others) for part, seconds in PARTS.items()}
    more[SlowCause.UNKNOWN] -= usual_s
    part = max(more, key=more.__getitem__)
    return _told(cost, confidence, slow, others, windows, windows, layout, part, more[part])


def slowed(
    rank: RankRecord,
    window: Sequence[DeviceWindow],
    before: Sequence[RankRecord],
    windows: Sequence[DeviceWindow],
    layout: Layout,
) -> Straggler | None:
    """A rank that takes longer for one of `PARTS` than the same one `before`, in as many measurements of the same work,
    three at least; None where that costs less than `COST`, or is in doubt. Of several parts the surest is told.

    `window` is of its device now, `windows` are as they were then.
    """
    then = [(one, one.breakdown) for one in before if one.breakdown is not None]
    if rank.breakdown is None or len(then) < FEWEST:
        return None
    now, span_s = (rank, rank.breakdown), rank.breakdown.span_s
    found = []
    for part, seconds in PARTS.items():
        usual = [seconds(breakdown) / span_s for _, breakdown in then]
        cost = seconds(rank.breakdown) / span_s - statistics.median(usual)
        # One more draw from what was seen before: its deviation is theirs, and that of their mean.
        noise = max(LEAST_NOISE, statistics.stdev(usual) * math.sqrt(1 + 1 / len(usual)))
        if cost >= COST:
            found.append((cost / noise, cost, part))
    if not found:
        return None
    deviations, cost, part = max(found)
    confidence = below(deviations, len(then) - 1)
    return _told(cost, confidence, now, then, window, windows, layout, part, cost * span_s)


def _slowest(stage: Sequence[Profiled], usual: Mapping[int, float]) -> tuple[float, Profiled, list[Profiled]]:
    """The rank that waits least, by what share of a step the next one waits more, and the others, the next one first.

    Each waits as if it were not slower than usual.
    """

    def share(one: Profiled) -> float:
        rank, breakdown = one
        return breakdown.exposed_communication_s / breakdown.span_s + usual.get(rank.rank, 0.0)

    first, second, *rest = sorted(stage, key=share)
    return share(second) - share(first), first, [second, *rest]


def _apart(slow: Profiled, next_one: Profiled) -> list[float]:
    """By what share of a step one rank takes longer than the other, step by step; empty where steps were not kept."""
    span_s = slow[1].span_s
    return [(mine - other) / span_s for mine, other in zip(slow[0].own_s, next_one[0].own_s, strict=False)]


def _confidence(cost: float, apart: Sequence[float], others: Sequence[Profiled]) -> float:
    """The probability that a rank is slower at all which takes longer than the `others` by a share `cost` of a step, in
    single steps as `apart` says."""
    if others[0][0].device is None:
        return _normal(cost / (math.sqrt(2) * NOISE_OF_HOSTS))
    usual = statistics.median(one.exposed_communication_s / one.span_s for _, one in others)
    expected = math.sqrt(2) * (NOISE + NOISE_OF_COMMUNICATION * usual)
    wander = WANDER / math.sqrt(others[0][1].span_s * max(1, len(apart)))
    if len(apart) < FEWEST:
        return _normal(cost / max(expected, wander))
    freedom = len(apart) - 1 + WEIGHT
    variance = ((len(apart) - 1) * statistics.variance(apart) + WEIGHT * expected**2) / freedom
    return below(cost / max(LEAST_NOISE, wander, math.sqrt(variance / len(apart))), freedom)


def _told(
    cost: float,
    confidence: float,
    slow: Profiled,
    others: Sequence[Profiled],
    windows: Sequence[DeviceWindow],
    others_windows: Sequence[DeviceWindow],
    layout: Layout,
    part: SlowCause,
    longer_s: float,
) -> Straggler | None:
    """What is told of a slow rank that takes `longer_s` more for a part of a step, if it is worth a word."""
    if cost < COST or confidence < CONFIDENT:
        return None
    rank, device = slow[0], slow[0].device
    mine = next((window for window in windows if window.device == device), None) if device is not None else None
    of_others = {other.device for other, _ in others}
    theirs = [window for window in others_windows if window.device in of_others]
    if device is None:
        part = SlowCause.HOST  # which is what computes
    cause = part if part is not SlowCause.UNKNOWN else _of_gpu(slow, others, mine, theirs, layout, longer_s)
    return Straggler(rank.rank, rank.node_id, device, cost, cause, confidence)


def _more(seconds: Callable[[Breakdown], float], slow: Profiled, others: Sequence[Profiled]) -> float:
    """What a part of a rank's step takes longer than the others'."""
    return seconds(slow[1]) - statistics.median(seconds(one) for _, one in others)


def _of_gpu(
    slow: Profiled,
    others: Sequence[Profiled],
    mine: DeviceWindow | None,
    theirs: Sequence[DeviceWindow],
    layout: Layout,
    longer_s: float,
) -> SlowCause:
    """Why the slow rank's GPU takes `longer_s` more to compute than the others."""
    rank, breakdown = slow
    interruptions = [one.interrupted_s for one, _ in others if one.interrupted_s is not None]
    interrupted_s = rank.interrupted_s or 0.0
    if interruptions and interrupted_s - statistics.median(interruptions) > EXPLAINS * longer_s:
        return SlowCause.SHARED
    clocks = [one.mean_sm_clock_mhz for one in theirs if one.mean_sm_clock_mhz is not None]
    clock = None if mine is None else mine.mean_sm_clock_mhz
    if mine is not None and clock is not None and clocks:
        lower = 1 - clock / statistics.median(clocks)
        if lower > max(SLOWER_CLOCK, EXPLAINS * longer_s / breakdown.compute_s):
            if max(_share(mine, cause) for cause in THERMAL) > HOT:
                return SlowCause.HEAT
            return SlowCause.POWER_CAP if _share(mine, "power_cap") > CAPPED else SlowCause.CLOCK
    return SlowCause.EXPERT if layout.expert_parallel_size > 1 else SlowCause.UNKNOWN


def _share(window: DeviceWindow, cause: str) -> float:
    """Of the window, in which a cause held the clock down; 0 where nobody counts."""
    return (window.throttle_s.get(cause) or 0.0) / window.duration_s


def _normal(deviations: float) -> float:
    """The normal distribution function."""
    return 0.5 * (1 + math.erf(deviations / math.sqrt(2)))
