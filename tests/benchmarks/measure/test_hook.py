"""What the hook costs a step is measured of the hook itself."""

from __future__ import annotations

import pytest

from benchmarks.measure.hook import main


@pytest.mark.slow
def test_every_state_is_measured_and_the_watcher_hears(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--steps", "20", "--step-s", "0.5"])
    title, *states, heard = capsys.readouterr().out.splitlines()
    assert title.endswith(", 20 steps each")
    assert [state.split("  ")[0] for state in states] == ["outside Wattune", "watched", "watched by nobody"]
    assert all("of a step of 0.5 s" in state for state in states)
    assert heard.endswith("of 120 steps")
    assert int(heard.split()[4]) > 0
