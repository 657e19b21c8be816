"""Which layouts of a front are measured again, and in which order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.layout import Layout
from service.goals import Goals, parse_constraint
from service.metrics import DIRECTIONS
from service.result import TrialResult
from service.sampling.finalists import CLOSE, contenders, rounds, spread
from trainables.status import Status

GOALS = Goals({name: DIRECTIONS[name] for name in ("tokens_per_s", "joules_per_token", "throttle_ratio")})
TIGHT = replace(GOALS, limits=(parse_constraint("peak_memory_gib<=5"),))


def result(i: int, rate: float | None, joules: float | None, memory: float = 1.0) -> TrialResult:
    metrics = {"tokens_per_s": rate, "joules_per_token": joules, "throttle_ratio": None, "peak_memory_gib": memory}
    return TrialResult(str(i), Layout("megatron", 1, 64, micro_batch_size=i + 1), Status.OK, metrics=metrics)


def names(results: list[TrialResult]) -> list[str]:
    return [r.trial_id for r in results]


def test_the_ends_come_first_then_what_is_farthest_from_what_was_chosen() -> None:
    on_front = [result(i, rate, rate**2) for i, rate in enumerate((10.0, 9.9, 6.0, 5.5, 1.0))]
    comparison = GOALS.among(on_front)
    assert names(spread(on_front, comparison, 1)) == ["0"]
    assert names(spread(on_front, comparison, 2)) == ["0", "4"]
    assert names(spread(on_front, comparison, 3)) == ["0", "4", "2"]
    assert names(spread(on_front, comparison, 9)) == ["0", "1", "2", "3", "4"]
    assert spread(on_front, comparison, 0) == []
    assert spread([], comparison, 3) == []


def test_where_the_front_has_few_those_close_to_it_contend_as_well() -> None:
    results = [
        result(0, 100.0, 1.0),  # beats all others
        result(1, 99.0, 1.01),
        result(2, 98.5, 1.015),
        result(3, 100.0 * (1 - 2 * CLOSE), 1.0 + 2 * CLOSE),
        result(4, 99.5, 1.005, memory=9.0),
    ]
    assert names(contenders(results, TIGHT, 4)) == ["0", "1", "2"]
    assert names(contenders(results, TIGHT, 2)) == ["0", "1"]
    unsure = replace(results[3], metrics=results[3].metrics | {"extrapolation_error": 0.015})
    assert names(contenders([*results[:3], unsure], TIGHT, 4)) == ["0", "1", "2", "3"]
    assert contenders(results, TIGHT, 0) == contenders([], TIGHT, 3) == []


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12).map(
        lambda figures: [result(i, float(rate), float(joules)) for i, (rate, joules) in enumerate(figures)]
    ),
    st.integers(1, 6),
)
def test_as_many_as_asked_for_and_the_best_on_each_objective(results: list[TrialResult], count: int) -> None:
    comparison = GOALS.among(results)
    front = comparison.front()
    chosen = spread(front, comparison, count)
    assert len({r.layout for r in chosen}) == len(chosen) == min(count, len(front))
    assert set(names(chosen)) <= set(names(front))
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
