"""How files that people write are read: YAML without its surprises, in sections that take no field unknown to them."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LARGEST = 10**12
"""Of whole numbers: what is reckoned with them stays finite."""


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


# Numbers in strings are let in: 1e-2 is text to PyYAML, which asks for a dot before an exponent.
Amount = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)]
AmountOrZero = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]
Switch = Annotated[bool, Field(strict=True)]


class Strict(BaseModel):
    """A section of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Loader(yaml.SafeLoader):
    """Takes decimal digits for whole numbers, `true` and `false` for switches, and refuses a field given twice.

    By YAML 1.1, which PyYAML follows, 010 is eight, 1:30 is ninety, `off` is false, and of two fields the last counts.
    Here such numbers and words are text, which a field for whole numbers or switches refuses.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key.value} is given twice", problem_mark=key.start_mark
                    )
                names.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
# All that these match, PyYAML's own take for the same kind: what it writes is read back.
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"(?:[-+]?[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]+)?", list("-+0123456789.")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _no_timestamp(loader: yaml.SafeLoader, node: yaml.Node) -> None:
    loader.construct_undefined(node)


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _no_timestamp)


def read_yaml(text: str) -> Any:
    """What a YAML text holds. Raises `ValueError`, of more than a line perhaps, for one that is none."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a number of 5,000 digits
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"not valid YAML{where}: {getattr(error, 'problem', error)}") from None
