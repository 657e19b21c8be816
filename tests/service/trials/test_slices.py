"""How far slices were off, of layouts that were measured in full as well; trials by slices are run in test_gang.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search_spaces.layout import Layout
from search_spaces.network import Collective
from service.metrics import Method
from service.result import Purpose, TrialResult
from service.trials.bench import Alone
from service.trials.slices import held_against, rank_times
from trainables.measure import Timing
from trainables.passes import PassTimes
from trainables.program import RankReport, SliceReport, Traffic
from trainables.status import Status

LAYOUT = Layout("megatron", 2, 8)
SLICED = TrialResult(
    "a",
    LAYOUT,
    Status.OK,
    metrics={"tokens_per_s": 110.0, "joules_per_token": 0.9, "peak_memory_gib": 7.0, "final_loss": 3.0},
    methods={"tokens_per_s": Method.SLICE, "joules_per_token": Method.SLICE},
)
FULL = TrialResult(
    "b",
    LAYOUT,
    Status.OK,
    metrics={"tokens_per_s": 100.0, "joules_per_token": 1.0, "peak_memory_gib": None, "final_loss": 2.0},
    purpose=Purpose.FINALIST,
)


def seen(power_cap_ratio: float | None, *traffic: Traffic) -> Alone:
    """A rank that took 2 s a step on the GPU `GPU-a`, at 700 W."""
    timing = Timing((2.0,), (2.0, 2.0), 0, 4_000_000_000, 0.0)
    of_passes = SliceReport({8: PassTimes(0.0, {}, 2.0, 0.0, 0.0)}, {8: traffic}, (0, 1))
    report = RankReport(0, {}, "GPU-a", {8: timing}, (1.0,), (1.0,), 20.0, {}, slice=of_passes)
    run = TrialResult("a", LAYOUT, Status.OK, metrics={"power_cap_ratio": power_cap_ratio, "mean_power_w": 700.0})
    return Alone(report, (run,), run, 100.0)


@pytest.mark.parametrize(("power_cap_ratio", "step_s"), [(1.0, 2.2), (0.5, 2.1), (0.0, 2.0), (None, 2.0)])
def test_at_its_power_limit_a_rank_takes_as_long_as_on_the_slowest_gpu(
    power_cap_ratio: float | None, step_s: float
) -> None:
    assert rank_times(seen(power_cap_ratio), 0, {"GPU-a": 1.1, "GPU-b": 1.0}, 2e-10).busy_s == pytest.approx(step_s)
    assert rank_times(seen(power_cap_ratio), 0, {"GPU-b": 1.0}, 2e-10).busy_s == 2.0, "nobody examined it"


@pytest.mark.parametrize(("power_cap_ratio", "step_s", "power_w"), [(1.0, 2.2, 700), (0.0, 2.0, 770), (None, 2.0, 770)])
def test_what_links_draw_is_time_at_the_power_limit_and_power_below_it(
    power_cap_ratio: float | None, step_s: float, power_w: float
) -> None:
    """140 J of the 1400 that were measured."""
    reduced, sent = Traffic(Collective.ALL_REDUCE, 4, 3, 4 * 10**11), Traffic(Collective.SEND, 2, 2, 10**11)
    times = rank_times(seen(power_cap_ratio, reduced, sent), 0, {}, joules_per_link_byte=2e-10)
    assert times.busy_s == pytest.approx(step_s)
    assert times.busy_power_w == pytest.approx(power_w)


def test_what_was_measured_in_full_is_told_how_far_off_its_slices_were() -> None:
    other = replace(SLICED, layout=replace(LAYOUT, micro_batch_size=2), metrics={"tokens_per_s": 1.0})
    off = held_against(FULL, [other, replace(SLICED, purpose=Purpose.SENTINEL, metrics={}), SLICED]).metrics
    assert off == pytest.approx(FULL.metrics | {"slice_error_tokens_per_s": 0.1, "slice_error_joules_per_token": -0.1})


def test_what_no_slices_explored_stays_as_it_is() -> None:
    assert held_against(FULL, [replace(SLICED, methods={}), replace(SLICED, layout=Layout("megatron", 4, 8))]) == FULL
