"""Layouts as the frameworks take them that launch them: a module a format, each with an `Export` named `EXPORT`."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from search_spaces.layout import Layout
from service.errors import InputError

if TYPE_CHECKING:
    from trainables.launch import Launch


@dataclass(frozen=True)
class Variable:
    """What a person says of a run: an environment variable of its start script.

    `meaning` completes "set it to"; without a `default`, the script does not start before it is set.
    """

    name: str
    meaning: str
    default: str | None = None


LEARNING_RATE = Variable("LEARNING_RATE", "the peak learning rate")
TRAIN_STEPS = Variable("TRAIN_STEPS", "the number of optimizer steps")

RANK_ORDER = "the order of the hosts and of CUDA_VISIBLE_DEVICES says which GPU takes which rank"
EXPANDABLE_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
"""What to do about these fields of `Layout`, of which no framework has a word."""


def power_limit(layout: Layout) -> dict[str, str]:
    """Likewise of the power limit, which is a person's to set."""
    if layout.power_limit_w is None:
        return {}
    return {"power_limit_w": f"nvidia-smi --power-limit={layout.power_limit_w}, as root, on each node before the run"}


@dataclass(frozen=True)
class Program:
    """What runs on every GPU: the words of a command line that torchrun takes, and the `files` beside it by name.

    A word may be a variable. `variables` are those that the files read, from the environment. `expresses`: fields of
    `Layout` that the files say, though the format has no word for them.
    """

    words: tuple[str | Variable, ...]
    files: dict[str, str] = field(default_factory=dict)
    variables: tuple[Variable, ...] = ()
    expresses: tuple[str, ...] = ()


def _nothing(launch: Launch) -> dict[str, str]:
    return {}


def _every(launch: Launch) -> None:
    return None


@dataclass(frozen=True)
class Export:
    """One format.

    - `name`: as it is asked for, the module's name with hyphens.
    - `engines`: those whose layouts it can express.
    - `settings`: the layout in this format, JSON-safe; `render`: these as text.
    - `not_expressible`: what of the layout the format has no word for, field of `Layout` -> what to do about it, by a
      text that names the framework.
    - `refusal`: why a layout of one of the engines cannot be expressed at all, None if it can.
    - `environment`: variables that the framework needs for the layout.
    - `program`: what starts a run, None where that is not known.
    - `comment`: what a comment begins with, None of a format without comments.
    """

    name: str
    engines: tuple[str, ...]
    settings: Callable[[Launch], Any]
    render: Callable[[Any], str]
    not_expressible: Callable[[Launch], dict[str, str]] = _nothing
    refusal: Callable[[Launch], str | None] = _every
    environment: Callable[[Launch], dict[str, str]] = _nothing
    program: Callable[[Launch], Program] | None = None
    comment: str | None = "#"

    def check(self, launch: Launch) -> None:
        """Raise `InputError` if the format cannot express the layout."""
        engine = launch.layout.engine
        if engine not in self.engines:
            takes = " and ".join(self.engines)
            raise InputError(f"{self.name} cannot express layouts of the engine {engine}, only of {takes}")
        if reason := self.refusal(launch):
            raise InputError(f"{self.name} cannot express {launch.layout.label}: {reason}")

    def text(self, launch: Launch) -> str:
        """The settings as text, ending in a line end; what they do not say is told in comments, if there can be any."""
        self.check(launch)
        settings = self.render(self.settings(launch))
        if self.comment is None:
            return settings
        needed = [f"environment: {name}={value}" for name, value in self.environment(launch).items()]
        unsaid = [f"{name}: {how}" for name, how in self.not_expressible(launch).items()]
        return "".join(f"{self.comment} {line}\n" for line in [*needed, *unsaid]) + settings


@dataclass(frozen=True)
class Formatted:
    """A layout as a framework takes it, and what the text does not say, field of `Layout` -> what to do about it."""

    text: str
    not_expressible: dict[str, str]


def names() -> list[str]:
    """The formats there are: the modules here."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def named(name: str) -> Export:
    """The format of this name. Raises `InputError` for one that there is not."""
    if name not in names():
        raise InputError(f"format {name!r} is unknown; must be one of {', '.join(names())}")
    export: Export = import_module(f"{__name__}.{name.replace('-', '_')}").EXPORT
    return export


def memory_environment(launch: Launch) -> dict[str, str]:
    """How the layout has torch's allocator map memory."""
    if not launch.layout.expandable_segments:
        return {}
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
