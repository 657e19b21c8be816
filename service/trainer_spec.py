"""Trainers as people write them, in a section of a spec or in files of their own, and where those files are."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator

import search_spaces
from search_spaces.engines import ENGINES
from search_spaces.engines.foreign import names_of
from search_spaces.engines.others import OTHERS
from search_spaces.expressions import Value
from search_spaces.layout import AXES, Layout
from search_spaces.models import PRESETS
from search_spaces.trainer import GIVEN, HOOK, Conditional, Trainer
from search_spaces.workload import Workload
from service.axes import SpaceSpec
from service.errors import InputError
from service.reading import LARGEST, Strict, read_yaml
from trainables.logs import LOGS

DIRECTORY = "WATTUNE_TRAINERS"
"""The variable that names the directory of an operator's trainers."""

READY = Path(search_spaces.__file__).parent / "trainers"
"""Those that come with Wattune."""

ENDINGS = (".yaml", ".yml")
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
FILE = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,62}\.(json|toml|yaml|yml)$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
AXIS = re.compile(r"[a-z][a-z0-9_]{0,62}")
WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]{0,62}")
READ_OTHERWISE = ("true", "false", "null", "NaN", "Infinity")
"""Words that the record would give back as something else."""

ANY = "any"
"""In place of the values of an axis: all that there are."""

_SAMPLE = Layout.plain("", 1, 1)
RESERVED = frozenset(
    {"own", "layout", "predicted", "memory_share", "memory_band", "on_predicted_front", "seed", "data", "trial_dir"}
    | {*AXES, *_SAMPLE.to_dict(), *names_of(_SAMPLE, Workload(next(iter(PRESETS.values())), 1, 1))}
    | {"min", "max", "round"}
)
"""Names of which none can be an axis of the user's own: they mean something already, in expressions or in records."""


def _text(value: Any) -> Any:
    """A number or a switch where a text is due, as it is written."""
    if isinstance(value, bool):
        return json.dumps(value)
    return str(value) if isinstance(value, int | float) else value


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


Text = Annotated[str, BeforeValidator(_text)]
Pattern = Annotated[str, Field(min_length=1), AfterValidator(_pattern)]


class ConditionalSpec(Strict):
    """See `search_spaces.trainer.Conditional`."""

    when: str
    args: list[Text]


class StepsSpec(Strict):
    """See `trainables.command.LogPatterns`."""

    step: Pattern
    memory: Pattern | None = None

    @field_validator("step")
    @classmethod
    def _tells_which(cls, text: str) -> str:
        if "step" not in re.compile(text).groupindex:
            raise ValueError(f"{text!r} has no group (?P<step>...), the number of the step that ended")
        return text


class TrainerSpec(Strict):
    """See `search_spaces.trainer.Trainer`."""

    name: Annotated[str, Field(pattern=NAME)]
    command: Annotated[list[Text | ConditionalSpec], Field(min_length=1)]
    environment: dict[Annotated[str, Field(pattern=VARIABLE)], Text] = Field(default={})
    files: dict[Annotated[str, Field(pattern=FILE)], dict[str, Any]] = Field(default={})
    axes: dict[str, Any] = Field(default={})
    rules: list[str] = Field(default=[])
    steps: str | StepsSpec = HOOK
    out_of_memory: list[Pattern] = Field(default=[])
    predicted_as: str | None = None
    directory: Annotated[str, Field(min_length=1)] = "."

    @field_validator("name")
    @classmethod
    def _is_no_engine(cls, name: str) -> str:
        if name in ENGINES:
            raise ValueError(f"{name} is one of Wattune's own engines; choose another name")
        return name

    @field_validator("files")
    @classmethod
    def _can_be_written(cls, files: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, data in files.items():
            if not _is_plain(data):
                raise ValueError(f"{name}: takes texts, numbers, switches, null, and lists and mappings of these")
        return files

    @field_validator("axes")
    @classmethod
    def _are_axes(cls, axes: dict[str, Any]) -> dict[str, tuple[Value, ...] | None]:
        return {axis: _values(axis, given) for axis, given in axes.items()}

    @field_validator("steps")
    @classmethod
    def _is_known(cls, steps: str | StepsSpec) -> str | StepsSpec:
        if isinstance(steps, str) and steps not in (HOOK, *LOGS):
            raise ValueError(f"must be {', '.join((HOOK, *LOGS))}, or the patterns step and memory")
        return steps

    @field_validator("predicted_as")
    @classmethod
    def _is_known_program(cls, name: str | None) -> str | None:
        if name is not None and name not in OTHERS:
            raise ValueError(f"{name!r}: must be one of {', '.join(OTHERS)}")
        return name

    @property
    def trainer(self) -> Trainer:
        """The trainer that it describes."""
        steps = self.steps if isinstance(self.steps, str) else self.steps.model_dump(exclude_none=True)
        return Trainer(
            name=self.name,
            command=tuple(
                one if isinstance(one, str) else Conditional(one.when, tuple(one.args)) for one in self.command
            ),
            environment=tuple(self.environment.items()),
            files=tuple((name, json.dumps(data)) for name, data in self.files.items()),
            axes=tuple(self.axes.items()),
            rules=tuple(self.rules),
            steps=steps if isinstance(steps, str) else tuple(steps.items()),
            out_of_memory=tuple(self.out_of_memory),
            predicted_as=self.predicted_as,
            directory=self.directory,
        )


def described(trainer: Trainer) -> dict[str, Any]:
    """The fields of a `TrainerSpec` that make this trainer, JSON-safe."""
    axes = {axis: ANY if values is None else list(values) for axis, values in trainer.axes}
    return asdict(trainer) | {
        "command": [one if isinstance(one, str) else asdict(one) for one in trainer.command],
        "environment": dict(trainer.environment),
        "files": {name: json.loads(data) for name, data in trainer.files},
        "axes": axes,
        "steps": trainer.steps if isinstance(trainer.steps, str) else dict(trainer.steps),
    }


def _is_plain(data: Any) -> bool:
    if isinstance(data, dict):
        return all(isinstance(key, str) and _is_plain(value) for key, value in data.items())
    if isinstance(data, list):
        return all(map(_is_plain, data))
    return data is None or isinstance(data, str | bool | int) or (isinstance(data, float) and math.isfinite(data))


def _values(axis: str, given: Any) -> tuple[Value, ...] | None:
    """The values of an axis of a trainer."""
    if axis not in AXES:
        return _own_values(axis, given)
    if axis in GIVEN:
        raise ValueError(f"{axis} is no matter of the program: it says which GPUs it gets")
    if axis == "engine" or AXES[axis].lists:
        raise ValueError(f"{axis} is of Wattune's own engines alone")
    if given == ANY:
        return None
    try:
        return tuple(dict.fromkeys(getattr(SpaceSpec.model_validate({axis: given}), axis)))
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].replace("Input should be", "must be", 1)
        raise ValueError(f"{axis}: {message}; {ANY} for all that there are") from None


