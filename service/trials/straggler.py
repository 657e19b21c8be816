"""Which GPU holds the others of its trial up, by how much, and why.

Ranks with the same work, those of one pipeline stage, are held against each other in two ways. In a step that all end
together, the one that waits for nobody is the one that the others wait for: it has most time of its own, which is the
step less the communication that nothing hides, of which waiting is a part. The profiled steps tell it, the more surely
the more of them there are, for what befalls one of them does not befall all. Hosts that keep their GPUs waiting now
longer, now less, hide a slow GPU so. Then it is told by what it computes, less what that takes longer beside
communication: a GPU that others wait for waits less itself, so that more of its processors compute, and by the bare
time of its kernels it looks faster than it is.

What kernels are interrupted for is a second witness of other programs on a GPU. What ranks were seen to differ by while
all was well can be taken off.

A rank without another is held against itself, as it was, part by part.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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

NOISE_BESIDE = 0.02
"""Standard deviation of `trainables.breakdown.BESIDE` among machines and layouts."""

NOISE_OF_INTERRUPTIONS = 0.004
"""Likewise as `WANDER`, of what kernels of two GPUs are interrupted for, while nobody else uses either."""

LEAST_NOISE = 0.001
"""That of the mean of several steps is not taken to be less: ranks begin them apart by as much, in one order."""

NOISE_OF_HOSTS = 0.05
"""Likewise where processors compute, which ranks share with each other and with whatever else runs there."""

CONFIDENT = 0.997
"""Of every way to find a slow rank."""


@dataclass(frozen=True)
class _Slow:
    """A rank that takes longer than `others`, by a share `cost` of a step of that standard `deviation`, which has so
    many degrees of `freedom`, None if it is known beforehand; `computing` if it does so on its GPU."""

    slow: Profiled
    others: Sequence[Profiled]
    cost: float
    deviation: float
    freedom: int | None
    computing: bool = False

    @property
    def deviations(self) -> float:
        return self.cost / self.deviation

    @property
    def confidence(self) -> float:
        """How surely it takes longer at all."""
        return _below(self.deviations, self.freedom)

    @property
    def sure(self) -> bool:
        """Whether it is worth a word."""
        return self.cost >= COST and self.confidence >= CONFIDENT


def straggler(
    ranks: Sequence[RankRecord],
    windows: Sequence[DeviceWindow],
    layout: Layout,
    before: Sequence[Sequence[RankRecord]] = (),
) -> Straggler | None:
    """The slowest rank of those that have others to be held against; None where none costs `COST`, beyond doubt.

    `windows` are of the devices that worked. `before`: measurements of the same work by the same ranks while all was
    well; only what exceeds what they differ by there counts, and hosts are taken to vary as they do there.
    """
    found = [one for stage in _stages(ranks, before) for one in _slowest(stage) if one.sure]
    if not found:
        return None
    one = max(found, key=lambda each: each.deviations)
    more = {part: _more(seconds, one.slow, one.others) for part, seconds in PARTS.items()}
    more[SlowCause.UNKNOWN] += one.cost * one.slow[1].span_s - sum(more.values())
    part = SlowCause.UNKNOWN if one.computing else max(more, key=more.__getitem__)
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
    one = _Slow(now, then, cost, cost / deviations, len(then) - 1)
    return _told(one, window, windows, layout, part, cost * span_s) if one.sure else None


Seconds = Callable[[Profiled], float]
"""Of a step, on one rank."""


@dataclass(frozen=True)
class _Stage:
    """Ranks with the same work, two at least, and the same ones in earlier measurements, by rank."""

    ranks: Sequence[Profiled]
    before: Sequence[Mapping[int, Profiled]]

    def longer(self, seconds: Seconds, one: Profiled, other: Profiled) -> float:
        """The share of a step that one rank takes longer than another, less what it did in the median before."""
        earlier = self.earlier(seconds, one, other)
        return _share(seconds, one) - _share(seconds, other) - (statistics.median(earlier) if earlier else 0.0)

    def earlier(self, seconds: Seconds, one: Profiled, other: Profiled) -> list[float]:
        """By what share it did before."""
        pairs = [(then.get(one[0].rank), then.get(other[0].rank)) for then in self.before]
        return [
            _share(seconds, of_one) - _share(seconds, of_other) for of_one, of_other in pairs if of_one and of_other
        ]

    def ordered(self, seconds: Seconds) -> list[Profiled]:
        """Its ranks, the one that takes longest, beyond what is usual, first."""
        return sorted(self.ranks, key=lambda one: self.longer(seconds, one, self.ranks[0]), reverse=True)


@dataclass(frozen=True)
class _Way:
    """A way to find a slow rank: by the `seconds` that it takes for a step, and `each` one. What ranks differ by
    `varies` by that standard deviation from one measurement to the next, if not by more from step to step."""

    seconds: Seconds
    each: Callable[[RankRecord], Sequence[float]]
    varies: Callable[[_Stage, Profiled, Profiled], float]

    def slowest(self, stage: _Stage) -> _Slow:
        """The rank that takes longest. If that is in doubt, the one that loses most by that and by what its kernels are
        interrupted for, on average: what others take of a GPU is seen twice."""
        one = self._longest(stage, self.seconds)
        if one.sure or any(rank.interrupted_s is None for rank, _ in stage.ranks):
            return one
        one = self._longest(stage, lambda each: (self.seconds(each) + (each[0].interrupted_s or 0.0)) / 2)
        noise = NOISE_OF_INTERRUPTIONS / math.sqrt(_profiled_s(one.slow))
        return replace(one, deviation=math.hypot(one.deviation, noise) / 2)

    def _longest(self, stage: _Stage, seconds: Seconds) -> _Slow:
        """The rank that takes most seconds, which differ as those of this way do."""
        slow, *others = stage.ordered(seconds)
        return _Slow(slow, others, stage.longer(seconds, slow, others[0]), *self.deviation(stage, slow, others[0]))

    def deviation(self, stage: _Stage, slow: Profiled, other: Profiled) -> tuple[float, int | None]:
        """The standard deviation of by what share of a step a rank takes longer than another, in as many steps as were
        profiled, and its degrees of freedom, None of one that is known beforehand."""
        if slow[0].device is None:
            return math.sqrt(2) * NOISE_OF_HOSTS, None
        known = max(LEAST_NOISE, self.varies(stage, slow, other))
        communicating = other[1].exposed_communication_s / other[1].span_s
        expected = math.sqrt(2) * (NOISE + NOISE_OF_COMMUNICATION * communicating)
        apart = [
            (mine - others) / slow[1].span_s
            for mine, others in zip(self.each(slow[0]), self.each(other[0]), strict=False)
        ]
        if len(apart) < FEWEST:
            return max(known, expected / math.sqrt(_steps(slow))), None
        freedom = len(apart) - 1 + WEIGHT
        variance = ((len(apart) - 1) * statistics.variance(apart) + WEIGHT * expected**2) / freedom
        return max(known, math.sqrt(variance / len(apart))), freedom


def _own_varies(stage: _Stage, slow: Profiled, other: Profiled) -> float:
    """With the clocks, and as much as hosts did before."""
    earlier = stage.earlier(OWN.seconds, slow, other)
    return max(_wanders(slow), next_deviation(earlier) if len(earlier) >= FEWEST else 0.0)


def _computing_varies(stage: _Stage, slow: Profiled, other: Profiled) -> float:
    """With the clocks, and as little as it is known what communication beside it costs."""
    beside = stage.longer(lambda one: one[1].overlapped_communication_s, slow, other)
    return math.hypot(_wanders(slow), NOISE_BESIDE * beside)


OWN = _Way(lambda one: one[1].own_s, lambda rank: rank.own_s, _own_varies)
COMPUTING = _Way(lambda one: one[1].compute_alone_s, lambda rank: rank.compute_alone_s, _computing_varies)


def _stages(ranks: Sequence[RankRecord], before: Sequence[Sequence[RankRecord]]) -> list[_Stage]:
    """Of more than one rank of which a step was profiled."""
    then = [{rank.rank: (rank, rank.breakdown) for rank in each if rank.breakdown is not None} for each in before]
    by_number: dict[int, list[Profiled]] = {}
    for rank in ranks:
        if rank.breakdown is not None:
            by_number.setdefault(rank.coordinates["pp"], []).append((rank, rank.breakdown))
    return [_Stage(stage, then) for stage in by_number.values() if len(stage) > 1]


def _slowest(stage: _Stage) -> Iterator[_Slow]:
    """The rank that waits least, and that whose GPU computes for longest, unless this surely costs nothing, for it
    waits the less for its host."""
    yield OWN.slowest(stage)
    if stage.ranks[0][0].device is not None:
        one = COMPUTING.slowest(stage)
        late = stage.longer(OWN.seconds, one.slow, one.others[0])
        deviation, freedom = OWN.deviation(stage, one.slow, one.others[0])
        if _below((COST - late) / deviation, freedom) < CONFIDENT:
            yield replace(one, computing=True)


def _share(seconds: Seconds, one: Profiled) -> float:
    return seconds(one) / one[1].span_s


def _wanders(one: Profiled) -> float:
    return WANDER / math.sqrt(_profiled_s(one))


def _steps(one: Profiled) -> int:
    return max(1, len(one[0].own_s))


def _profiled_s(one: Profiled) -> float:
    """Of all its profiled steps."""
    return one[1].span_s * _steps(one)


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
