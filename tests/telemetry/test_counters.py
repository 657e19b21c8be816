from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry import counters
from telemetry.counters import Reset, Unusable, bytes_per_s, counter_growth, integral, mean_of_means, seconds_set

SECOND = 1_000_000_000


def at(*seconds: float) -> np.ndarray:
    return np.array([round(s * SECOND) for s in seconds], dtype=np.int64)


def counts(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@given(value=st.integers(0, 2**64 - 1), growth=st.lists(st.integers(0, 10**12), min_size=3, max_size=30))
def test_a_counter_that_wraps_at_64_bits_is_refused_and_else_exact(value: int, growth: list[int]) -> None:
    values = [value + sum(growth[:n]) for n in range(len(growth) + 1)]
    times = np.arange(len(values), dtype=np.int64) * SECOND // 2
    read = np.array([v % 2**64 for v in values], dtype=np.uint64)
    if values[-1] < 2**64:
        assert counter_growth(times, read, 0, int(times[-1])) == pytest.approx(sum(growth), rel=1e-12)
    else:
        with pytest.raises(Reset, match="backwards"):
            counter_growth(times, read, 0, int(times[-1]))


def test_growth_around_the_edges_is_apportioned() -> None:
    times, values = at(-9, 0.5, 9.5, 11), counts(100, 195, 285, 300)
    assert counter_growth(times, values, 0, 10 * SECOND) == pytest.approx(5 + 90 + 5)

    def all_before(before_ns: int, edge_ns: int, after_ns: int) -> float:
        return float(edge_ns > before_ns)

    assert counter_growth(times, values, 0, 10 * SECOND, all_before) == 90 + 15


def test_a_window_between_two_readings_gets_its_part() -> None:
    assert counter_growth(at(0, 4), counts(0, 400), SECOND, 3 * SECOND) == pytest.approx(200)


@pytest.mark.parametrize(
    ("times", "complaint"),
    [
        ((-3, 1.2, 9.5, 11), "near the window's start: the nearest is 1.2 s away"),
        ((-3, 0.5, 8, 11.5), "near the window's end: the nearest is 1.5 s away"),
        ((0.1, 0.5, 9.5, 11), "no reading before the window"),
        ((-3, 0.5, 9.5, 9.9), "no reading after the window"),
    ],
)
def test_each_edge_has_a_reading_on_either_side_and_one_near(times: tuple[float, ...], complaint: str) -> None:
    with pytest.raises(Unusable, match=complaint):
        counter_growth(at(*times), counts(1, 2, 3, 4), 0, 10 * SECOND)


@given(st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0, 1000)), min_size=3, max_size=30))
def test_the_integral_is_that_of_the_drawn_line(points: list[tuple[float, float]]) -> None:
    times = np.cumsum([round(gap * SECOND) for gap, _ in points])
    values = np.array([value for _, value in points])
    middle = int(times[0] + times[-1]) // 2
    first, last = int(times[0]), int(times[-1])
    whole = integral(times, values, first, last)
    assert whole == pytest.approx(float(np.trapezoid(values, times)) / SECOND)
    assert whole == pytest.approx(integral(times, values, first, middle) + integral(times, values, middle, last))


def test_means_weigh_by_the_time_since_the_reading_before() -> None:
    """The first reading is of an unknown time; of the last only what lies in the window counts."""
    times, values = at(-5, 0.5, 8, 10.5), np.array([0.9, 0.2, 0.6, 0.4])
    assert mean_of_means(times, values, 0, 10 * SECOND) == pytest.approx((0.5 * 0.2 + 7.5 * 0.6 + 2 * 0.4) / 10)


def test_a_flag_was_set_between_samples_that_have_it_and_may_have_been_beside_them() -> None:
    times = at(-1, 0, 1, 2, 3, 4, 5)
    flag = np.array([False, False, True, True, False, True, False])
    assert seconds_set(times, flag, 0, 5 * SECOND) == (3, 1, 5)
    assert seconds_set(times, flag, SECOND // 2, 2 * SECOND) == (1.25, 1, 1.5)
    assert seconds_set(times, ~np.zeros(7, dtype=bool), 0, 5 * SECOND) == (5, 5, 5)
    with pytest.raises(Unusable, match=r"was not read for 2\.0 s"):
        seconds_set(times[[0, 1, 3, 4]], flag[[0, 1, 3, 4]], 0, 3 * SECOND)


def test_no_more_bytes_than_the_fabric_carries() -> None:
    times, values = at(-9, 0.5, 9.5, 11), counts(0, 190 * 10**9, 370 * 10**9, 400 * 10**9)
    assert bytes_per_s(times, values, 0, 10 * SECOND, 20e9) == pytest.approx(20e9)
    assert bytes_per_s(times, values, 0, 10 * SECOND, None) == pytest.approx(20e9)
    with pytest.raises(Unusable, match=r"grew faster than the 18 GB/s of its fabric"):
        bytes_per_s(times, values, 0, 10 * SECOND, 18e9)


def test_a_counter_of_time_that_jumps_is_refused_whatever_it_did_before() -> None:
    times = at(-1, 10, 20, 30)
    with pytest.raises(Unusable, match="ran faster than time"):
        counters.throttled_s(times, counts(0, 0, 12 * SECOND, 12 * SECOND), 0, 30 * SECOND)
    assert counters.throttled_s(times, counts(0, 0, 10 * SECOND, 10 * SECOND), 0, 30 * SECOND) == 10
    a_little_fast = counts(*(round(1.01 * SECOND * s) for s in (0, 11, 21, 31)))
    assert counters.throttled_s(times, a_little_fast, 0, 30 * SECOND) == 30


def test_events_are_counted_up_to_the_readings_around_the_window() -> None:
    times = at(-5, 0.2, 9, 12)
    assert counters.events(times, counts(3, 3, 4, 6), 0, 10 * SECOND) == 3
    with pytest.raises(Reset):
        counters.events(times, counts(3, 3, 0, 6), 0, 10 * SECOND)
