"""A difference is proven where its interval excludes zero, and seldom where there is none."""

from __future__ import annotations

import random

import pytest
from scipy.stats import wilcoxon

from service.paired import difference


def noisy(random_: random.Random, saves: float, pairs: int) -> tuple[list[float], list[float]]:
    """Costs of two of which the other saves a share; what drifts from pair to pair is far more than noise."""
    drifts = [10.0 * (1 + 0.05 * random_.random()) for _ in range(pairs)]
    plain = [each * random_.gauss(1, 0.002) for each in drifts]
    return plain, [each * (1 - saves) * random_.gauss(1, 0.002) for each in drifts]


def test_what_drifts_falls_out() -> None:
    found = difference(*noisy(random.Random(1), 0.01, 12))
    assert found.saves == pytest.approx(0.01, abs=0.002)
    assert found.interval is not None
    low, high = found.interval
    assert low < found.saves < high < low + 0.006
    assert found.proven


def test_what_saves_nothing_is_seldom_proven_to() -> None:
    chance = random.Random(2)
    proven = sum(difference(*noisy(chance, 0.0, 6)).proven for _ in range(2000))
    assert 10 <= proven <= 60, "one in 64: where all six agree"


@pytest.mark.parametrize("pairs", [6, 7, 12, 25])
def test_it_is_what_wilcoxons_exact_test_says(pairs: int) -> None:
    chance = random.Random(pairs)
    verdicts = set()
    for _ in range(200):
        plain, other = noisy(chance, 0.002, pairs)
        saved = [1 - cost / usual for usual, cost in zip(plain, other, strict=True)]
        proven = difference(plain, other).proven
        assert proven == (wilcoxon(saved, alternative="greater", method="exact").pvalue <= 0.025)
        verdicts.add(proven)
    assert len(verdicts) == 2


def test_one_pair_that_was_disturbed_does_not_hide_what_the_others_show() -> None:
    plain, other = noisy(random.Random(3), 0.01, 12)
    other[4] *= 1.1
    assert difference(plain, other).proven


@pytest.mark.parametrize("pairs", [1, 5])
def test_five_pairs_and_fewer_prove_nothing(pairs: int) -> None:
    found = difference([2.0] * pairs, [1.0] * pairs)
    assert (found.saves, found.interval, found.proven, found.pairs) == (0.5, None, False, pairs)
    assert str(found) == "50.00%"
