"""What commands import: for an answer nobody waits for a library that it does not need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service import Wattune
from service.home import Home
from service.record.tracking import Tracker
from service.result import Purpose, TrialResult
from tests.service.records import problem
from trainables.status import Status

HEAVY = ("mlflow", "sqlalchemy", "optuna", "sklearn", "scipy", "pandas", "pyarrow", "ray", "torch", "deepspeed")
CODE = """
import json, sys
from service.cli import main
for command in json.loads(sys.argv[1]):
    main(command, standalone_mode=False)
print(json.dumps([name for name in json.loads(sys.argv[2]) if name in sys.modules]))
"""


@pytest.fixture
def searched(home: Home) -> str:
    """The id of a search with trials enough for all that a report says, and finalists."""
    space = {"tensor_parallel_size": [1, 2], "micro_batch_size": [1, 2, 4], "zero_stage": [0, 1], "precision": "fp32"}
    of = problem(space=space, objectives={"tokens_per_s": "maximize"})
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("tiny-1", of, {})
    layouts = of.legal.layouts
    trials = [(Purpose.SEARCH, layout) for layout in layouts] + [(Purpose.FINALIST, layouts[0])] * 2
    for number, (purpose, layout) in enumerate(trials):
        speed: dict[str, float | None] = {"tokens_per_s": 100.0 - number, "tokens_per_s_per_gpu": 50.0 - number / 2}
        tracker.start_trial(f"t{number}", layout, purpose)
        tracker.finish_trial(TrialResult(f"t{number}", layout, Status.OK, None, speed, purpose=purpose))
    tracker.finish_search("finished", {})
    return "tiny-1"


def imported(commands: list[list[str]], names: tuple[str, ...]) -> list[str]:
    """Which of `names` are loaded once all of `commands` have run in one process."""
    code = [sys.executable, "-c", CODE, json.dumps(commands), json.dumps(names)]
    ran = subprocess.run(code, check=True, capture_output=True, text=True)
    loaded: list[str] = json.loads(ran.stdout.splitlines()[-1])
    return loaded


COMPLETING = """
import json, sys
from service.cli import main
try:
    main(prog_name="wattune")
finally:
    print(json.dumps([name for name in json.loads(sys.argv[1]) if name in sys.modules]))
"""


def completed(shell: str, *words: str) -> list[str]:
    """What a shell offers for the last word, which no slow library is imported for."""
    place = words[-1] if shell == "fish" else str(len(words))
    asked = {"_WATTUNE_COMPLETE": f"{shell}_complete", "COMP_WORDS": " ".join(("wattune", *words)), "COMP_CWORD": place}
    code = [sys.executable, "-c", COMPLETING, json.dumps(HEAVY)]
    ran = subprocess.run(code, env=os.environ | asked, check=True, capture_output=True, text=True)
    *offered, loaded = ran.stdout.splitlines()
    assert json.loads(loaded) == []
    return offered


def test_the_shell_completes_searches_of_the_state_directory(searched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed("bash", "report", "ti") == ["plain,tiny-1"]
    assert completed("fish", "compare", "--json", "tiny") == ["plain,tiny-1"]
    assert "tiny-1" in completed("zsh", "why", "t")
    assert completed("bash", "compare", "other") == ["file,other"], "it may be a file"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert completed("bash", "report", "ti") == ["file,ti"], "no server is asked"


def test_answers_import_no_library_that_they_do_not_need(searched: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps([trial.to_dict() for trial in Wattune().trials(searched)]))
    reading = [["list"], ["status", searched], ["best", searched], ["pareto", searched]]
    assert imported(reading, (*HEAVY, "pydantic", "requests")) == []
    assert imported([["report", searched], ["why", searched], ["compare", searched, str(elsewhere)]], HEAVY) == []


def test_asking_for_help_imports_nothing_but_what_parses_arguments() -> None:
    assert imported([["--help"], ["best", "--help"]], (*HEAVY, "pydantic", "requests", "numpy", "yaml")) == []


@pytest.mark.parametrize("example", ["tiny_cpu", "llama3_8b_8xh200"])
def test_planning_imports_no_engine(example: str) -> None:
    spec = Path(__file__).parents[2] / "examples" / f"{example}.yaml"
    assert imported([["plan", str(spec)]], HEAVY) == []
