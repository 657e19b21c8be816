"""What the readings of one column say of a window: growth, integrals, means, shares of time.

Readings are `time_ns` [n] (int64, ascending) and `value` [n]. They need not be regular: counters that cost the driver
milliseconds are read about every 30 s and just after each edge of a window. What readings do not support raises
`Unusable`; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from telemetry.sampler import SLOW_READ_S

MAX_GAP_NS = 1_000_000_000
"""The farthest that an edge may be from a counter's nearest reading, and the longest gap in what is sampled."""

MAX_DEVICE_W = 10_000
"""More than any one device draws: energy that grows faster was misread."""

POWER_FACTOR = 2
"""Over a stretch of a second or more, sampled power is within this factor of the true one."""

Share = Callable[[int, int, int], float]
"""Of what a counter grew by between the readings at `before` and `after`, the part up to `edge`, from 0 to 1."""


class Unusable(ValueError):
    """Readings that do not support the value asked of them."""


class Reset(Unusable):
    """A counter lost its past, or may have, as when a device is reset."""


def bracket(time_ns: np.ndarray, start_ns: int, end_ns: int) -> slice:
    """The readings from the last one at or before the start to the first one at or after the end.

    Raises Unusable if there is no such reading.
    """
    first = int(np.searchsorted(time_ns, start_ns, side="right")) - 1
    last = int(np.searchsorted(time_ns, end_ns, side="left"))
    if first < 0:
        raise Unusable("has no reading before the window")
    if last == len(time_ns):
        raise Unusable("has no reading after the window")
    return slice(first, last + 1)


def evenly(before_ns: int, edge_ns: int, after_ns: int) -> float:
    """The `Share` of a counter that grows at one rate."""
    return (edge_ns - before_ns) / (after_ns - before_ns)


def bracket_counter(time_ns: np.ndarray, value: np.ndarray, start_ns: int, end_ns: int) -> slice:
    """The readings that bracket the window, of a counter that never decreased in it.

    Each edge has a reading on either side, the nearest at most MAX_GAP_NS away. Raises Reset if the counter decreased.
    """
    around = bracket(time_ns, start_ns, end_ns)
    for edge, edge_ns, pair in (("start", start_ns, time_ns[around][:2]), ("end", end_ns, time_ns[around][-2:])):
        distance_ns = int(np.min(np.abs(pair - edge_ns)))
        if distance_ns > MAX_GAP_NS:
            raise Unusable(f"has no reading near the window's {edge}: the nearest is {distance_ns / 1e9:.1f} s away")
    if np.any(value[around][1:] < value[around][:-1]):
        raise Reset("went backwards")
    return around


def counter_growth(time_ns: np.ndarray, value: np.ndarray, start_ns: int, end_ns: int, share: Share = evenly) -> float:
    """Growth of a counter over a window: `value` is uint64, or float for a total made up of means.

    What it grew by between the two readings around an edge is apportioned by `share`. Raises as `bracket_counter`.
    """
    around = bracket_counter(time_ns, value, start_ns, end_ns)
    time_ns, value = time_ns[around], value[around]
    head = share(int(time_ns[0]), start_ns, int(time_ns[1])) * float(value[1] - value[0])
    tail = (1 - share(int(time_ns[-2]), end_ns, int(time_ns[-1]))) * float(value[-1] - value[-2])
    return max(float(value[-1] - value[0]) - head - tail, 0.0)


def integral(time_ns: np.ndarray, value: np.ndarray, start_ns: int, end_ns: int) -> float:
    """Trapezoidal integral over a window, in value-seconds. The readings leave no gap over MAX_GAP_NS."""
    around = bracket(time_ns, start_ns, end_ns)
    gap_ns = int(np.max(np.diff(time_ns[around])))
    if gap_ns > MAX_GAP_NS:
        raise Unusable(f"was not read for {gap_ns / 1e9:.1f} s in the window")
    inside = (time_ns > start_ns) & (time_ns < end_ns)
    times = np.concatenate([[0], time_ns[inside] - start_ns, [end_ns - start_ns]])
    return float(np.trapezoid(np.interp(times, time_ns - start_ns, value), times)) / 1e9


class Sampled(NamedTuple):
    """A state over a window: its mean over time, and the lowest and highest reading."""

    mean: float
    lowest: float
    highest: float


def sampled(time_ns: np.ndarray, value: np.ndarray, start_ns: int, end_ns: int) -> Sampled:
    """Of a state that is read at every tick: without a gap over MAX_GAP_NS."""
    mean = integral(time_ns, value, start_ns, end_ns) / ((end_ns - start_ns) / 1e9)
    read = inside(time_ns, value, start_ns, end_ns)
    return Sampled(mean, float(read.min()), float(read.max()))


