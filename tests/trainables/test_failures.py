"""A trial that fails leaves nothing behind: neither a process nor a connection nor memory, and the next is as fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "import sys; from tests.trainables.faults import main; main(int(sys.argv[1]))"
CAUSES = {
    "forward": ("oom", "OutOfMemoryError: CUDA out of memory"),
    "backward": ("oom", "OutOfMemoryError: CUDA out of memory"),
    "optimizer": ("oom", "OutOfMemoryError: CUDA out of memory"),
    "killed": ("crash", "the process was killed by SIGKILL"),
}


@pytest.mark.slow
@pytest.mark.parametrize("trials", [3, 30])
def test_failed_trials_leave_nothing_behind(trials: int, capfd: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(trials)], cwd=root, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["failed"]) == trials // 3
    assert len({fault for fault, *_ in found["failed"]}) == min(len(CAUSES), trials // 3)
    for fault, other, status, cause in found["failed"]:
        assert (status, CAUSES[fault][1] in cause) == (CAUSES[fault][0], True), (fault, cause)
        # The other rank is stopped, unless it hears first that its peer is gone.
        assert other in ("aborted", "crash")
    before, after = found["left"]
    assert after["trial processes"] == before["trial processes"] == 0
    for resource in ("files", "connections", "threads", "shared memory"):
        assert after[resource] <= before[resource], resource
    assert after["memory MiB"] <= before["memory MiB"] + 20
    at_first, at_last = found["step_s"]
    with capfd.disabled():
        print(f" a step of the first trial {at_first * 1e3:.1f} ms, after {trials} trials {at_last * 1e3:.1f} ms")
    assert at_last < 3 * at_first
