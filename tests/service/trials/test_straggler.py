"""The GPU for which others wait is named with its cost and cause, and none is where GPUs only differ as they do."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.layout import Layout
from service.result import RankRecord, SlowCause, Straggler, TrialResult
from service.trials.straggler import slowed, straggler
from telemetry.windows.device import DeviceWindow
from tests.service.trials.test_evaluate import device_window
from trainables.breakdown import Breakdown
from trainables.status import Status

DATA = Path(__file__).parents[3] / "benchmarks" / "data"
LAYOUT = Layout("megatron", 4, 16)
BLANK = Breakdown(**dict.fromkeys(Breakdown.__dataclass_fields__, 0.0))


def rank(number: int, waits: float, layout: Layout = LAYOUT, idle: float = 0.0, copies: float = 0.0) -> RankRecord:
    """One that waits for so many seconds of a step of 2 s, and computes in what is left."""
    compute = 2.0 - waits - idle - copies
    times = replace(
        BLANK, span_s=2.0, compute_s=compute, exposed_communication_s=waits, idle_s=idle, memory_copy_s=copies
    )
    return RankRecord(number, number, "node", f"GPU-{number}", layout.coordinates(number), None, times)


def windows(**slow: Any) -> list[DeviceWindow]:
    """Of four GPUs, of which the third fared otherwise."""
    usual = [device_window(f"GPU-{number}", 7000.0) for number in range(4)]
    usual[2] = replace(usual[2], **slow)
    return usual


def throttled(**seconds: float) -> dict[str, float]:
    return {"power_cap": 5.0, "sw_thermal": 0.0, "hw_thermal": 0.0} | seconds


SLOW = [rank(0, 0.10), rank(1, 0.11), rank(2, 0.04), rank(3, 0.10)]


@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        ({"mean_sm_clock_mhz": 1440.0, "throttle_s": throttled(sw_thermal=2.0)}, SlowCause.HEAT),
        ({"mean_sm_clock_mhz": 1440.0, "throttle_s": throttled()}, SlowCause.POWER_CAP),
        ({"mean_sm_clock_mhz": 1440.0, "throttle_s": throttled(power_cap=0.0)}, SlowCause.CLOCK),
        ({"mean_sm_clock_mhz": 1500.0}, SlowCause.UNKNOWN),
        ({"mean_sm_clock_mhz": None}, SlowCause.UNKNOWN),
    ],
)
def test_counters_of_the_window_tell_why_a_gpu_computes_for_longer(slow: dict[str, Any], cause: SlowCause) -> None:
    found = straggler(SLOW, windows(**slow), LAYOUT)
    assert found is not None
    assert (found.rank, found.device, found.cause) == (2, "GPU-2", cause)
    assert found.cost == pytest.approx(0.03)
    assert found.confidence > 0.99
    assert str(found).startswith("rank 2 (GPU-2) holds the others up for 3.0% of a step: ")


def test_what_a_gpu_lacks_work_for_is_the_host_s() -> None:
    late = [rank(0, 0.10), rank(1, 0.10), rank(2, 0.04, idle=0.06), rank(3, 0.10)]
    copying = [rank(0, 0.10), rank(1, 0.10), rank(2, 0.04, copies=0.06), rank(3, 0.10)]
    for ranks, cause in ((late, SlowCause.HOST), (copying, SlowCause.LINK)):
        found = straggler(ranks, windows(), LAYOUT)
        assert found is not None
        assert found.cause is cause


def test_without_gpus_it_is_the_host() -> None:
    slow = [rank(0, 0.6), rank(1, 0.6), rank(2, 0.1), rank(3, 0.6)]
    found = straggler([replace(one, device=None) for one in slow], [], LAYOUT)
    assert found is not None
    assert (found.device, found.cause) == (None, SlowCause.HOST)
    assert straggler([replace(one, device=None) for one in SLOW], [], LAYOUT) is None, "which processors vary by"


@pytest.mark.parametrize(("engine", "cause"), [("mine", SlowCause.EXPERT), ("megatron", SlowCause.UNKNOWN)])
def test_at_the_same_clock_experts_of_users_programs_may_have_more_to_do(engine: str, cause: SlowCause) -> None:
    found = straggler(SLOW, windows(), replace(LAYOUT, engine=engine, expert_parallel_size=4))
    assert found is not None
    assert found.cause is cause


def test_stages_of_a_pipeline_are_not_held_against_each_other() -> None:
    layout = Layout("megatron", 4, 16, pipeline_parallel_size=2)
    ranks = [rank(number, waits, layout) for number, waits in enumerate((0.9, 0.9, 0.1, 0.1))]
    assert straggler(ranks, windows(), layout) is None
    slow = [rank(number, waits, layout) for number, waits in enumerate((0.9, 0.9, 0.02, 0.1))]
    found = straggler(slow, windows(), layout)
    assert found is not None
    assert found.rank == 2


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        [rank(0, 0.1)],
        [rank(0, 0.1), rank(1, 0.1), rank(2, 0.085), rank(3, 0.1)],  # too little
        [rank(0, 0.1), rank(1, 0.1), rank(2, 0.04), rank(3, 0.04)],  # two are as slow
        [rank(0, 1.1), rank(1, 1.1), rank(2, 1.06), rank(3, 1.1)],  # within what so much communication varies by
        [replace(one, breakdown=None) for one in SLOW],
    ],
)
def test_what_does_not_stand_out_is_no_straggler(ranks: list[RankRecord]) -> None:
    assert straggler(ranks, windows(), LAYOUT) is None


def stepped(waits: list[list[float]], interrupted: float = 0.0) -> list[RankRecord]:
    """Ranks that wait for so many seconds of each of some steps of 2 s; the third's kernels are interrupted."""
    ranks = []
    for number, each in enumerate(waits):
        one = rank(number, sum(each) / len(each))
        own_s = tuple(2.0 - wait for wait in each)
        often = interrupted if number == 2 else 0.0
        ranks.append(replace(one, own_s=own_s, compute_alone_s=own_s, interrupted_s=often))
    return ranks


