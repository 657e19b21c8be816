"""How far finalists' slices were off corrects which layouts are measured next, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search_spaces.layout import Layout
from service.goals import Goals
from service.metrics import DIRECTIONS, OFF, Method
from service.problem import Finalists
from service.result import Purpose, TrialResult
from service.sampling.correction import corrected, mean_off
from service.sampling.finalists import due
from trainables.status import Status

GOALS = Goals({name: DIRECTIONS[name] for name in ("tokens_per_s", "throttle_ratio")})
CHOSEN = Finalists(count=1, repeats=2)


def sliced(number: int, rate: float) -> TrialResult:
    layout = Layout("megatron", 2, 64, micro_batch_size=number)
    metrics: dict[str, float | None] = {"tokens_per_s": rate, "throttle_ratio": 0.0, "final_loss": 2.0}
    methods = dict.fromkeys(("tokens_per_s", "throttle_ratio"), Method.SLICE)
    return TrialResult(f"sliced {number}", layout, Status.OK, metrics=metrics, methods=methods)


def measured(one: TrialResult, rate: float) -> TrialResult:
    off = (one.metrics["tokens_per_s"] or 0.0) / rate - 1
    metrics: dict[str, float | None] = {"tokens_per_s": rate, "throttle_ratio": 0.0, OFF + "tokens_per_s": off}
    return replace(one, trial_id="measured", metrics=metrics, methods={}, purpose=Purpose.FINALIST)


FIRST, SECOND, THIRD = sliced(1, 130.0), sliced(2, 120.0), sliced(4, 112.0)


def test_the_mean_of_what_slices_were_off_is_taken_out() -> None:
    finalists = [measured(FIRST, 100.0), measured(FIRST, 130.0 / 1.2)]
    assert mean_off(finalists) == pytest.approx({"tokens_per_s": 0.25})
    first, second, *others = corrected([FIRST, SECOND, *finalists])
    assert first.metrics == pytest.approx({"tokens_per_s": 104.0, "throttle_ratio": 0.0, "final_loss": 2.0})
    assert second.metrics["tokens_per_s"] == pytest.approx(96.0)
    assert first.methods == second.methods == {}
    assert others == finalists
    assert FIRST.metrics["tokens_per_s"] == 130.0, "the record's own"


def test_without_finalists_nothing_is_corrected() -> None:
    assert corrected([FIRST, SECOND]) == [FIRST, SECOND]


@pytest.mark.parametrize("rates", [(128.0, 129.0), (110.0, 110.0)])
def test_what_all_slices_overrate_alike_leaves_nothing_open(rates: tuple[float, float]) -> None:
    explored = [FIRST, SECOND, THIRD]
    assert due(explored, GOALS, CHOSEN, seed=0) == [FIRST.layout] * 2
    again = [measured(FIRST, rate) for rate in rates]
    assert due([*explored, *again], GOALS, CHOSEN, seed=0) == []


def test_what_may_be_better_than_a_finalist_once_corrected_is_measured_next() -> None:
    """Slices overrated the first by 30% and the thrifty one by nothing: the second is expected to be the fastest."""
    goals = Goals({name: DIRECTIONS[name] for name in ("tokens_per_s", "joules_per_token")})
    chosen, thrifty = Finalists(count=2, repeats=2), sliced(8, 60.0)

    def drawing(one: TrialResult, joules: float) -> TrialResult:
        return replace(one, metrics=one.metrics | {"joules_per_token": joules})

    explored = [drawing(FIRST, 1.0), drawing(SECOND, 1.1), drawing(THIRD, 2.0), drawing(thrifty, 0.5)]
    explored = [replace(one, methods=one.methods | {"joules_per_token": Method.SLICE}) for one in explored]
    assert set(due(explored, goals, chosen, seed=0)) == {FIRST.layout, thrifty.layout}
    again = [drawing(measured(FIRST, 100.0), 1.0), drawing(measured(thrifty, 60.0), 0.5)] * 2
    assert set(due([*explored, *again], goals, chosen, seed=0)) == {FIRST.layout, SECOND.layout}
    exact = [drawing(measured(FIRST, 130.0), 1.0), drawing(measured(thrifty, 60.0), 0.5)] * 2
    assert due([*explored, *exact], goals, chosen, seed=0) == []
