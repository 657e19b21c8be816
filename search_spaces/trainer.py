"""A program of the user's as data: how it is started for a layout, which axes it has, and how it tells of steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from search_spaces.expressions import Expression, ExpressionError, Value, parse
from search_spaces.layout import AXES
from search_spaces.templates import fill, fill_data, written

HOOK = "hook"
"""How a program tells of its steps that calls Wattune's own hook."""

GIVEN = ("num_gpus", "rank_order", "power_limit_w")
"""Axes that any program has, as they say only which GPUs it gets, and how these are set."""


@dataclass(frozen=True)
class Conditional:
    """Arguments that are there where the expression `when` is true."""

    when: str
    args: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A program of the user's. Texts are templates (`search_spaces.templates`) of what `search_spaces.engines.foreign`
    names, unless it is said otherwise.

    - `name`: plain; what its layouts have for an engine.
    - `command`: the arguments, the program first. `environment`: variables and their values. One that is None as a
      whole is left out.
    - `files`: of configuration files, name and nested data as JSON, the texts in which are templates.
    - `axes`: which axes of a layout it has, each with the values that it can take; None for all that there are. What is
      no axis of Wattune's is one of the user's own.
    - `rules`: expressions that are true of the layouts that it can run.
    - `steps`: `HOOK`, the name of one of the known kinds of logs, or the fields of a `trainables.command.LogPatterns`.
    - `out_of_memory`: regular expressions of what it says where memory ran out.
    - `predicted_as`: the name of the program in `search_spaces.engines.others` as which its time and its memory are
      predicted; None for one of which nothing is known.
    - `directory`: plain; where it is started.
    """

    name: str
    command: tuple[str | Conditional, ...]
    environment: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    axes: tuple[tuple[str, tuple[Value, ...] | None], ...] = ()
    rules: tuple[str, ...] = ()
    steps: str | tuple[tuple[str, str], ...] = HOOK
    out_of_memory: tuple[str, ...] = ()
    predicted_as: str | None = None
    directory: str = "."

    @cached_property
    def own(self) -> dict[str, tuple[Value, ...]]:
        """The axes of the user's own, with their values."""
        return {axis: values for axis, values in self.axes if axis not in AXES and values is not None}

    def arguments(self, names: Mapping[str, Value]) -> tuple[str, ...]:
        """The argument list where `names` are the values of names. Raises `ExpressionError`."""
        found: list[Value] = []
        for one in self.command:
            if isinstance(one, str):
                found.append(fill(one, names))
            elif parse(one.when).holds(names):
                found += (fill(arg, names) for arg in one.args)
        return tuple(written(value) for value in found if value is not None)

    def variables(self, names: Mapping[str, Value]) -> tuple[tuple[str, str], ...]:
        """The environment's variables. Raises `ExpressionError`."""
        found = ((name, fill(template, names)) for name, template in self.environment)
        return tuple((name, written(value)) for name, value in found if value is not None)

    def documents(self, names: Mapping[str, Value]) -> dict[str, Any]:
        """What is in the configuration files, by their names. Raises `ExpressionError`."""
        return {name: fill_data(json.loads(data), names) for name, data in self.files}

    def faults(self, names: Mapping[str, Value], of_layouts: Mapping[str, Value]) -> Iterator[str]:
        """What is wrong with its templates and expressions, each with its place, where names have values such as these.

        `of_layouts`: the names that rules may use.
        """
        for place, work_out in self._places(names, of_layouts):
            try:
                work_out()
            except ExpressionError as error:
                yield f"{place}: {error}"

    def _places(
        self, names: Mapping[str, Value], of_layouts: Mapping[str, Value]
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        for number, one in enumerate(self.command):
            templates = (one,) if isinstance(one, str) else one.args
            if isinstance(one, Conditional):
                yield f"command[{number}].when", partial(_check_truth, one.when, names)
            for template in templates:
                yield f"command[{number}]", partial(fill, template, names, Expression.check)
        for variable, template in self.environment:
            yield f"environment.{variable}", partial(fill, template, names, Expression.check)
        for file, data in self.files:
            yield f"files.{file}", partial(fill_data, json.loads(data), names, Expression.check)
        for number, rule in enumerate(self.rules):
            yield f"rules[{number}]", partial(_check_truth, rule, of_layouts)


def _check_truth(text: str, names: Mapping[str, Value]) -> None:
    try:
        value = parse(text).check(names)
    except ExpressionError as error:
        raise ExpressionError(f"{text!r}: {error}") from None
    if not isinstance(value, bool):
        raise ExpressionError(f"{text!r}: it is {value!r}, not true or false")