def test_one_step_that_halted_is_no_slow_gpu_and_a_few_per_cent_of_all_are() -> None:
    """In one step of five the third held the others up for a tenth of it, or in each for a fiftieth."""
    usual = [[0.10, 0.101, 0.099, 0.10, 0.102], [0.10, 0.10, 0.101, 0.099, 0.10]]
    once = [0.10, 0.10, -0.10, 0.10, 0.10]
    always = [0.06, 0.059, 0.061, 0.06, 0.06]
    assert straggler(stepped([*usual, once]), windows(), LAYOUT) is None
    found = straggler(stepped([*usual, always]), windows(), LAYOUT)
    assert found is not None
    assert (found.rank, found.cause) == (2, SlowCause.UNKNOWN)
    assert found.cost == pytest.approx(0.02, abs=0.001)


def test_kernels_that_are_interrupted_now_and_then_tell_of_other_programs() -> None:
    waits = [[0.10] * 5, [0.10] * 5, [0.06, 0.059, 0.061, 0.06, 0.06]]
    found = straggler(stepped(waits, interrupted=0.04), windows(mean_sm_clock_mhz=1440.0), LAYOUT)
    assert found is not None
    assert found.cause is SlowCause.SHARED, "whatever the clock is"


def test_kernels_that_are_interrupted_confirm_what_is_in_doubt() -> None:
    """The third waits for 1.1% less of a step, which varies by as much, with interruptions and without."""
    waits = [[0.10, 0.12, 0.08, 0.11, 0.09], [0.10, 0.11, 0.09, 0.08, 0.12], [0.09, 0.06, 0.08, 0.10, 0.06]]
    assert straggler(stepped(waits), windows(), LAYOUT) is None
    found = straggler(stepped(waits, interrupted=0.05), windows(), LAYOUT)
    assert found is not None
    assert (found.rank, found.cause) == (2, SlowCause.SHARED)
    assert found.cost == pytest.approx(0.018, abs=0.001)


