"""Programs of others are searched: the plain example, Transformers' Trainer, and one that is known by its log alone."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces import trainers
from service.client import Wattune
from service.home import Home
from service.record.results import Results, SearchRecord
from service.spec import make_problem
from service.trials.command import command_of
from tests.service import warm_python
from trainables.command import TRIAL_DIR
from trainables.foreign.steps import HOOK
from trainables.losses import check_learning
from trainables.trainers import FOLDER

# The Trainer asks DeepSpeed whether a model is its own, wherever that is installed.
IMPORTED = ["transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate", "deepspeed"]
IMPORTED += ["peft"] if find_spec("peft") else []
SMALL = {"family": "llama", "layers": 1, "hidden": 32, "heads": 2, "ffn_hidden": 64, "vocab": 64}
ON_TWO_CORES = {"nodes": 1, "gpus_per_node": 2, "accelerator": "cpu", "cpus_per_worker": 0.5}
BRIEF = {"window_s": 0.2, "window_min_steps": 3, "warmup_max_s": 0.3, "deadline_s": 60, "breakdown": False}
HUGGINGFACE = {
    "name": "huggingface",
    "model": SMALL | {"max_sequence_length": 32},
    "data": "synthetic",
    "sequence_length": 32,
    "global_batch_size": 8,
    "cluster": ON_TWO_CORES,
}
OWN = {"attention": "sdpa", "sharding": "fsdp", "lora_rank": 0}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of programs for which `python` has imported torch and Transformers already."""
    folder = tmp_path_factory.mktemp("python")
    executable = folder / "python"
    executable.write_text(f"#!{sys.executable} -IS\n{Path(warm_python.__file__).read_text()}")
    executable.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        serve = [sys.executable, "-I", warm_python.__file__, "--serve", str(listener.fileno()), *IMPORTED]
        server = subprocess.Popen(serve, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    yield {"PATH": str(folder), warm_python.SOCKET: str(folder / "socket")}
    server.communicate()


def searched(home: Home, spec: dict[str, Any], trials: int) -> SearchRecord:
    """Random layouts, which are the same however long each takes."""
    how = {"measurement": BRIEF, "finalists": {"count": 0}, "sampler": "random"}
    problem = make_problem(how | spec | {"budget": {"trials": trials, "wall_time_s": 600}})
    return Results(home.tracking_uri).search(Wattune(home.tracking_uri).run(problem))


@pytest.mark.slow  # its program trains among tests/trainables, and by slices of this spec in those of gangs
def test_the_plain_example(ray_session: Any, home: Home, python: dict[str, str]) -> None:
    file = Path(__file__).parents[2] / "examples" / "plain_pytorch.yaml"
    spec = yaml.safe_load(file.read_text())
    spec["trainer"]["environment"] |= python
    spec["trainer"]["directory"] = str(file.parent)
    record = searched(home, spec | {"measurement": BRIEF, "seed": 10}, trials=3)  # which have every value of each axis
    assert [(trial.status, trial.cause) for trial in record.trials] == [("ok", None)] * 3
    layouts = [trial.layout for trial in record.trials]
    assert {layout.num_gpus for layout in layouts} == {1, 2} == {layout.setting("threads") for layout in layouts}
    assert {layout.micro_batch_size for layout in layouts} == {1, 2, 4}
    assert {layout.precision for layout in layouts} == {"fp32", "bf16"}


@pytest.mark.slow
def test_transformers_trainer(ray_session: Any, home: Home, python: dict[str, str]) -> None:
    trainer = yaml.safe_load((Path(trainers.__path__[0]) / "huggingface.yaml").read_text())
    trainer |= {"name": "huggingface", "environment": trainer["environment"] | python, "directory": str(FOLDER)}
    trainer["rules"] += ["num_gpus == 1 or recompute == 'full'", "num_gpus == 2 or recompute == 'none'"]
    trainer["rules"] += ["num_gpus == 1 or attention == 'eager'", "num_gpus == 2 or attention == 'sdpa'"]
    axes = {"num_gpus": [1, 2], "zero_stage": 0, "micro_batch_size": 2, "recompute": ["none", "full"]}
    own = OWN | {"attention": ["sdpa", "eager"]}
    record = searched(home, HUGGINGFACE | {"trainer": trainer, "space": axes | {"precision": "fp32"} | own}, trials=2)
    assert [(trial.status, trial.cause) for trial in record.trials] == [("ok", None)] * 2
    layouts = [trial.layout for trial in record.trials]
    assert {layout.num_gpus for layout in layouts} == {1, 2}
    assert {layout.recompute for layout in layouts} == {"none", "full"}
    assert {layout.setting("attention") for layout in layouts} == {"sdpa", "eager"}


@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
@pytest.mark.xdist_group("ray_session")  # for `python`, as above
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_transformers_trainer_trains_adapters(recompute: str, tmp_path: Path, python: dict[str, str]) -> None:
    axes = {"num_gpus": 1, "zero_stage": 0, "micro_batch_size": 2, "recompute": recompute, "precision": "fp32"}
    problem = make_problem(HUGGINGFACE | {"trainer": "huggingface", "space": axes | OWN | {"lora_rank": 8}})
    assert problem.trainer is not None
    command = command_of(problem.legal.layouts[0], problem.trainer, problem)
    for name, file in command.files:
        (tmp_path / name).write_text(file.replace(TRIAL_DIR, str(tmp_path)).replace("1000000000", "20"))
    done = subprocess.run(
        [argument.replace(TRIAL_DIR, str(tmp_path)) for argument in command.arguments],
        env=os.environ | python | {"PYTHONPATH": str(HOOK)},
        cwd=command.directory,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    check_learning(tuple(map(float, re.findall(r"'loss': '([\d.]+)'", done.stdout))))


@pytest.mark.slow
def test_a_program_that_only_logs_and_each_way_of_failing(ray_session: Any, home: Home) -> None:
    trainer = {
        "name": "logging",
        "command": ["python", "logging_program.py", "{fault}"],
        "directory": str(Path(__file__).parent),
        "axes": {"fault": ["none", "oom", "crash", "hang", "nan"]},
        "steps": {"step": r"^step (?P<step>\d+) loss (?P<loss>\S+)"},
    }
    record = searched(
        home,
        {
            "name": "logging",
            "trainer": trainer,
            "sequence_length": 8,
            "global_batch_size": 1,
            "cluster": ON_TWO_CORES | {"gpus_per_node": 1},
            "space": {"num_gpus": 1},
            "measurement": BRIEF | {"deadline_s": 6},  # of which one trial waits out all
        },
        trials=5,
    )
    trials = {trial.layout.setting("fault"): trial for trial in record.trials}
    assert {fault: trial.status for fault, trial in trials.items()} == {
        "none": "ok",
        "oom": "oom",
        "crash": "crash",
        "hang": "hang",
        "nan": "invalid",
    }
    causes = {fault: trial.cause or "" for fault, trial in trials.items()}
    assert "no room for the activations" in causes["oom"]
    assert "the data ended" in causes["crash"]
    assert "waited for step 4" in causes["hang"]
    assert "the loss is not finite" in causes["nan"]