def lowest(time_ns: np.ndarray, value: np.ndarray, start_ns: int, end_ns: int) -> float:
    """Of a state that is read now and then."""
    return float(inside(time_ns, value, start_ns, end_ns).min())


def mean_of_means(time_ns: np.ndarray, value: np.ndarray, start_ns: int, end_ns: int) -> float:
    """Mean over time of readings each of which is the mean since the one before."""
    total = np.concatenate([[0.0], np.cumsum(value[1:] * np.diff(time_ns))])
    return counter_growth(time_ns, total, start_ns, end_ns) / (end_ns - start_ns)


def inside(time_ns: np.ndarray, value: np.ndarray, start_ns: int, end_ns: int) -> np.ndarray:
    """The values read in the window, at least one."""
    chosen = value[(time_ns >= start_ns) & (time_ns <= end_ns)]
    if not len(chosen):
        raise Unusable("has no reading in the window")
    return chosen


def events(time_ns: np.ndarray, value: np.ndarray, start_ns: int, end_ns: int) -> int:
    """Events from the last reading before the window to the first one after it. Raises Reset if they decrease."""
    around = value[bracket(time_ns, start_ns, end_ns)]
    if np.any(around[1:] < around[:-1]):
        raise Reset("went backwards")
    return int(around[-1] - around[0])


def energy_j(
    time_ns: np.ndarray,
    energy_mj: np.ndarray,
    start_ns: int,
    end_ns: int,
    drawn_j: Callable[[int, int], float | None],
    refreshed_ns: np.ndarray | None = None,
) -> float:
    """Growth of an energy counter over a window. `drawn_j` integrates sampled power between two times, or has none.

    The driver refreshes the counter only every so often (100 ms on Hopper): a reading is of the moment `refreshed_ns`
    [n], which is that of the reading itself where nothing is known of it. Then a reading may be as old as that period;
    readings on a fixed grid of 100 ms are of nearly the same age at both edges, which cancels as far as power is the
    same there. A reading that repeats the one before is no refresh and is passed over.

    Around an edge the counter is taken to grow as sampled power says, so that the sliver between an edge and its
    refresh counts at the power it had; evenly where readings are at most MAX_GAP_NS apart and there is no power.

    Raises Unusable where a fault may hide: a counter that stood still or grew faster than any device draws, by
    less than half or more than twice what sampled power says, or may have been reset between two readings.
    """
    bracket(time_ns, start_ns, end_ns)
    moved = np.concatenate([[0], np.flatnonzero(energy_mj[1:] != energy_mj[:-1]) + 1])
    if time_ns[moved[-1]] < end_ns:
        raise _stood_still(int(time_ns[-1] - time_ns[moved[-1]]))
    moved = moved[bracket_counter(time_ns[moved], energy_mj[moved], start_ns, end_ns)]
    still_ns = int(np.max(time_ns[moved[1:] - 1] - time_ns[moved[:-1]]))
    if still_ns > MAX_GAP_NS:
        raise _stood_still(still_ns)
    tick_ns, tick_mj = time_ns[moved], energy_mj[moved]
    if np.any(np.diff(tick_mj) > MAX_DEVICE_W / 1e6 * (np.diff(tick_ns) + MAX_GAP_NS)):
        raise Unusable(f"grew faster than {MAX_DEVICE_W} W")
    read_ns, read_mj = time_ns[moved[0] : moved[-1] + 1], energy_mj[moved[0] : moved[-1] + 1]
    for i in np.flatnonzero(np.diff(read_ns) > MAX_GAP_NS):
        _check_unread(int(read_ns[i]), int(read_mj[i]), int(read_ns[i + 1]), int(read_mj[i + 1]), drawn_j)

    def share(before_ns: int, edge_ns: int, after_ns: int) -> float:
        whole_j = drawn_j(before_ns, after_ns)
        if whole_j:
            return (drawn_j(before_ns, edge_ns) or 0.0) / whole_j if edge_ns > before_ns else 0.0
        if after_ns - before_ns > MAX_GAP_NS:
            apart_s = (after_ns - before_ns) / 1e9
            raise Unusable(f"was read {apart_s:.1f} s apart around an edge, without the power in between")
        return evenly(before_ns, edge_ns, after_ns)

    if refreshed_ns is not None:
        tick_ns, tick_mj = _refreshes(tick_ns, tick_mj, refreshed_ns[moved], start_ns, end_ns, drawn_j)
    return counter_growth(tick_ns, tick_mj, start_ns, end_ns, share) / 1000


