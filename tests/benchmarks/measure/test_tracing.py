"""What is kept of torch's record of its allocations."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.measure.allocations import main
from benchmarks.measure.tracing import events


def one(action: str, addr: int, size: int = 512, stream: int = 7, name: str = "") -> dict[str, Any]:
    """As torch has it, which tells no frames where it was not asked for them."""
    told = {"action": action, "addr": addr, "size": size, "stream": stream}
    return told | ({"frames": [{"filename": f"/site/{name}.py", "name": "f", "line": 3}]} if name else {})


def test_events_say_which_request_they_end() -> None:
    """Also where its place was another's before, and only once where nobody else had it."""
    told = events(
        [
            one("free_requested", 1),  # of before the record began
            one("segment_alloc", 1, 2048),
            one("alloc", 1, name="deepspeed/a"),
            one("alloc", 2, stream=9, name="torch/b"),
            one("free_requested", 1),
            one("free_completed", 1),
            one("alloc", 1, 1024),
            one("free_requested", 2),
            one("free_requested", 1),
            one("free_completed", 2),
            one("segment_free", 1, 2048),
        ]
    )
    assert told["events"] == [[2048, 0], [512, 0, 0], [512, 1, 1], [1], [1024, 0, 2], [2], [4], [2, "late"], [-2048, 0]]
    assert told["places"] == ["a.f:3", "b.f:3", ""]
    assert told["addresses"] == [1]


def test_a_file_without_layouts_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out.jsonl")])
    assert ended.value.code == 2
    assert "has no such layout" in capsys.readouterr().err
