from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from trainables.measure import AHEAD_S, Procedure, Step, Stretch, Timing, is_steady, time_steps

PROCEDURE = Procedure(steady_steps=3, warmup_tolerance=0.02, warmup_max_s=30.0, window_s=10.0, window_min_steps=5)


def scripted(
    seconds: Iterable[float], ahead: float = 0.0, sequences: Iterable[int] = itertools.repeat(1)
) -> Callable[[], Step]:
    """Steps that take the given times on a clock that starts at 1000 s; the host is so many seconds `ahead` of all."""
    now_ns, times, work = 1_000_000_000_000, iter(seconds), iter(sequences)

    def step() -> Step:
        nonlocal now_ns
        taken = next(times)
        now_ns += round(taken * 1e9)
        return Step(taken, now_ns, lambda: ahead, next(work))

    return step


def timed(seconds: Iterable[float], procedure: Procedure = PROCEDURE, compiled: bool = False) -> Timing:
    return time_steps(scripted(seconds), procedure, compiled)


def test_warm_up_ends_as_soon_as_recent_steps_agree() -> None:
    timing = timed([9.0, 3.0, 2.0, 2.01, 2.02, *[2.0] * 20])
    assert timing.warmup_steps_s == (9.0, 3.0, 2.0, 2.01, 2.02)
    assert timing.window_steps_s == (2.0,) * 5
    assert timing.start_ns == 1_000_000_000_000 + round((9 + 3 + 2 + 2.01 + 2.02) * 1e9)
    assert timing.end_ns - timing.start_ns == 10_000_000_000


def test_the_first_step_never_counts_as_steady() -> None:
    def steady(*seconds: float) -> bool:
        return is_steady([Step(one, 0) for one in seconds], PROCEDURE)

    assert not steady(2.0, 2.0, 2.0)
    assert steady(2.0, 2.0, 2.0, 2.0)
    assert steady(2.0, 2.0, 2.0, 2.04)
    assert not steady(2.0, 2.0, 2.0, 2.05)
    assert not steady()


def test_unsteady_steps_warm_up_no_longer_than_allowed() -> None:
    timing = timed(itertools.cycle([1.0, 2.0]))
    assert sum(timing.warmup_steps_s[1:]) == pytest.approx(30.0, abs=2.0)
    assert sum(timing.warmup_steps_s[1:-1]) < 30.0


def test_a_slow_first_step_does_not_use_up_the_warm_up() -> None:
    timing = timed([100.0, *[2.0] * 20])
    assert timing.warmup_steps_s == (100.0, 2.0, 2.0, 2.0)


def test_even_slow_steps_warm_up_as_often_as_they_must_agree() -> None:
    timing = timed(itertools.cycle([40.0, 80.0]))
    assert len(timing.warmup_steps_s) == PROCEDURE.steady_steps + 1


@pytest.mark.parametrize(("seconds", "steps"), [(4.0, 5), (2.0, 5), (1.0, 10), (0.3, 34)])
def test_the_window_has_both_its_steps_and_its_seconds(seconds: float, steps: int) -> None:
    timing = timed(itertools.repeat(seconds))
    assert len(timing.window_steps_s) == steps
    assert (timing.end_ns - timing.start_ns) / 1e9 == pytest.approx(sum(timing.window_steps_s))


ALIKE = replace(PROCEDURE, alike_s=4.0)


@pytest.mark.parametrize(
    ("steps", "warmup", "window"),
    [
        ([9.0, *[2.0] * 9], 1, 2),  # the steps right after the first are alike, and long enough
        ([9.0, *[0.5] * 30], 1, 8),
        ([2.0, *[9.0] * 9], 1, 2),
        ([9.0, 3.0, *[2.0] * 9], 5, 2),  # the next ones are not, but those after a whole warm-up
        ([9.0, *[1.0, 1.016] * 30], 1, 4),  # they are known well enough
        ([9.0, *[1.0, 1.1] * 30], 30, 10),  # they are not, and warm-up has its limit
        ([9.0, 3.0, 2.0, 2.0, 2.0, *[2.0, 2.06] * 9], 5, 5),
    ],
)
def test_fewer_steps_do_where_they_are_alike(steps: list[float], warmup: int, window: int) -> None:
    timing = timed(steps, ALIKE)
    assert timing.warmup_steps_s == tuple(steps[:warmup])
    assert timing.window_steps_s == tuple(steps[warmup : warmup + window])
    assert timing.start_ns == 1_000_000_000_000 + round(sum(steps[:warmup]) * 1e9)
    assert (timing.end_ns - timing.start_ns) / 1e9 == pytest.approx(sum(timing.window_steps_s))


