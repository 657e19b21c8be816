"""When a trial may be ended: only if nothing that it can still come to would bring it to the front."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.problem import Problem
from service.spec import make_problem
from service.trials.early_stop import bounds, cause, remaining_s, rival
from trainables.measure import Procedure, Stretch

SECOND = 1_000_000_000
OBJECTIVES = {"tokens_per_s": "maximize", "joules_per_token": "minimize", "throttle_ratio": "minimize"}
TOKENS = 64 * 128


def spec(objectives: dict[str, str] = OBJECTIVES) -> Problem:
    return make_problem(
        {
            "name": "early",
            "model": "tiny-llama",
            "data": "synthetic",
            "sequence_length": 128,
            "global_batch_size": 64,
            "cluster": {"gpus_per_node": 2, "accelerator": "h200"},
            "objectives": objectives,
        }
    )


def steps(*seconds: float) -> Stretch:
    return Stretch(seconds, 5 * SECOND, 5 * SECOND + round(sum(seconds) * SECOND))


STEADY = steps(10.0, 10.0, 10.0)
BEST = bounds(spec(), 2, STEADY, energy_j=30_000.0)


def test_bounds_are_what_was_seen_and_the_noise_of_a_figure_more() -> None:
    assert BEST["tokens_per_s"] == pytest.approx(TOKENS / 10 / (1 - 0.0075))
    # Energy is known but for its noise, and for two tenths of a second at the ends of these thirty.
    assert BEST["joules_per_token"] == pytest.approx(10_000 / TOKENS * (1 - 0.027 - 0.2 / 30))
    assert BEST["throttle_ratio"] == 0.0


def test_steps_that_vary_more_than_a_gpu_s_leave_more_room() -> None:
    wide = bounds(spec(), 2, steps(9.0, 10.0, 11.0), energy_j=30_000.0)
    assert wide["tokens_per_s"] == pytest.approx(TOKENS / (9 * (1 - 3 * 0.1 / 3**0.5)))
    assert wide["joules_per_token"] < 0.9 * BEST["joules_per_token"]


def test_of_steps_that_vary_as_much_as_they_take_nothing_can_be_said() -> None:
    assert bounds(spec(), 2, steps(1.0, 1.0, 10.0), energy_j=30_000.0) == {}


@pytest.mark.parametrize(
    ("objectives", "bounded"),
    [
        ({"mfu": "maximize", "step_time_s": "minimize"}, {"mfu", "step_time_s"}),
        ({"tokens_per_s": "minimize", "energy_per_step_j": "maximize"}, set()),  # the other way they have no bound yet
        ({"peak_memory_gib": "minimize", "throttle_time_s": "minimize"}, {"throttle_time_s"}),
    ],
)
def test_objectives_of_which_nothing_can_be_said_have_no_bound(objectives: dict[str, str], bounded: set[str]) -> None:
    assert set(bounds(spec(objectives), 2, STEADY, 30_000.0)) == bounded


def point(**changes: float) -> dict[str, float]:
    return {"tokens_per_s": 2000.0, "joules_per_token": 0.5, "throttle_ratio": 0.0} | changes


@pytest.mark.parametrize(
    ("front", "beaten"),
    [
        ([point()], True),
        ([point(tokens_per_s=820.0)], False),  # 819 were seen, and 0.75% more may come
        ([point(tokens_per_s=826.0)], True),
        ([point(joules_per_token=1.2)], False),
        ([point(throttle_ratio=0.001)], False),  # the trial may never be throttled
        ([point(joules_per_token=5.0), point(tokens_per_s=5.0)], False),  # no single one is better on both
        ([point(joules_per_token=5.0), point(tokens_per_s=900.0)], True),
        ([{"tokens_per_s": 2000.0, "joules_per_token": 0.5}], True),  # on this machine nobody knows of throttling
        ([{"tokens_per_s": 2000.0}, point(joules_per_token=5.0)], False),
        ([], False),
    ],
)
def test_a_trial_is_dominated_by_a_point_that_beats_all_its_bounds(front: list[dict[str, float]], beaten: bool) -> None:
    assert (rival(spec().goals, BEST, front) is not None) == beaten


def test_without_a_bound_on_every_objective_nothing_is_dominated() -> None:
    unknown = bounds(spec(), 2, STEADY, energy_j=None)
    assert "joules_per_token" not in unknown
    assert rival(spec().goals, unknown, [point()]) is None


amounts = st.floats(0.1, 100.0)


@settings(deadline=None, max_examples=50)
@given(st.lists(amounts, min_size=2, max_size=5), amounts, amounts, amounts)
def test_what_was_seen_already_never_counts_as_dominated_by_itself(
    seconds: list[float], joules: float, tokens_per_s: float, joules_per_token: float
) -> None:
    best = bounds(spec(), 2, steps(*seconds), energy_j=joules)
    seen: dict[str, Any] = {
        "tokens_per_s": TOKENS * len(seconds) / sum(seconds),
        "joules_per_token": joules / len(seconds) / TOKENS,
        "throttle_ratio": 0.0,
    }
    assert rival(spec().goals, best, [seen]) is None
    other = {"tokens_per_s": tokens_per_s, "joules_per_token": joules_per_token, "throttle_ratio": 0.0}
    if rival(spec().goals, best, [other]) is not None:
        assert tokens_per_s > seen["tokens_per_s"]
        assert joules_per_token < seen["joules_per_token"]


def test_the_cause_names_the_bounds_and_who_beats_them() -> None:
    assert cause(BEST, point()) == (
        "dominated: tokens_per_s 825.4, joules_per_token 1.18, throttle_ratio 0 at best, "
        "where another has tokens_per_s 2000, joules_per_token 0.5, throttle_ratio 0"
    )


def test_what_a_trial_has_before_it_is_its_window_and_the_step_to_profile() -> None:
    procedure = Procedure(3, 0.02, 30.0, window_s=10.0, window_min_steps=5, breakdown=True)
    assert remaining_s(procedure, 1.0) == 11.0
    assert remaining_s(procedure, 12.0) == 72.0
