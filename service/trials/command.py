"""What a trainer's program is started with for one layout."""

from __future__ import annotations

import json
from typing import Any

import yaml

from search_spaces.engines.foreign import names_of
from search_spaces.layout import Layout
from search_spaces.trainer import HOOK, Trainer
from service.problem import Problem
from service.trials import toml
from trainables.command import Command, LogPatterns
from trainables.logs import LOGS


def command_of(layout: Layout, trainer: Trainer, problem: Problem) -> Command:
    """The command of a layout. Raises `ExpressionError` for a template that comes to nothing for it."""
    names = names_of(layout, problem.workload) | problem.names
    return Command(
        arguments=trainer.arguments(names),
        environment=trainer.variables(names),
        files=tuple((name, _written(name, data)) for name, data in trainer.documents(names).items()),
        directory=trainer.directory,
        tokens_per_step=problem.tokens_per_step,
        steps=_patterns(trainer),
        out_of_memory=trainer.out_of_memory,
    )


def _patterns(trainer: Trainer) -> LogPatterns | None:
    if isinstance(trainer.steps, str):
        return None if trainer.steps == HOOK else LOGS[trainer.steps]
    return LogPatterns(**dict(trainer.steps))


def _written(name: str, data: dict[str, Any]) -> str:
    """The text of a configuration file, in the format that its name ends in."""
    if name.endswith(".json"):
        return json.dumps(data, indent=2) + "\n"
    return toml.written(data) if name.endswith(".toml") else yaml.safe_dump(data, sort_keys=False)
