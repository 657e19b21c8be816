"""The GPU for which others wait is named with its cost and cause, and none is where GPUs only differ as they do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.layout import Layout
from service.result import RankRecord, SlowCause, Straggler, TrialResult
from service.trials.straggler import straggler
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


def test_at_the_same_clock_experts_may_have_more_to_do() -> None:
    found = straggler(SLOW, windows(), replace(LAYOUT, expert_parallel_size=4))
    assert found is not None
    assert found.cause is SlowCause.EXPERT


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
