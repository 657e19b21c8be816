"""How far the cost model is from what was measured, as its benchmark has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import DATA
from benchmarks.judge import cost

SWEEP = DATA / "llama3_12l_4xh200.csv"


def percent(text: str) -> float:
    return float(text.removesuffix("%")) / 100


def test_calibrated_on_sixteen_layouts_of_a_sweep_the_others_are_foretold(capsys: pytest.CaptureFixture[str]) -> None:
    """Mean errors below a tenth in step time and 8% in power, which is what a calibration is for."""
    cost.main([str(SWEEP), "--seeds", "1"])
    printed = capsys.readouterr().out.split(SWEEP.name)[1]
    (row,) = (line for line in printed.splitlines() if line.startswith("fitted to 16") and " both " in line)
    *_, step_time, _, power, _ = row.split()
    assert percent(step_time) < 0.1
    assert percent(power) < 0.08


def test_a_table_without_its_spec_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lonely = tmp_path / "lonely.csv"
    lonely.write_text(SWEEP.read_text())
    with pytest.raises(SystemExit):
        cost.main([str(lonely)])
    assert "lonely.yaml" in capsys.readouterr().err
