"""A difference is proven where its interval excludes zero, and seldom where there is none."""

from __future__ import annotations

import random

import pytest

from service.paired import difference


def noisy(random_: random.Random, saves: float, pairs: int) -> tuple[list[float], list[float]]:
    """Costs of two of which the other saves a share; what drifts from pair to pair is far more than noise."""
    drifts = [10.0 * (1 + 0.05 * random_.random()) for _ in range(pairs)]
    plain = [each * random_.gauss(1, 0.002) for each in drifts]
    return plain, [each * (1 - saves) * random_.gauss(1, 0.002) for each in drifts]


def test_what_drifts_falls_out() -> None:
    found = difference(*noisy(random.Random(1), 0.01, 12))
    assert found.saves == pytest.approx(0.01, abs=0.002)
    assert found.half is not None
    assert found.half < 0.003
    assert found.proven


def test_what_saves_nothing_is_seldom_proven_to() -> None:
    chance = random.Random(2)
    proven = sum(difference(*noisy(chance, 0.0, 6)).proven for _ in range(2000))
    assert 20 <= proven <= 80, "2.5% of them"


def test_one_pair_proves_nothing() -> None:
    found = difference([2.0], [1.0])
    assert (found.saves, found.half, found.proven) == (0.5, None, False)
