"""Every second is counted once, for what it went into."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainables import laps


def test_seconds_go_into_what_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.0, 15.0, 16.0])
    monkeypatch.setattr(laps, "time", SimpleNamespace(monotonic=lambda: next(now)))
    clock = laps.Laps()
    for name in ("kernels", "launches", "kernels"):
        clock.end(name)
    assert clock.seconds == {"kernels": 3.0, "launches": 3.0}
