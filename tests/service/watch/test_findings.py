"""What is found of a run, on windows made by hand: what is so is told once, and chance is not told."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from service.watch.findings import Confirmed, Devices, Finding, Steps, errors
from service.watch.stamps import Pace
from telemetry.samples import THROTTLE_CAUSES
from telemetry.windows.device import DeviceWindow
from tests.service.trials.test_evaluate import device_window

RANKS = {f"GPU-{number}": number for number in range(4)}


def windows(throttled: dict[str, float] | None = None, capped: float = 0.5, **changes: Any) -> list[DeviceWindow]:
    """Of four GPUs that the power limit holds down for a share of the time, of which the third fared otherwise."""
    made = []
    for number in range(4):
        one = device_window(f"GPU-{number}", 7000.0)
        seconds: dict[str, float | None] = dict.fromkeys(THROTTLE_CAUSES, 0.0)
        made.append(replace(one, throttle_s=seconds | {"power_cap": capped * one.duration_s}))
    shares = {cause: share * made[2].duration_s for cause, share in (throttled or {}).items()}
    made[2] = replace(made[2], throttle_s={**made[2].throttle_s, **shares}, **changes)
    return made


def judged(*each: Sequence[DeviceWindow]) -> list[Finding]:
    """What is found in the last of some windows."""
    devices = Devices()
    return [devices.judge(one, RANKS) for one in each][-1]


def pace(step_s: float, **ranks: float) -> Pace:
    return Pace(10, step_s, None, {int(name[1:]): seconds for name, seconds in ranks.items()} or {0: step_s})


def test_gpus_that_are_alike_and_at_their_power_limit_are_no_finding() -> None:
    assert judged(*[windows()] * 20) == []
    assert judged(windows(capped=1.0)) == []


@pytest.mark.parametrize(
    ("throttled", "cause"),
    [({"sw_thermal": 0.3}, "heat"), ({"hw_brake": 0.3}, "power limit"), ({"power_cap": 0.0}, "clock")],
)
def test_a_gpu_whose_clock_is_below_the_others_is_named_with_its_cause(throttled: dict[str, float], cause: str) -> None:
    clock = windows()[0].mean_sm_clock_mhz
    assert clock is not None
    found = {one.kind: one for one in judged(windows(throttled, mean_sm_clock_mhz=0.95 * clock))}
    assert found["slow"].details == {"device": "GPU-2", "rank": 2, "cost": pytest.approx(1 / 0.95 - 1), "cause": cause}
    assert found["slow"].of == "GPU-2"
    assert ("heat" in found) == (cause == "heat")
    assert ("power" in found) == (cause == "power limit")
    assert judged(windows(throttled={"power_cap": 0.0}, mean_sm_clock_mhz=0.995 * clock)) == []
    assert judged(windows(throttled={"power_cap": 0.0}, mean_sm_clock_mhz=None)) == []


def test_gpus_of_other_pipeline_stages_may_have_another_clock() -> None:
    two = windows({"power_cap": 0.0}, mean_sm_clock_mhz=1300.0)
    assert [one.of for one in Devices().judge(two, RANKS, {0: 0, 1: 0, 2: 1, 3: 1})] == ["GPU-2"], "slower than 3"
    assert Devices().judge(two, RANKS, {0: 0, 1: 0, 2: 1, 3: 0}) == []


def test_heat_is_told_of_any_number_of_gpus() -> None:
    (hot,) = judged(windows({"hw_thermal": 0.5}, peak_gpu_temp_c=88.0)[2:3])
    assert (hot.kind, hot.of) == ("heat", "GPU-2")
    assert hot.text == "GPU-2: heat held the clock down for 50% of the time, at up to 88 degC"


def test_the_power_limit_is_told_where_it_holds_more_than_it_did() -> None:
    before = [windows(capped=0.5)] * 8
    assert judged(*before, windows({"power_cap": 0.58})) == []
    (found,) = judged(*before, windows({"power_cap": 0.75}))
    assert found.text == "GPU-2: the power limit held the clock down for 75% of the time, 50% before"


def test_a_finding_is_told_once_when_it_is_sure_and_once_when_it_is_over() -> None:
    one, confirmed = Finding("heat", "GPU-2", "hot"), Confirmed()
    so = [True, False, True, True, True, False, True, False, False, False, True, True]
    told = [[over for _, over in confirmed.update([one] if now else [])] for now in so]
    assert told == [[], [], [], [False], [], [], [], [], [True], [], [], [False]]
    assert confirmed.of("heat") == [one]


def test_steps_are_slower_only_beyond_what_they_vary_by() -> None:
    dice = random.Random(7)
    for noise in (0.0012, 0.02):
        steps, alarms = Steps(), 0
        confirmed = Confirmed()
        for _ in range(2000):
            found = steps.judge(pace(dice.gauss(1.0, noise)))
            alarms += sum(not over for _, over in confirmed.update(found))
        assert alarms <= 2, noise
        found = [steps.judge(pace(1.0 + 12 * noise + 0.005)) for _ in range(2)][-1]
        assert [one.kind for one in found] == ["slower"]


def test_what_held_a_run_up_from_its_beginning_is_not_what_is_usual() -> None:
    steps = Steps()
    for _ in range(10):
        steps.judge(pace(1.2))
    for _ in range(10):
        assert steps.judge(pace(1.0)) == []
    assert steps.judge(pace(1.1))[0].text == "a step takes 1.1 s, 10.0% more than the 1 s that it took"


@pytest.mark.parametrize(
    ("lower", "longer", "cause"),
    [(0.05, 0.05, "heat"), (0.05, 0.2, None), (0.005, 0.05, None), (0.0, 0.05, None)],
)
def test_slower_steps_are_put_down_to_a_clock_that_is_lower_by_enough(
    lower: float, longer: float, cause: str | None
) -> None:
    """Whatever clocks the GPUs differ by: each is held against itself."""
    before = [replace(one, mean_sm_clock_mhz=1400.0 + 100 * number) for number, one in enumerate(windows())]
    now = [*before[:2], windows({"sw_thermal": 0.3}, mean_sm_clock_mhz=1600.0 * (1 - lower))[2], before[3]]
    steps = Steps()
    for number in range(8):
        assert steps.judge(pace(1.0 + 0.001 * (number % 2)), before) == []
    (found,) = steps.judge(pace(1.0 + longer), now)
    assert found.details.get("cause") == cause
    assert found.details.get("device") == (cause and "GPU-2")
    assert ("GPU-2's clock is 5.0% lower than it was; heat" in found.text) == (cause is not None)
    (unknown,) = steps.judge(pace(1.0 + longer), [replace(one, mean_sm_clock_mhz=None) for one in now])
    assert "cause" not in unknown.details


def test_a_rank_whose_own_steps_take_longer_is_named() -> None:
    (found,) = Steps().judge(pace(1.1, r0=1.0, r1=1.1, r2=1.0))
    assert (found.kind, found.of, found.details["cost"]) == ("slow", "rank 1", pytest.approx(0.1))
    assert Steps().judge(pace(1.01, r0=1.0, r1=1.01, r2=1.0)) == []


def test_errors_are_told_as_they_come() -> None:
    assert errors({}, {"xid_errors": 3, "xid": 79}) is None, "before the watch"
    assert errors({"xid_errors": 0}, {"xid_errors": 1, "xid": 79}) == "1 XID errors, the last one 79"
    assert errors({"ecc_uncorrected": 2, "xid_errors": 1}, {"ecc_uncorrected": 5, "xid_errors": 1}) == (
        "3 memory errors that were not corrected"
    )
    assert errors({"ecc_uncorrected": 2}, {}) is None
