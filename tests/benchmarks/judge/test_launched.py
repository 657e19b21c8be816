"""Predictions on hosts whose launches were measured."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.judge.launched import main, points

RUN = "blind25_1xh200"


def test_launches_take_longer_in_a_step_than_in_tiny_models(capsys: pytest.CaptureFixture[str]) -> None:
    found = points(RUN, (1.0, 1.1))
    waiting, others = ([point for point in found if point.waits is waits] for waits in (True, False))
    assert (len(waiting), len(others)) == (10, 5)
    assert all(point.off[0] < point.off[1] for point in waiting)
    alone, in_step = (statistics.fmean(abs(point.off[index]) for point in waiting) for index in (0, 1))
    assert in_step < 0.9 * alone
    main([RUN])
    *_, row, every = capsys.readouterr().out.splitlines()
    assert row.split()[:2] == [RUN, "10"]
    assert row.split()[3] == f"{alone:.1%}"
    assert every.split()[1:] == row.split()[1:]


@pytest.mark.parametrize("run", ["blind9_2xh200", "blind99"])
def test_a_run_without_operators_or_measurements_is_refused(run: str) -> None:
    with pytest.raises(SystemExit, match=f"{run}: no operators are committed"):
        main([run])
