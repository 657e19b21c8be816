"""Which layouts of a front are measured again, and in which order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.layout import Layout
from service.result import TrialResult
from service.sampling.finalists import CLOSE, contenders, front, rounds, spread

OBJECTIVES = {"tokens_per_s": "maximize", "joules_per_token": "minimize", "throttle_ratio": "minimize"}


def result(i: int, rate: float | None, joules: float | None, status: str = "ok", memory: float = 1.0) -> TrialResult:
    metrics = {"tokens_per_s": rate, "joules_per_token": joules, "throttle_ratio": None, "peak_memory_gib": memory}
    return TrialResult(str(i), Layout("megatron", 1, 64, micro_batch_size=i + 1), status, metrics=metrics)


def names(results: list[TrialResult]) -> list[str]:
    return [r.trial_id for r in results]


def test_the_front_is_of_trials_that_ended_well_and_keep_the_limits() -> None:
    results = [
        result(0, 10.0, 1.0),
        result(1, 9.0, 2.0),  # beaten
        result(2, 8.0, 0.5),
        result(3, 20.0, 0.1, status="pruned"),
        result(4, 20.0, 0.1, memory=9.0),
        result(5, 30.0, None),  # no figure to be beaten on
    ]
    assert names(front(results, OBJECTIVES, [("peak_memory_gib", "<=", 5.0)])) == ["0", "2"]
    assert front([result(0, None, None)], OBJECTIVES) == []
    assert front([], OBJECTIVES) == []


def test_the_ends_come_first_then_what_is_farthest_from_what_was_chosen() -> None:
    on_front = [result(i, rate, rate**2) for i, rate in enumerate((10.0, 9.9, 6.0, 5.5, 1.0))]
    assert names(spread(on_front, OBJECTIVES, 1)) == ["0"]
    assert names(spread(on_front, OBJECTIVES, 2)) == ["0", "4"]
    assert names(spread(on_front, OBJECTIVES, 3)) == ["0", "4", "2"]
    assert names(spread(on_front, OBJECTIVES, 9)) == ["0", "1", "2", "3", "4"]
    assert spread(on_front, OBJECTIVES, 0) == []
    assert spread([], OBJECTIVES, 3) == []


def test_where_the_front_has_few_those_close_to_it_contend_as_well() -> None:
    results = [
        result(0, 100.0, 1.0),  # beats all others
        result(1, 99.0, 1.01),
        result(2, 98.5, 1.015),
        result(3, 100.0 * (1 - 2 * CLOSE), 1.0 + 2 * CLOSE),
        result(4, 99.5, 1.005, memory=9.0),
    ]
    limits = [("peak_memory_gib", "<=", 5.0)]
    assert names(contenders(results, OBJECTIVES, limits, 4)) == ["0", "1", "2"]
    assert names(contenders(results, OBJECTIVES, limits, 2)) == ["0", "1"]
    unsure = replace(results[3], metrics=results[3].metrics | {"extrapolation_error": 0.015})
    assert names(contenders([*results[:3], unsure], OBJECTIVES, limits, 4)) == ["0", "1", "2", "3"]
    assert contenders(results, OBJECTIVES, limits, 0) == contenders([], OBJECTIVES, limits, 3) == []


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12).map(
        lambda figures: [result(i, float(rate), float(joules)) for i, (rate, joules) in enumerate(figures)]
    ),
    st.integers(1, 6),
)
def test_as_many_as_asked_for_and_the_best_on_each_objective(results: list[TrialResult], count: int) -> None:
    found = front(results, OBJECTIVES)
    chosen = spread(found, OBJECTIVES, count)
    assert len({r.layout for r in chosen}) == len(chosen) == min(count, len(found))
    assert set(names(chosen)) <= set(names(found))
    if count >= 2:
        for metric, best in (("tokens_per_s", max), ("joules_per_token", min)):
            assert best(r.metrics[metric] or 0 for r in chosen) == best(r.metrics[metric] or 0 for r in results)


@pytest.mark.parametrize("seed", range(3))
def test_each_round_measures_each_layout_once_in_an_order_of_its_own(seed: int) -> None:
    layouts = [result(i, 1.0, 1.0).layout for i in range(6)]
    order = rounds(layouts, 3, seed)
    each = [order[i : i + 6] for i in (0, 6, 12)]
    assert all(Counter(layouts) == Counter(one) for one in each)
    assert each[0] != each[1] != each[2]
    assert order == rounds(layouts, 3, seed) != rounds(layouts, 3, seed + 1)
