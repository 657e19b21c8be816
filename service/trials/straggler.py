"""Which GPU holds the others of its trial up, by how much, and why.

In a step that all ranks end together, a rank that waits for nobody is the one that the others wait for. Of ranks with
the same work, those of one pipeline stage, that is the one with most time of its own: the step less the communication
that nothing hides, of which waiting is a part. The profiled step tells it; what telemetry saw of the whole window tells
why.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from search_spaces.layout import Layout
from service.result import RankRecord, SlowCause, Straggler
from telemetry.windows.device import THERMAL, DeviceWindow
from trainables.breakdown import Breakdown

COST = 0.01
"""Share of a step from which on a GPU is worth a word."""

NOISE, NOISE_OF_COMMUNICATION = 0.002, 0.02
"""Standard deviation of a rank's own time in one step, taken to be this share of the step, where whole windows repeat
within 0.0012, and this share of the communication beside it, of which each piece takes now more, now less."""

NOISE_OF_HOSTS = 0.05
"""Likewise where processors compute, which ranks share with each other and with whatever else runs there."""

CONFIDENT = 0.99

SLOWER_CLOCK, HOT, CAPPED = 0.005, 0.01, 0.1
"""Shares from which on a clock is lower than that of the others, and heat or the power limit is what held it down."""


def straggler(ranks: Sequence[RankRecord], windows: Sequence[DeviceWindow], layout: Layout) -> Straggler | None:
    """The slowest rank of those that have others to be held against; None where none costs `COST`, beyond doubt.

    `windows` are of the devices that worked.
    """
    stages: dict[int, list[tuple[RankRecord, Breakdown]]] = {}
    for rank in ranks:
        if rank.breakdown is not None:
            stages.setdefault(rank.coordinates["pp"], []).append((rank, rank.breakdown))
    found = [_slowest(stage) for stage in stages.values() if len(stage) > 1]
    if not found:
        return None
    cost, (rank, breakdown), others = max(found, key=lambda one: one[0])
    usual = statistics.median(one.exposed_communication_s / one.span_s for _, one in others)
    noise = NOISE + NOISE_OF_COMMUNICATION * usual if rank.device is not None else NOISE_OF_HOSTS
    confidence = _normal(cost / (math.sqrt(2) * noise))
    if cost < COST or confidence < CONFIDENT:
        return None
    seen = {window.device: window for window in windows}
    mine = None if rank.device is None else seen.get(rank.device)
    theirs = [seen[other.device] for other, _ in others if other.device is not None and other.device in seen]
    cause = _cause(breakdown, [one for _, one in others], mine, theirs, layout)
    return Straggler(rank.rank, rank.node_id, rank.device, cost, cause, confidence)


Placed = tuple[RankRecord, Breakdown]


def _slowest(stage: Sequence[Placed]) -> tuple[float, Placed, list[Placed]]:
    """The rank that waits least, by what share of a step the next one waits more, and the others."""
    first, second, *rest = sorted(stage, key=lambda one: one[1].exposed_communication_s)
    waits = second[1].exposed_communication_s - first[1].exposed_communication_s
    return waits / first[1].span_s, first, [second, *rest]


def _cause(
    slow: Breakdown,
    others: Sequence[Breakdown],
    mine: DeviceWindow | None,
    theirs: Sequence[DeviceWindow],
    layout: Layout,
) -> SlowCause:
    """What takes the slow rank longer than the others: on the GPU, before it has work, or on the way to it."""

    def more(seconds: Callable[[Breakdown], float]) -> float:
        return seconds(slow) - statistics.median(map(seconds, others))

    if mine is None:
        return SlowCause.HOST  # which is what computes
    parts = {
        SlowCause.HOST: more(lambda one: one.idle_s),
        SlowCause.LINK: more(lambda one: one.memory_copy_s),
        SlowCause.UNKNOWN: more(lambda one: one.compute_s),
    }
    most = max(parts, key=parts.__getitem__)
    if most is not SlowCause.UNKNOWN:
        return most
    clocks = [one.mean_sm_clock_mhz for one in theirs if one.mean_sm_clock_mhz is not None]
    clock = mine.mean_sm_clock_mhz
    if clock is not None and clocks and clock < (1 - SLOWER_CLOCK) * statistics.median(clocks):
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
