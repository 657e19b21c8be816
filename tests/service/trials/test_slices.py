"""How far slices were off, of layouts that were measured in full as well; trials by slices are run in test_gang.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from search_spaces.hardware import LINKS_AWAKE_S
from search_spaces.layout import Layout
from search_spaces.schedules import Action, Pass
from service.metrics import Method
from service.result import Purpose, TrialResult
from service.trials.bench import Alone
from service.trials.slices import SLOWED, held_against, microbatch_power, rank_times
from trainables.breakdown import Breakdown, Profile
from trainables.measure import Timing
from trainables.passes import PassTimes
from trainables.program import RankReport, SliceReport
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


HALF_PRODUCTS = Breakdown(**dict.fromkeys(Breakdown.__dataclass_fields__, 0.0) | {"span_s": 2.0, "matmul_s": 1.0})
STEP_S, LINKS_W, LIMIT_W, APART = 2.0, 30.0, 690.0, 0.05


def seen(power_cap_ratio: float | None = None, power_w: float | None = 700.0, linked_s: float | None = None) -> Alone:
    """A rank of several that took 2 s a step on the GPU `GPU-a`, half of it in products, with links awake so long."""
    timing = Timing((STEP_S,), (STEP_S, STEP_S), 0, round(2e9 * STEP_S), 0.0)
    of_passes = SliceReport({8: PassTimes(0.0, {}, STEP_S, 0.0, 0.0)}, {8: ()}, (0, 1))
    profile = None if linked_s is None else Profile(HALF_PRODUCTS, None, 1.0, linked_s=linked_s)
    report = RankReport(0, {}, "GPU-a", {8: timing}, (1.0,), (1.0,), 20.0, {}, slice=of_passes, profile=profile)
    run = TrialResult("a", LAYOUT, Status.OK, metrics={"power_cap_ratio": power_cap_ratio, "mean_power_w": power_w})
    return Alone(report, (run,), run, 100.0)


@pytest.mark.parametrize(("power_cap_ratio", "step_s"), [(1.0, 2.2), (0.5, 2.1), (0.0, 2.0), (None, 2.0)])
def test_at_its_power_limit_a_rank_takes_as_long_as_on_the_slowest_gpu(
    power_cap_ratio: float | None, step_s: float
) -> None:
    one = seen(power_cap_ratio)
    assert rank_times(one, {"GPU-a": 1.1, "GPU-b": 1.0}, 0.0, LIMIT_W, 0.0).busy_s == pytest.approx(step_s)
    assert rank_times(one, {"GPU-b": 1.0}, 0.0, LIMIT_W, 0.0).busy_s == 2.0, "nobody examined it"


@pytest.mark.parametrize(
    ("limited", "power_w", "linked_s", "added_w"),
    [
        (0.0, 600.0, 2.0, 30.0),
        (1.0, 600.0, 2.0, 15.0),
        (0.8, 600.0, 1.0, 9.0),
        (1.0, 600.0, 0.0, 0.0),
        (1.0, 680.0, 2.0, 10.0),
        (1.0, 690.0, 2.0, 0.0),
    ],
)
def test_awake_links_take_power_from_products_at_the_limit_and_add_to_what_all_else_draws(
    limited: float, power_w: float, linked_s: float, added_w: float
) -> None:
    times = rank_times(seen(limited, power_w, linked_s), {}, LINKS_W, LIMIT_W, 0.0)
    assert times.busy_power_w == pytest.approx(power_w + added_w)
    taken = LINKS_W * linked_s / STEP_S / power_w
    assert times.busy_s == pytest.approx(STEP_S * (1 + SLOWED * 0.5 * limited * taken))
    assert times.waiting_power_w == pytest.approx(100.0 + LINKS_W * linked_s / STEP_S)


@pytest.mark.parametrize(
    ("tensor", "context", "expert", "ranks"), [(4, 1, 1, 4), (2, 2, 1, 4), (1, 2, 4, 4), (1, 1, 1, 1)]
)
def test_ranks_that_meet_in_every_block_wait_for_each_other_at_the_limit(
    tensor: int, context: int, expert: int, ranks: int
) -> None:
    layout = Layout(
        "megatron",
        4,
        8,
        tensor_parallel_size=tensor,
        context_parallel_size=context,
        expert_parallel_size=expert,
    )
    one = seen(0.8, linked_s=0.0)
    one = replace(one, runs=(replace(one.runs[0], layout=layout),))
    expected_largest = {1: 0.0, 4: 1.0294}[ranks]
    wait = expected_largest * 0.8 * 0.5 * APART / math.sqrt(2)
    assert rank_times(one, {}, 0.0, LIMIT_W, APART).busy_s == pytest.approx(STEP_S * (1 + wait), rel=1e-5)
    faster = {"GPU-b": 1.0} | {f"GPU-{number}": 1.5 for number in range(7)}
    assert rank_times(one, faster, 0.0, LIMIT_W, APART).busy_s == pytest.approx(STEP_S), (
        "all but one are there long before"
    )


def test_what_links_take_from_products_is_a_share_of_the_step_and_none_of_its_communication() -> None:
    communicating = replace(HALF_PRODUCTS, exposed_communication_s=0.5, exposed_all_gather_s=0.5)
    one = seen(1.0, 600.0, 2.0)
    one = replace(one, report=replace(one.report, profile=Profile(communicating, None, 1.0, linked_s=2.0)))
    times = rank_times(one, {}, LINKS_W, LIMIT_W, 0.0)
    assert times.busy_s == pytest.approx(STEP_S * (1 + SLOWED * 0.5 * LINKS_W / 600))
    assert times.exposed_s["all_gather"] == pytest.approx(0.5)


def test_at_a_limit_of_a_power_that_nobody_read_links_take_nothing() -> None:
    assert rank_times(seen(1.0, None, 2.0), {}, LINKS_W, LIMIT_W, 0.0).busy_s == STEP_S


def test_links_of_ranks_that_were_not_profiled_are_taken_to_be_awake() -> None:
    assert rank_times(seen(power_w=600.0), {}, LINKS_W, LIMIT_W, 0.0).busy_power_w == pytest.approx(630.0)


def test_links_of_a_pipeline_are_awake_for_its_messages_and_its_pauses_draw_less() -> None:
    """Two passes, one longer than links stay awake: for 0.09 of 0.5 s. 690 W on average, 840 W computing."""
    passes = {Action(0, Pass.FORWARD, 0): 0.04, Action(0, Pass.BACKWARD, 0): 0.46}
    one = seen(1.0, 690.0, linked_s=0.0)
    assert one.report.slice is not None
    paused = replace(one.report.slice, times={8: PassTimes(0.0, passes, 0.0, 0.0, 0.4)})
    times = rank_times(replace(one, report=replace(one.report, slice=paused)), {}, LINKS_W, LIMIT_W, 0.0)
    assert LINKS_AWAKE_S == 0.05
    awake_w = LINKS_W * 0.09 / 0.5
    computing_w = (690 - 0.2 * 100) / 0.8
    assert times.waiting_power_w == pytest.approx(100 + awake_w)
    assert times.busy_power_w == pytest.approx(690 + 0.2 * awake_w), "at its limit, but while it pauses"
    assert times.busy_s == pytest.approx(1.6 * (1 + SLOWED * 0.5 * awake_w / computing_w))


def run_of(microbatches: int, power_w: float | None) -> TrialResult:
    return TrialResult("a", Layout("megatron", 1, microbatches), Status.OK, metrics={"mean_power_w": power_w})


@pytest.mark.parametrize("once_w", [0.0, 300.0, 600.0])
def test_the_power_of_a_microbatch_follows_from_two_steps(once_w: float) -> None:
    """Four and two microbatches of 0.35 s at 600 W, and 0.2 s of what is done once."""
    few, many = ((count * 0.35 * 600 + 0.2 * once_w) / (count * 0.35 + 0.2) for count in (2, 4))
    assert many * microbatch_power([run_of(4, many), run_of(2, few)], 0.35, 1.6) == pytest.approx(600.0)
    nothing_drawn_once, as_much_as_microbatches = 1.6 / 1.4, 1.0
    assert microbatch_power([run_of(4, many), run_of(2, 0.7 * few)], 0.35, 1.6) == nothing_drawn_once
    assert microbatch_power([run_of(4, many), run_of(2, 1.3 * few)], 0.35, 1.6) == as_much_as_microbatches


def test_where_a_single_step_or_no_power_is_known_a_microbatch_draws_the_mean() -> None:
    assert microbatch_power([run_of(4, 600.0)], 0.35, 1.6) == 1.0
    assert microbatch_power([run_of(4, 600.0), run_of(2, None)], 0.35, 1.6) == 1.0
    assert microbatch_power([run_of(4, 600.0), run_of(2, 500.0)], 0.0, 1.6) == 1.0


def test_what_was_measured_in_full_is_told_how_far_off_its_slices_were() -> None:
    other = replace(SLICED, layout=replace(LAYOUT, micro_batch_size=2), metrics={"tokens_per_s": 1.0})
    off = held_against(FULL, [other, replace(SLICED, purpose=Purpose.SENTINEL, metrics={}), SLICED]).metrics
    assert off == pytest.approx(FULL.metrics | {"slice_error_tokens_per_s": 0.1, "slice_error_joules_per_token": -0.1})


def test_what_no_slices_explored_stays_as_it_is() -> None:
    assert held_against(FULL, [replace(SLICED, methods={}), replace(SLICED, layout=Layout("megatron", 4, 8))]) == FULL
