"""What a pipeline's rank reserves with segments elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.judge import addresses
from benchmarks.judge.addresses import main, points, table
from benchmarks.measure.blind import read

DATA = Path("benchmarks/data")
LAYOUT = "megatron 2gpu dp1 pp2 zero0 mbs2 interleaved_zero_bubble vpp2"


def test_with_segments_elsewhere_a_replay_comes_to_what_a_gang_reserved_and_a_rank_alone_did_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "ORDERS", 8)
    sliced, measured = (
        [row for row in read(DATA / f"blind22_2xh200{name}.jsonl.xz") if row["layout"] == LAYOUT]
        for name in ("", ".measured")
    )
    first, last = points(sliced, measured)
    assert (first.rank, last.rank) == (0, 1)
    assert last.gang > 1.03 * last.alone
    assert last.replayed == pytest.approx(last.alone, rel=1e-3)
    assert min(last.scattered) == pytest.approx(last.alone, rel=1e-3)
    assert max(last.scattered) == pytest.approx(last.gang, rel=1e-3)
    assert 0 < last.as_in_gang < len(last.scattered) == 8
    assert table([first, last]).splitlines()[2].endswith(f"{last.as_in_gang} of 8"), "the furthest off first"


def test_files_without_eager_pipelines_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(DATA / "blind3_2xh100.jsonl.xz"), str(DATA / "blind3_2xh100.measured.jsonl.xz")])
    assert "no eager pipeline of megatron is in both files of a pair" in capsys.readouterr().err