def _own_values(axis: str, given: Any) -> tuple[Value, ...]:
    """The values of an axis of the user's own."""
    if not AXIS.fullmatch(axis) or iskeyword(axis):
        raise ValueError(f"{axis!r}: the name of an axis is of small letters, digits and _, the first a letter")
    if axis in RESERVED:
        raise ValueError(f"{axis} means something else already; choose another name")
    values = given if isinstance(given, list) else [given]
    kinds = {type(value) for value in values}
    if kinds == {int, float}:
        values, kinds = [float(value) for value in values], {float}
    if len(kinds) != 1 or not kinds <= {str, int, float, bool}:
        raise ValueError(f"{axis}: values are a list of words, of numbers, or of true and false")
    for value in values:
        if isinstance(value, str) and (not WORD.fullmatch(value) or value in READ_OTHERWISE):
            raise ValueError(f"{axis}: {value!r}: a word is of letters, digits and . _ + -, the first a letter")
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise ValueError(f"{axis}: {value}: numbers are at most {LARGEST:.0e}")
    return tuple(dict.fromkeys(values))


def ready() -> dict[str, Path]:
    """The files of the trainers that can be named, by name: an operator's own go before those that come with Wattune.

    Raises `InputError` where `WATTUNE_TRAINERS` is no directory.
    """
    folders = [READY]
    if named := os.environ.get(DIRECTORY):
        folders.append(Path(named).absolute())
        if not folders[-1].is_dir():
            raise InputError(f"{DIRECTORY}: there is no directory {named}")
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def resolved(value: Any, info: ValidationInfo) -> Any:
    """The fields of a trainer of which a spec has the name, the file or the fields, relative to the folder that the
    validation's context has as `folder`, by default the working directory."""
    folder = (info.context or {}).get("folder", Path())
    if isinstance(value, str):
        file = _file(value, folder)
        value, folder = {"name": file.stem} | read(file), file.parent
    if isinstance(value, dict) and isinstance(directory := value.get("directory", "."), str):
        value = value | {"directory": str(folder / directory)}
    return value


def _file(reference: str, folder: Path) -> Path:
    """The file of a trainer by its path, or else by its name. Raises `ValueError` for a name that there is not."""
    if reference.endswith(ENDINGS):
        return folder / reference
    known = ready()
    if reference not in known:
        names = ", ".join(known) or "none"
        raise ValueError(f"there is no trainer {reference!r}; ready ones: {names}; a file's path ends in .yaml")
    return known[reference]


def read(file: Path) -> dict[str, Any]:
    """The fields in a trainer's file. Raises `ValueError` for one that cannot be read or has none."""
    try:
        fields = read_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # no UTF-8, no YAML
        raise ValueError(f"{file}: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file}: a trainer is a mapping with the fields {', '.join(TrainerSpec.model_fields)}")
    return fields
