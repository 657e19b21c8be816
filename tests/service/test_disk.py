"""A state directory on a disk that is full, or cannot be written at all: for real, in a namespace of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.measure.apart import possible
from tests.service.test_resume import SPEC

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not possible(), reason="no namespace can be made here")]

FULL = """
import sys
from service.home import Home
from service.record.tracking import Tracker
from service.result import TrialResult
from service.spec import load_spec
from trainables.status import Status

problem, home = load_spec(sys.argv[1]), Home.locate().create()
tracker = Tracker(f"sqlite:///{sys.argv[2]}/mlflow.db", home)
tracker.start_search("s", problem, {})
result = TrialResult("t", problem.legal.layouts[0], Status.OK, losses=tuple(range(100_000)))
tracker.start_trial("t", result.layout)
filler = home.path / "filler"
with filler.open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
try:
    tracker.finish_trial(result)
except OSError as error:
    print("refused", home.is_why(error))
filler.unlink()
tracker.finish_trial(result)
print("taken", *tracker.notices, sep=";")
"""


def apart(mount: str, home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command in namespaces in which a file system is mounted at the state directory."""
    home.mkdir()
    script = f'mount -t tmpfs -o {mount} wattune {home} && exec "$@"'
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    environment = {"WATTUNE_HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([*unshare, *command], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return path


def test_a_result_that_a_full_disk_does_not_take_is_taken_once_there_is_space(spec_file: Path, tmp_path: Path) -> None:
    done = apart("size=2m", tmp_path / "home", sys.executable, "-c", FULL, str(spec_file), str(tmp_path))
    assert done.stdout.splitlines() == ["refused True", "taken"], done.stderr


def test_a_search_does_not_begin_where_nothing_can_be_written(spec_file: Path, tmp_path: Path) -> None:
    done = apart("ro", tmp_path / "home", sys.executable, "-m", "service.cli", "run", str(spec_file))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"wattune: WATTUNE_HOME: {tmp_path / 'home'} is no directory to write to: Read-only file system\n"
    )
