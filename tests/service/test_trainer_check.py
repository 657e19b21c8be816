"""A trainer's program that is tried for a few steps, and what is said of one that cannot be timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from service.cli import main

TOLD = """import sys, time
for step in range(1, 10_000):
    time.sleep(0.02)
    print(f"step {step} loss {5 - step / 100_000:.5f}", flush=True)
"""
FEW = TOLD.replace("10_000", "3")


def trainer(folder: Path, program: str, **fields: object) -> Path:
    (folder / "program.py").write_text(program)
    file = folder / "mine.yaml"
    given = {"command": ["python", "program.py"], "axes": {"micro_batch_size": [1, 2]}}
    pattern = r"step (?P<step>\d+) loss (?P<loss>\S+)"
    file.write_text(yaml.safe_dump(given | {"steps": {"step": pattern}} | fields))
    return file


@pytest.mark.slow
def test_a_program_that_logs_its_steps_passes(tmp_path: Path, ray_session: object) -> None:
    called = CliRunner().invoke(main, ["trainer", "check", str(trainer(tmp_path, TOLD)), "--json"])
    assert called.exit_code == 0, called.output
    told = json.loads(called.stdout)
    assert told["passed"]
    assert told["arguments"][-1] == "program.py"
    assert told["advice"] == []
    assert told["result"]["status"] == "ok"


@pytest.mark.slow
def test_a_program_that_ends_by_itself_is_told_what_it_lacks(tmp_path: Path, ray_session: object) -> None:
    called = CliRunner().invoke(main, ["trainer", "check", str(trainer(tmp_path, FEW))])
    assert called.exit_code == 1, called.output
    assert "missing: it ended of its own: give it so many steps" in called.stdout


@pytest.mark.parametrize("wrong", ["nowhere.yaml", "no-such-trainer"])
def test_what_is_no_trainer_is_one_line(wrong: str, tmp_path: Path) -> None:
    called = CliRunner().invoke(main, ["trainer", "check", str(tmp_path / wrong) if "." in wrong else wrong])
    assert (called.exit_code, called.stdout) == (2, "")
    assert called.stderr.count("\n") == 1
    assert wrong in called.stderr
