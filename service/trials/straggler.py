"""Which GPU holds the others of its trial up, by how much, and why.

In a step that all ranks end together, a rank that waits for nobody is the one that the others wait for. Of ranks with
the same work, those of one pipeline stage, that is the one with most time of its own: the step less the communication
that nothing hides, of which waiting is a part. The profiled steps tell it, the more surely the more of them there are,
for what befalls one of them does not befall all; what its kernels are interrupted for is a second witness of other
programs on a GPU. What ranks were seen to differ by while all was well can be taken off.

A rank without another is held against itself, as it was, part by part: a host that keeps its GPU waiting now longer,
now less, hides nothing of what the GPU takes longer. Ranks are not held against each other so: one that computes for
longer, beside more of the communication, waits the less for its host, and the sum repeats twice as well as either.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from search_spaces.layout import Layout
from service.result import RankRecord, SlowCause, Straggler
from service.student import below, next_deviation
from service.trials.slow_cause import PARTS, Profiled, cause_of
from telemetry.windows.device import DeviceWindow
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

NOISE_OF_INTERRUPTIONS = 0.004
"""Likewise of what kernels of two GPUs are interrupted for, while nobody else uses either."""

LEAST_NOISE = 0.001
"""That of the mean of several steps is not taken to be less: ranks begin them apart by as much, in one order."""

NOISE_OF_HOSTS = 0.05
"""Likewise where processors compute, which ranks share with each other and with whatever else runs there."""

CONFIDENT = 0.995
"""Of every way to find a slow rank."""


@dataclass(frozen=True)
class _Slow:
    """A rank that takes longer than `others`, by a share `cost` of a step, and how surely it does at all."""

    slow: Profiled
    others: Sequence[Profiled]
    cost: float
    confidence: float

    @property
    def sure(self) -> bool:
        """Whether it is worth a word."""
        return self.cost >= COST and self.confidence >= CONFIDENT


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
    slowest = [_slowest(stage, usual or {}) for stage in stages.values() if len(stage) > 1]
    found = [one for one in slowest if one.sure]
    if not found:
        return None
    one = max(found, key=lambda each: each.cost)
    slow, others = one.slow, one.others
    of_others = [usual.get(other.rank, 0.0) for other, _ in others] if usual else [0.0]
    usual_s = ((usual or {}).get(slow[0].rank, 0.0) - statistics.median(of_others)) * slow[1].span_s
    more = {part: _more(seconds, slow, others) for part, seconds in PARTS.items()}
    more[SlowCause.UNKNOWN] -= usual_s
    part = max(more, key=more.__getitem__)
    return _told(one, windows, windows, layout, part, more[part])


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
        noise = max(LEAST_NOISE, next_deviation(usual))
        if cost >= COST:
            found.append((cost / noise, cost, part))
    if not found:
        return None
    deviations, cost, part = max(found)
    one = _Slow(now, then, cost, below(deviations, len(then) - 1))
    return _told(one, window, windows, layout, part, cost * span_s) if one.sure else None


def _slowest(stage: Sequence[Profiled], usual: Mapping[int, float]) -> _Slow:
    """The rank that waits least, as if it were not slower than usual. If that is in doubt, the one that loses most by
    that and by what its kernels are interrupted for, on average: what others take of a GPU is seen twice."""

    def own(one: Profiled) -> float:
        rank, breakdown = one
        return -breakdown.exposed_communication_s / breakdown.span_s - usual.get(rank.rank, 0.0)

    def lost(one: Profiled) -> float:
        rank, breakdown = one
        return (own(one) + interrupted[rank.rank] / breakdown.span_s) / 2

    slow, others, cost = _first(stage, own)
    deviation, freedom = _deviation(slow, others)
    waits_least = _Slow(slow, others, cost, _below(cost / deviation, freedom))
    interrupted = {rank.rank: rank.interrupted_s for rank, _ in stage if rank.interrupted_s is not None}
    if waits_least.sure or len(interrupted) < len(stage):
        return waits_least
    slow, others, cost = _first(stage, lost)
    deviation, freedom = _deviation(slow, others)
    both = math.hypot(deviation, NOISE_OF_INTERRUPTIONS / math.sqrt(_seconds(slow))) / 2
    return _Slow(slow, others, cost, _below(cost / both, freedom))


def _first(stage: Sequence[Profiled], share: Callable[[Profiled], float]) -> tuple[Profiled, list[Profiled], float]:
    """The rank with the largest share, the others, the next one first, and by how much that one's is smaller."""
    first, second, *rest = sorted(stage, key=share, reverse=True)
    return first, [second, *rest], share(first) - share(second)


def _deviation(slow: Profiled, others: Sequence[Profiled]) -> tuple[float, int | None]:
    """The standard deviation of by what share of a step a rank takes longer than the next one, in as many steps as were
    profiled, and its degrees of freedom, None of one that is known beforehand."""
    if slow[0].device is None:
        return math.sqrt(2) * NOISE_OF_HOSTS, None
    usual = statistics.median(one.exposed_communication_s / one.span_s for _, one in others)
    expected = math.sqrt(2) * (NOISE + NOISE_OF_COMMUNICATION * usual)
    wander = WANDER / math.sqrt(_seconds(slow))
    apart = [(mine - other) / slow[1].span_s for mine, other in zip(slow[0].own_s, others[0][0].own_s, strict=False)]
    if len(apart) < FEWEST:
        return max(expected, wander), None
    freedom = len(apart) - 1 + WEIGHT
    variance = ((len(apart) - 1) * statistics.variance(apart) + WEIGHT * expected**2) / freedom
    return max(LEAST_NOISE, wander, math.sqrt(variance / len(apart))), freedom


def _seconds(one: Profiled) -> float:
    """Of all its profiled steps."""
    return one[1].span_s * max(1, len(one[0].own_s))


def _told(
    one: _Slow,
    windows: Sequence[DeviceWindow],
    others_windows: Sequence[DeviceWindow],
    layout: Layout,
    part: SlowCause,
    longer_s: float,
) -> Straggler:
    """What is told of a slow rank that takes `longer_s` more for a part of a step."""
    rank, breakdown = one.slow
    cost_s = one.cost * breakdown.span_s
    cause = cause_of(one.slow, one.others, windows, others_windows, layout, cost_s, part, longer_s)
    return Straggler(rank.rank, rank.node_id, rank.device, one.cost, cause, one.confidence)


def _more(seconds: Callable[[Breakdown], float], slow: Profiled, others: Sequence[Profiled]) -> float:
    """What a part of a rank's step takes longer than the others'."""
    return seconds(slow[1]) - statistics.median(seconds(one) for _, one in others)


def _below(deviations: float, freedom: int | None) -> float:
    """The probability of less, by Student's t with so many degrees of freedom, or by the normal distribution."""
    return 0.5 * (1 + math.erf(deviations / math.sqrt(2))) if freedom is None else below(deviations, freedom)
