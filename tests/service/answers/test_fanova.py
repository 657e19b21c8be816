"""What single axes explain, held against functions whose variance is known, and against Optuna's own fANOVA."""

from __future__ import annotations

import itertools

import numpy as np
import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.importance import FanovaImportanceEvaluator, get_param_importances

from service.answers.fanova import shares

SIZES, ORDERED = (2, 4, 3), (False, True, False)
GRID = list(itertools.product(*map(range, SIZES)))


def test_a_sum_is_split_by_the_variance_of_its_terms() -> None:
    values = [10.0 * a + 2.0 * b for a, b, _ in GRID]
    first, second = np.var([0, 10]), np.var([0, 2, 4, 6])
    expected = [first / (first + second), second / (first + second), 0.0]
    assert shares(GRID, values, SIZES, ORDERED) == pytest.approx(expected, abs=0.05)


def test_what_axes_explain_together_is_no_axis_s_own() -> None:
    values = [100.0 * (a == (b > 1)) + c for a, b, c in GRID]
    found = shares(GRID, values, SIZES, ORDERED)
    assert sum(found) == pytest.approx(1.0)


def test_equal_values_are_explained_by_nothing() -> None:
    assert shares(GRID, [5.0] * len(GRID), SIZES, ORDERED) == [0.0, 0.0, 0.0]


def test_axes_that_change_together_share_alike() -> None:
    places = [(a, a, b) for a in range(3) for b in range(3)]
    one, other, _ = shares(places, [float(a) for a, _, _ in places], (3, 3, 3), (True, True, True))
    assert 0.3 < one / (one + other) < 0.7


def test_it_finds_what_optuna_finds() -> None:
    random = np.random.default_rng(1)
    places = [GRID[i] for i in random.integers(len(GRID), size=40)]
    values = [1000 + 100 * b + 30 * a + 40 * (c == 1) + random.normal() for a, b, c in places]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study, names = optuna.create_study(), ("a", "b", "c")
    kinds: dict[str, BaseDistribution] = {
        name: IntDistribution(0, size - 1) if ordered else CategoricalDistribution(range(size))
        for name, size, ordered in zip(names, SIZES, ORDERED, strict=True)
    }
    for place, value in zip(places, values, strict=True):
        params = dict(zip(names, place, strict=True))
        study.add_trial(optuna.create_trial(params=params, distributions=kinds, value=value))
    theirs = get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))
    assert shares(places, values, SIZES, ORDERED) == pytest.approx([theirs[name] for name in names], abs=0.03)
