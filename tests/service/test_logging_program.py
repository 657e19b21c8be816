"""A program that cannot be changed, known by its log alone, is searched like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from service.client import Wattune
from service.home import Home
from service.record.results import Results
from service.spec import make_problem


def test_a_program_that_only_logs_is_searched_and_each_failure_has_its_cause(ray_session: Any, home: Home) -> None:
    trainer = {
        "name": "logging",
        "command": ["python", "logging_program.py", "{fault}"],
        "directory": str(Path(__file__).parent),
        "axes": {"fault": ["none", "oom", "crash", "hang", "nan", "silent"]},
        "steps": {"step": r"^step (?P<step>\d+) loss (?P<loss>\S+)"},
    }
    problem = make_problem(
        {
            "name": "logging",
            "trainer": trainer,
            "sequence_length": 8,
            "global_batch_size": 1,
            "cluster": {"nodes": 1, "gpus_per_node": 1, "accelerator": "cpu", "cpus_per_worker": 0.5},
            "measurement": {"window_s": 0.5, "window_min_steps": 5, "warmup_max_s": 0.5, "deadline_s": 8}
            | {"breakdown": False},
            "budget": {"trials": 6, "wall_time_s": 600},
            "finalists": {"count": 0},
        }
    )
    search = Wattune(home.tracking_uri).run(problem)
    trials = {trial.layout.setting("fault"): trial for trial in Results(home.tracking_uri).search(search).trials}
    assert {fault: trial.status for fault, trial in trials.items()} == {
        "none": "ok",
        "oom": "oom",
        "crash": "crash",
        "hang": "hang",
        "nan": "invalid",
        "silent": "hang",
    }
    causes = {fault: trial.cause or "" for fault, trial in trials.items()}
    assert "no room for the activations" in causes["oom"]
    assert "the data ended" in causes["crash"]
    assert "waited for step 4" in causes["hang"]
    assert "the loss is not finite" in causes["nan"]
    assert "waited for the first step" in causes["silent"]
