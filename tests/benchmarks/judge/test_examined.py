"""Predictions of layouts on GPUs that the doctor had examined."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import DATA
from benchmarks.judge.examined import main, points
from benchmarks.measure.blind import read

SLOW = DATA / "blind23_2xh200.measured.jsonl.xz"


def test_slow_gpus_are_foretold_nearer_once_examined(capsys: pytest.CaptureFixture[str]) -> None:
    rows = read(SLOW)
    usual, slow = list(points(rows, 668e12)), list(points(rows, 647e12))
    assert [point.examined for point in usual] == pytest.approx([point.plain for point in usual])
    assert all(point.plain <= point.examined < point.plain + 668 / 647 - 1 for point in slow)
    assert statistics.fmean(abs(point.examined) for point in slow) < 0.75 * statistics.fmean(
        abs(point.plain) for point in slow
    )
    main(["647", str(SLOW)])
    head, _, row, of_all, mixtures = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["run", "TFLOP/s", "layouts"]
    assert row.split()[:3] == ["blind23_2xh200", "647", str(len(slow))]
    assert of_all.split()[1:] == row.split()[2:]
    assert mixtures.split()[:3] == ["DeepSpeed's", "mixtures", str(sum(point.is_deepspeed_mixture for point in slow))]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["647"], "in pairs"),
        (["fast", str(SLOW)], "fast is no number"),
        (["647", str(DATA / "blind23_2xh200.jsonl.xz")], "no measured layout"),
    ],
)
def test_what_is_no_pair_is_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(given)
    assert said in capsys.readouterr().err
