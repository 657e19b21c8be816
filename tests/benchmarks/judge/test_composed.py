"""Committed slices put together again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.judge.composed import main, points, table
from benchmarks.measure.blind import read

DATA = Path("benchmarks/data")
SLICES, MEASURED = DATA / "blind17_2xh200.jsonl.xz", DATA / "blind17_2xh200.measured.jsonl.xz"


@pytest.mark.slow
def test_pipelines_are_put_together_as_now_and_told_beside_what_was_recorded() -> None:
    rows = points(read(SLICES), read(MEASURED))
    assert len(rows) == 15
    assert all(" pp2 " in row["layout"] for row in rows)
    for row in rows:
        # No message is under way while DeepSpeed's ranks compute: nothing has changed for them.
        changed = row["error"]["step_time_s"] != pytest.approx(row["recorded"]["step_time_s"], abs=1e-9)
        assert not changed or row["layout"].startswith("megatron")
    assert abs(rows[0]["error"]["step_time_s"]) < 0.025, "they were fitted so"
    assert max(abs(row["recorded"]["step_time_s"]) for row in rows) > 0.035
    *_, mean, largest = table(rows).splitlines()
    assert "mean of 15" in mean
    assert largest.split()[-2] == "3.68%"


def test_files_without_a_pipeline_in_common_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(SLICES), str(DATA / "blind4_2xh100.measured.jsonl.xz")])
    assert "no pipeline of it is in" in capsys.readouterr().err
