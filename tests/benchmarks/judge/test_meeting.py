"""What the slowest of committed gangs' ranks did for longer than their slices."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.judge.meeting import IDLE, main, points, table
from benchmarks.measure.blind import read
from benchmarks.measure.off import percent

DATA = Path("benchmarks/data")
FILES = DATA / "blind19_2xh200.jsonl.xz", DATA / "blind19_2xh200.measured.jsonl.xz"


def test_ranks_that_meet_in_every_block_are_too_fast_by_slices_and_replicas_hardly() -> None:
    found = list(points(*map(read, FILES)))
    full = {row["layout"]: row["full"]["metrics"] for row in read(FILES[1])}
    assert len(found) == 12
    for one in found:
        metrics = full[one.layout.label]
        assert one.layout.pipeline_parallel_size == 1
        assert metrics["breakdown_idle_s"] <= IDLE * metrics["step_time_s"]
        assert one.meets == any(f" {axis}2 " in one.layout.label for axis in ("tp", "cp", "ep"))
    replicas, meeting = ([one.step for one in found if one.meets == meets] for meets in (False, True))
    assert (len(replicas), len(meeting)) == (3, 9)
    assert sum(meeting) / 9 < sum(replicas) / 3 < 0
    *_, of_replicas, of_meeting = table(found).splitlines()
    assert percent(sum(replicas) / 3) in of_replicas
    assert percent(sum(meeting) / 9) in of_meeting


def test_files_that_have_no_such_layout_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(DATA / "blind3_2xh100.jsonl.xz"), str(DATA / "blind3_2xh100.measured.jsonl.xz")])
    assert "no layout without a pipeline is in both files of a pair" in capsys.readouterr().err
