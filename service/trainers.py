"""Trainers that are ready to be named, and which of all trainers a cluster runs.

A trainer names a command. On one's own machine that is one's own affair; on a Ray cluster only those of the directory
that its operator names in WATTUNE_TRAINERS are run, and those that come with Wattune, unless somebody lets in others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError

from search_spaces.trainer import Trainer
from service.answers.tables import render
from service.errors import InputError
from service.reading import Strict
from service.spec import explanation
from service.trainer_spec import DIRECTORY, TrainerSpec, described, ready, resolved


@dataclass(frozen=True)
class ReadyTrainer:
    """One that a spec can name, and its file. `fault`: what is wrong with the file, which has no `trainer` then."""

    name: str
    file: Path
    trainer: Trainer | None
    fault: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        fields = None if self.trainer is None else described(self.trainer)
        return {"name": self.name, "file": str(self.file), "trainer": fields, "fault": self.fault}


class _File(Strict):
    trainer: Annotated[TrainerSpec, BeforeValidator(resolved)]


def load(reference: str, folder: Path = Path()) -> Trainer:
    """The trainer of a name or of a file's path, which is relative to `folder`. Raises `InputError`."""
    try:
        return _File.model_validate({"trainer": reference}, context={"folder": folder}).trainer.trainer
    except ValidationError as error:
        raise InputError(f"{reference}: {explanation(error)}") from None


def ready_trainers() -> list[ReadyTrainer]:
    """Those that a spec can name here, in the order of their names. Raises `InputError` if there is no such folder."""
    return [_ready(name, file) for name, file in sorted(ready().items())]


def _ready(name: str, file: Path) -> ReadyTrainer:
    try:
        return ReadyTrainer(name, file, load(name))
    except InputError as error:
        return ReadyTrainer(name, file, None, str(error))


def text(trainers: Sequence[ReadyTrainer]) -> str:
    """For a terminal: a row for each."""
    if not trainers:
        return f"no trainers: {DIRECTORY} names the directory of your own"
    rows = []
    for one in trainers:
        axes = one.fault if one.trainer is None else ", ".join(dict(one.trainer.axes))
        steps = "" if one.trainer is None else one.trainer.steps
        rows.append([one.name, axes or "-", steps if isinstance(steps, str) else "patterns", str(one.file)])
    return render(["trainer", "axes", "steps", "file"], rows)


def is_ready(trainer: Trainer) -> bool:
    """Whether a trainer is, to the letter, the ready one of its name here."""
    file = ready().get(trainer.name)
    return file is not None and _ready(trainer.name, file).trainer == trainer


def check_allowed(trainer: Trainer | None, allowed: bool) -> None:
    """Raise `InputError` on a Ray cluster for a trainer that is none of its ready ones, unless somebody allowed it."""
    if trainer is None or allowed or not os.environ.get("RAY_ADDRESS") or is_ready(trainer):
        return
    raise InputError(refused(trainer))


def refused(trainer: Trainer) -> str:
    """Why a cluster does not run a trainer."""
    return (
        f"trainer: a cluster runs its ready ones alone, of which {trainer.name} is none: have it put into the directory"
        f" that {DIRECTORY} names there, or give --allow-trainer"
    )