@pytest.mark.parametrize(
    ("seconds", "ahead", "window"),
    [
        (4.0, AHEAD_S, 1),
        (3.9, AHEAD_S, 2),  # it does not last as long as a window must
        (4.0, 0.9 * AHEAD_S, 2),  # the device may have waited for its host, in this step more than in others
    ],
)
def test_one_long_step_does_where_the_host_was_ahead_of_the_device(seconds: float, ahead: float, window: int) -> None:
    timing = time_steps(scripted([9.0, *[seconds] * 9], ahead), ALIKE, False)
    assert timing.window_steps_s == (seconds,) * window
    whole = time_steps(scripted([9.0, *[seconds] * 9], ahead), PROCEDURE, False)
    assert len(whole.window_steps_s) == PROCEDURE.window_min_steps


def test_steps_that_are_unlike_all_others_are_no_part_of_a_window() -> None:
    step = scripted([9.0, *[2.0] * 9])
    timing = time_steps(step, ALIKE, False, apart=[step] * 3)
    assert (timing.warmup_steps_s, timing.window_steps_s) == ((9.0, 2.0, 2.0), (2.0, 2.0))


def test_a_window_begins_at_once_where_no_step_is_unlike_the_others() -> None:
    timing = time_steps(scripted([2.0] * 9), ALIKE, True, apart=(), began_ns=1_000_000_000_000)
    assert timing == Timing((), (2.0, 2.0), 1_000_000_000_000, 1_004_000_000_000, 0.0)
    timing = time_steps(scripted([*[1.0, 1.1] * 9, *[1.0] * 30]), ALIKE, False, apart=(), began_ns=0)
    assert timing.warmup_steps_s == (*[1.0, 1.1] * 9, 1.0, 1.0, 1.0)


def test_compiling_is_told_from_the_rest_of_a_step_that_was_shorter_than_others() -> None:
    timing = time_steps(scripted([9.0, *[2.0] * 9], sequences=(1, *[2] * 9)), ALIKE, True)
    assert timing.compile_s == pytest.approx(9.0 - 1.0)


def test_steps_before_one_of_other_work_are_no_part_of_a_window() -> None:
    step = scripted([9.0, 3.9, *[8.0] * 9], sequences=(3, 4, *[16] * 9))
    timing = time_steps(step, ALIKE, True)
    assert (timing.warmup_steps_s, timing.window_steps_s) == ((9.0, 3.9), (8.0, 8.0))
    assert timing.start_ns == 1_000_000_000_000 + round(12.9 * 1e9)
    assert timing.compile_s == pytest.approx(9.0 - 1.5)


def test_a_step_that_compiles_is_told_from_a_window_right_after_it() -> None:
    assert timed([9.0, *[2.0] * 9], ALIKE, compiled=True).compile_s == pytest.approx(7.0)


def test_compile_time_is_what_early_steps_took_beyond_a_steady_one() -> None:
    times = [20.0, 5.0, 2.0, 2.0, 2.0, *[2.0] * 5]
    assert timed(times, compiled=True).compile_s == pytest.approx(18.0 + 3.0)
    assert timed(times).compile_s == 0.0


def test_a_slow_step_in_the_window_leaves_the_compile_time_alone() -> None:
    times = [20.0, 2.0, 2.0, 2.0, 2.0, 9.0, 2.0, 2.0, 2.0]
    assert timed(times, compiled=True).compile_s == pytest.approx(18.0)


def test_the_steps_that_agreed_are_told_before_the_window() -> None:
    events: list[str | Stretch] = []
    time_steps(scripted([9.0, 3.0, *[2.0] * 20]), PROCEDURE, False, events.append, events.append)
    agreed = Stretch((2.0, 2.0, 2.0), 1_000_000_000_000 + 12 * 10**9, 1_000_000_000_000 + 18 * 10**9)
    assert events == ["warmup", agreed, "window"]
    events.clear()
    time_steps(scripted(itertools.cycle([1.0, 2.0])), PROCEDURE, False, events.append, events.append)
    assert events == ["warmup", "window"]


def test_phases_are_told_as_they_begin() -> None:
    events: list[str] = []
    step = scripted(itertools.repeat(5.0))

    def watched() -> Step:
        events.append("step")
        return step()

    time_steps(watched, PROCEDURE, False, events.append)
    assert events == ["warmup", *["step"] * 4, "window", *["step"] * 5]
    events.clear()
    time_steps(watched, ALIKE, False, events.append)
    assert events == ["warmup", "step", "window", *["step"] * 2]


def test_a_window_that_was_none_is_told_as_warm_up() -> None:
    events: list[str] = []
    time_steps(scripted([9.0, 3.0, *[2.0] * 9]), ALIKE, False, events.append)
    assert events == ["warmup", "window", "warmup", "window"]