def _refreshes(
    read_ns: np.ndarray,
    read_mj: np.ndarray,
    refreshed_ns: np.ndarray,
    start_ns: int,
    end_ns: int,
    drawn_j: Callable[[int, int], float | None],
) -> tuple[np.ndarray, np.ndarray]:
    """A counter's refreshes in place of its readings, carried on to the window's end by sampled power.

    The readings themselves where their refreshes are not in order, no power is known after the last one, or the first
    one was still to come at the window's start: a reading waits some ms for one that is under way. A device's very
    first reading stands in for its refresh, which came before all power.
    """
    if refreshed_ns[0] < read_ns[0] and drawn_j(int(refreshed_ns[0]), int(read_ns[0])) is None:
        refreshed_ns = np.append(read_ns[:1], refreshed_ns[1:])
    rest_j = drawn_j(int(refreshed_ns[-1]), end_ns) if refreshed_ns[-1] < end_ns else 0.0
    if rest_j is None or refreshed_ns[0] > start_ns or np.any(np.diff(refreshed_ns) <= 0):
        return read_ns, read_mj
    if refreshed_ns[-1] >= end_ns:
        return refreshed_ns, read_mj
    return np.append(refreshed_ns, end_ns), np.append(read_mj, read_mj[-1] + np.uint64(1000 * rest_j))


def _stood_still(still_ns: int) -> Unusable:
    return Unusable(f"stood still for {still_ns / 1e9:.1f} s")


def _check_unread(
    before_ns: int, before_mj: int, after_ns: int, after_mj: int, drawn_j: Callable[[int, int], float | None]
) -> None:
    """Raise unless an energy counter can only have gone on from one reading to the next, a second or more later."""
    unread_s = (after_ns - before_ns) / 1e9
    power_j = drawn_j(before_ns, after_ns)
    most_j = MAX_DEVICE_W * unread_s if power_j is None else POWER_FACTOR * power_j
    if after_mj <= 1000 * most_j:
        raise Reset(f"may have been reset while it was not read for {unread_s:.1f} s")
    grown_j = (after_mj - before_mj) / 1000
    if power_j is not None and not power_j / POWER_FACTOR <= grown_j <= most_j:
        raise Unusable(f"grew by {grown_j:.0f} J in {unread_s:.1f} s in which sampled power gives {power_j:.0f} J")


def throttled_s(time_ns: np.ndarray, value: np.ndarray, start_ns: int, end_ns: int) -> float:
    """Seconds by a counter of throttled nanoseconds, at most a second a second.

    Between the readings around an edge it is taken to grow evenly: off by at most the time to the nearest one.
    """
    grown_ns = counter_growth(time_ns, value, start_ns, end_ns)
    around = bracket(time_ns, start_ns, end_ns)
    _require_slower(time_ns[around], value[around], 1.02, "ran faster than time")
    return min(grown_ns, end_ns - start_ns) / 1e9


def bytes_per_s(
    time_ns: np.ndarray, value: np.ndarray, start_ns: int, end_ns: int, peak_bytes_per_s: float | None
) -> float:
    """Mean rate of a counter of bytes, over a fabric that carries no more than its peak, if that is known."""
    grown = counter_growth(time_ns, value, start_ns, end_ns)
    if peak_bytes_per_s is not None:
        around = bracket(time_ns, start_ns, end_ns)
        excess = f"grew faster than the {peak_bytes_per_s / 1e9:.3g} GB/s of its fabric"
        _require_slower(time_ns[around], value[around], 1.05 * peak_bytes_per_s / 1e9, excess)
    return grown / ((end_ns - start_ns) / 1e9)


def _require_slower(time_ns: np.ndarray, value: np.ndarray, most_per_ns: float, excess: str) -> None:
    """Raise if a counter grew faster, as a whole or from one reading to the next, than late readings explain."""
    for step in (1, len(time_ns) - 1):
        elapsed_ns, grown = time_ns[step:] - time_ns[:-step], value[step:] - value[:-step]
        if np.any(grown > most_per_ns * (elapsed_ns + SLOW_READ_S * 1e9)):
            raise Unusable(excess)


def seconds_set(time_ns: np.ndarray, flag: np.ndarray, start_ns: int, end_ns: int) -> tuple[float, float, float]:
    """Seconds in which a sampled flag (bool) was set: by the share of samples, and bounds.

    It was set between two samples that both have it, and may have been where one has. What comes and goes between two
    samples is not seen.
    """
    integral(time_ns, flag.astype(float), start_ns, end_ns)  # without a gap
    length_ns = np.diff(np.clip(time_ns, start_ns, end_ns))
    low_s = float(np.sum(length_ns[flag[1:] & flag[:-1]])) / 1e9
    high_s = float(np.sum(length_ns[flag[1:] | flag[:-1]])) / 1e9
    return (low_s + high_s) / 2, low_s, high_s
