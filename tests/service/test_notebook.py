"""The example notebook: its cells run as they stand, on a record, and show what they say."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from service.home import Home
from service.record.tracking import Tracker
from service.result import TrialResult
from tests.service.records import problem
from trainables.status import Status

NOTEBOOK = Path(__file__).parents[2] / "examples" / "read_a_search.ipynb"


def run(cell: str, names: dict[str, Any]) -> Any:
    """The value of a cell's last line, as a notebook shows it; None where that is no expression."""
    *lines, last = ast.parse(cell).body
    exec(compile(ast.Module(lines if isinstance(last, ast.Expr) else [*lines, last], []), str(NOTEBOOK), "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


def test_the_example_notebook_shows_a_search_and_holds_it_against_another(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {"tensor_parallel_size": [1, 2], "micro_batch_size": [1, 2], "zero_stage": 0, "precision": "fp32"}
    of = problem(space=space, objectives={"tokens_per_s": "maximize", "joules_per_token": "minimize"})
    for name, factor in (("s0", 1.0), ("s1", 1.1)):
        tracker = Tracker(home.tracking_uri, home)
        tracker.start_search(name, of, {})
        for number, layout in enumerate(of.legal.layouts):
            speed = factor * (1000.0 - 100 * number)
            metrics: dict[str, float | None] = {"tokens_per_s": speed, "tokens_per_s_per_gpu": speed / 2}
            metrics["joules_per_token"] = 0.5 - number / 10
            tracker.start_trial(f"{name}-{number}", layout)
            tracker.finish_trial(TrialResult(f"{name}-{number}", layout, Status.OK, metrics=metrics))
        tracker.finish_search("finished", {})
    names: dict[str, Any] = {}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = [run("".join(cell["source"]), names) for cell in cells]
    assert all(cell["outputs"] == [] for cell in cells)
    assert shown[0] == ("s1", "finished", {"ok": 4})
    assert "is the best on tokens_per_s" in shown[1]._repr_html_()
    assert shown[2].loc[1, "max"] == 1100.0
    assert shown[3][1] == 1100.0
    assert shown[4]._repr_svg_().startswith("<svg")
    assert "throughput per GPU ['500', '550'] +10.0%" in capsys.readouterr().out
