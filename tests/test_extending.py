"""docs/extending.md holds: each of its examples, carried out on a copy of the tree, is all that is needed.

A vendor's device is `tests/telemetry/test_vendors.py`, whose module is the page's example.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worked_examples import ROOT, copy_of_the_tree, example

FILES = {
    "An engine": {
        "search_spaces/engines/ddp.py",
        "search_spaces/engines/__init__.py",
        "trainables/engines/ddp/engine.py",
    },
    "An axis": {
        "search_spaces/layout.py",
        "trainables/engines/megatron/engine.py",
        "search_spaces/engines/deepspeed.py",
    },
    "An objective": {"service/metrics.py", "service/trials/figures.py"},
    "A vendor's device": {"telemetry/devices/intel.py"},
    "An export": {"service/answers/exports/nanotron.py"},
}
"""What an example may change at most: an engine in two files and its registration, an axis in one row and its use, an
objective in one row and its producer, a vendor or an export in one file."""

PROGRAMS = {"An engine": "engine", "An axis": "axis", "An objective": "objective", "An export": "export"}


@pytest.mark.parametrize("title", FILES)
def test_an_example_changes_no_more_than_it_should(title: str) -> None:
    assert {change.path for change in example(title)} == FILES[title]


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[pytest.mark.slow] * (title == "An axis")) for title in PROGRAMS]
)
def test_an_example_is_all_that_is_needed(title: str, tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    for change in example(title):
        change.carry_out(tree)
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "WATTUNE_HOME": str(tmp_path / "home")}
    subprocess.run([sys.executable, "docs/tables.py"], cwd=tree, env=environment, check=True)
    program = ROOT / "tests" / "extending" / f"{PROGRAMS[title]}.py"
    ended = subprocess.run(
        [sys.executable, str(program)], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_the_tables_of_the_spec_are_up_to_date(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    subprocess.run([sys.executable, "docs/tables.py"], cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, check=True)
    assert (tree / "docs" / "spec.md").read_text() == (ROOT / "docs" / "spec.md").read_text()
