"""Three minutes of the soak: what it demands holds, and it would tell if it did not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measure.apart import possible

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not possible(), reason="no namespace can be made here")]


@pytest.mark.timeout(1500)
def test_searches_survive_three_minutes_of_faults_and_leave_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.measure.soak", "--minutes", "3", "--trials", "8", "--seed", "1"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "soak.json"), "--keep", str(tmp_path / "kept")],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    figures = json.loads((tmp_path / "soak.json").read_text())
    assert sum(figures["faults"].values()) >= 3
    assert len(figures["searches"]) >= 2
    assert {one["status"] for one in figures["searches"]} == {"finished"}
    assert all(one["explored"] == 8 for one in figures["searches"])