def test_what_others_take_may_show_between_kernels() -> None:
    def late(interrupted: float) -> Straggler | None:
        ranks = stepped([[0.10] * 5, [0.10] * 5, [0.06] * 5], interrupted)
        times = ranks[2].breakdown
        assert times is not None
        times = replace(times, idle_s=0.03, compute_s=times.compute_s - 0.03)
        return straggler([*ranks[:2], replace(ranks[2], breakdown=times)], windows(), LAYOUT)

    for interrupted, cause in ((0.0, SlowCause.HOST), (0.02, SlowCause.HOST), (0.04, SlowCause.SHARED)):
        found = late(interrupted)
        assert found is not None
        assert found.cause is cause


def test_other_programs_that_interrupt_most_steps_are_told_by_what_still_stands_out() -> None:
    """They take 10% of a step, of which 3% stand out; where they take 4%, 1.2% that stand out are too few."""
    for waits, interrupted, cause in ((0.10, 0.06, SlowCause.SHARED), (0.22, 0.024, SlowCause.UNKNOWN)):
        found = straggler(stepped([[0.30] * 5, [0.30] * 5, [waits] * 5], interrupted), windows(), LAYOUT)
        assert found is not None
        assert found.cause is cause


def test_a_clock_that_does_not_explain_the_time_is_no_cause() -> None:
    waits = [[0.20] * 5, [0.20] * 5, [0.10] * 5]
    found = straggler(stepped(waits), windows(mean_sm_clock_mhz=1485.0), LAYOUT)
    assert found is not None
    assert found.cause is SlowCause.UNKNOWN


def test_what_ranks_differ_by_when_all_is_well_is_taken_off() -> None:
    always = stepped([[0.10] * 5, [0.10] * 5, [0.06] * 5])
    usual = [always] * 5
    assert straggler(always, windows(), LAYOUT, usual) is None
    slow = stepped([[0.10] * 5, [0.04] * 5, [0.06] * 5])
    found = straggler(slow, windows(), LAYOUT, usual)
    assert found is not None
    assert found.rank == 1
    assert found.cost == pytest.approx(0.03)


def beside(compute: float, idle: float, overlapped: float, number: int) -> RankRecord:
    """One that computes for `compute` seconds of a step of 2 s without communication beside it, here with some."""
    longer = compute + 0.2 * overlapped
    one = rank(number, 2.0 - longer - idle, idle=idle)
    assert one.breakdown is not None
    return replace(
        one,
        breakdown=replace(one.breakdown, overlapped_communication_s=overlapped),
        own_s=(longer + idle,) * 5,
        compute_alone_s=(compute,) * 5,
    )


def test_hosts_that_keep_their_gpus_waiting_hide_no_slow_one() -> None:
    """The first GPU waits for the second's host while it computes, and that one for the first one's next time."""
    chance = random.Random(0)

    def pair(slow: float) -> list[RankRecord]:
        late, early = chance.uniform(0.0, 0.4), chance.uniform(0.0, 0.4)
        return [beside(1.2, late, early, 0), beside(1.2 * (1 + slow), early, late, 1)]

    before = [pair(0.0) for _ in range(20)]
    for _ in range(20):
        assert straggler(pair(0.0), windows(), LAYOUT, before) is None
        found = straggler(pair(0.04), windows(), LAYOUT, before)
        assert found is not None
        assert (found.rank, found.cause) == (1, SlowCause.UNKNOWN)
        assert found.cost == pytest.approx(0.024, abs=0.001)


def test_a_slow_gpu_that_waits_the_less_for_its_host_holds_nobody_up() -> None:
    assert straggler([beside(1.2, 0.4, 0.0, 0), beside(1.24, 0.36, 0.0, 1)], windows(), LAYOUT) is None
    found = straggler([beside(1.2, 0.4, 0.0, 0), beside(1.24, 0.4, 0.0, 1)], windows(), LAYOUT)
    assert found is not None
    assert found.rank == 1


