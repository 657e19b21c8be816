"""What a rank reserves if memory of messages comes back sooner or later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import DATA
from benchmarks.judge import lags
from benchmarks.judge.lags import At, main, points, replayed, table
from benchmarks.measure.blind import read
from search_spaces.replay.allocator import Allocator

GANG, ALONE = (DATA / f"lags{name}_2xh200.jsonl.xz" for name in ("", "_alone"))


def test_with_other_lags_a_gang_s_requests_reserve_what_a_rank_alone_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lags, "SEEDS", 6)
    (row,), (alone,) = ([one for one in read(file) if "llama" in one["spec"]] for file in (GANG, ALONE))
    row, alone = (one | {"ranks": one["ranks"][1:]} for one in (row, alone))
    (point,) = points([row], [alone])
    assert replayed(row["ranks"][0], Allocator()) == row["ranks"][0]["reserved"]
    assert replayed(row["ranks"][0], At(row["ranks"][0]["addresses"])) == row["ranks"][0]["reserved"]
    assert point.alone is not None
    assert point.reserved > 1.03 * point.alone
    assert {round(one, 2) for one in point.others} == {round(point.alone, 2), round(point.reserved, 2)}
    assert point.alone_at == pytest.approx(point.alone), "whatever the addresses"
    assert point.spread == pytest.approx((point.reserved - point.alone) / point.reserved)
    assert table([point]).split()[-2:] == ["41.01", "41.01"]


def test_records_without_late_returns_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "one.jsonl"
    events = [[2**20, 0, 0], [0]]
    file.write_text(json.dumps({"spec": "a", "layout": "b", "ranks": [{"events": events, "places": [""]}]}) + "\n")
    with pytest.raises(SystemExit, match="2"):
        main([str(file)])
    assert "no rank has tensors that come back late" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(DATA / "blind23_2xh200.jsonl.xz")])
    assert "something else than records" in capsys.readouterr().err
