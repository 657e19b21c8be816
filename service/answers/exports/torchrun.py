"""Wattune's own trainer, without Ray: `trainables.launch` under torchrun, which trains any layout as its trials did."""

from __future__ import annotations

from typing import Any

import yaml

from search_spaces.engines import ENGINES
from service.answers.exports import Export, Program, Variable, power_limit
from service.answers.nodes import torchrun
from trainables.launch import Launch

FILE = "run.yaml"


def settings(launch: Launch) -> dict[str, Any]:
    return launch.to_dict()


def render(settings: dict[str, Any]) -> str:
    """A shell script that writes the file and starts the trainer on it."""
    command = torchrun(Launch.from_dict(settings), ("-m", "trainables.launch", FILE))
    return f"cat > {FILE} <<'EOF'\n{_yaml(settings)}EOF\n{command}\n"


def program(launch: Launch) -> Program:
    steps = Variable("TRAIN_STEPS", "the number of optimizer steps to time", "20")
    return Program(("-m", "trainables.launch", FILE, "--steps", steps), {FILE: _yaml(settings(launch))})


def _yaml(settings: dict[str, Any]) -> str:
    return yaml.safe_dump(settings, sort_keys=False)


EXPORT = Export(
    "torchrun", tuple(ENGINES), settings, render, lambda launch: power_limit(launch.layout), program=program
)