def test_a_rank_alone_is_held_against_itself() -> None:
    def alone(compute: float) -> RankRecord:
        return rank(0, 2.0 - compute)

    before = [alone(1.5 + 0.001 * number) for number in range(-5, 5)]
    assert slowed(alone(1.503), windows(), before, windows(), LAYOUT) is None
    found = slowed(alone(1.55), windows(), before, windows(), LAYOUT)
    assert found is not None
    assert (found.rank, found.cause) == (0, SlowCause.UNKNOWN)
    assert found.cost == pytest.approx(0.025, abs=0.001)
    assert slowed(alone(1.55), windows(), before[:2], windows(), LAYOUT) is None, "nothing is known of it"


def test_a_host_that_is_now_slower_now_faster_hides_no_slow_gpu() -> None:
    """Nor is a GPU blamed for what its host takes longer."""

    def alone(compute: float, idle: float) -> RankRecord:
        return rank(0, 2.0 - compute - idle, idle=idle)

    before = [alone(1.5 + 0.001 * (number % 3), 0.10 + 0.05 * (number % 4)) for number in range(20)]
    assert slowed(alone(1.502, 0.28), windows(), before, windows(), LAYOUT) is None
    found = slowed(alone(1.54, 0.12), windows(), before, windows(), LAYOUT)
    assert found is not None
    assert found.cause is SlowCause.UNKNOWN
    assert found.cost == pytest.approx(0.02, abs=0.001)
    late = slowed(alone(1.502, 0.6), windows(), before, windows(), LAYOUT)
    assert late is not None
    assert late.cause is SlowCause.HOST
    assert late.cost == pytest.approx(0.21, abs=0.02)


def measured() -> Iterator[tuple[Layout, list[RankRecord]]]:
    """Trials on four GPUs of which none was slow."""
    for name in ("layouts_4xh200", "microbatch_4xh200", "llama3_8b_best_4xh200"):
        for line in (DATA / f"{name}.jsonl").read_text().splitlines():
            trial = json.loads(line)
            if trial.get("ranks"):
                yield Layout.from_dict(trial["config"]), [RankRecord.from_dict(one) for one in trial["ranks"]]


def test_no_gpu_of_committed_trials_stands_out() -> None:
    trials = list(measured())
    assert len(trials) >= 10
    for layout, ranks in trials:
        assert straggler(ranks, (), layout) is None, layout.label


def test_each_gpu_of_committed_trials_is_found_when_it_waits_less() -> None:
    """By 5% of the step, of which a GPU that was 2% faster than the others has 3 left."""
    for layout, ranks in measured():
        if layout.expert_parallel_size > 1 or layout.tensor_parallel_size > 1 or layout.pipeline_parallel_size > 1:
            continue
        for slow in ranks:
            held_up = [one if one is slow else waiting(one, 0.05) for one in ranks]
            found = straggler(held_up, (), layout)
            assert found is not None
            assert found.rank == slow.rank
            assert found.cost == pytest.approx(0.05, abs=0.025)


def waiting(one: RankRecord, share: float) -> RankRecord:
    """A rank that waits for more of the step."""
    times = one.breakdown
    assert times is not None
    more = times.exposed_communication_s + share * times.span_s
    return replace(one, breakdown=replace(times, exposed_communication_s=more))


def test_a_record_keeps_it() -> None:
    slow = Straggler(2, "node", "GPU-2", 0.03, SlowCause.HEAT, 0.999)
    result = TrialResult("t", LAYOUT, Status.OK, straggler=slow)
    kept = json.loads(json.dumps(result.to_dict()))
    assert TrialResult.from_dict(kept) == result
    assert Straggler.from_dict(json.loads(json.dumps(asdict(slow)))) == slow
    del kept["straggler"]
    assert TrialResult.from_dict(kept).straggler is None, "of records from before there were any"
