"""Texts with expressions in braces, such as ``--tp={tensor_parallel_size}``, and what they come to for one layout.

A template never leaves its place: what an expression comes to is not read again, split or given to a shell. Braces
that are meant as such are written twice, as in Python's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from search_spaces.expressions import Expression, ExpressionError, Value, parse

_PIECES = re.compile(r"(?P<brace>\{\{|\}\})|\{(?P<expression>[^{}]*)\}|(?P<lost>[{}])")

WorkOut = Callable[[Expression, Mapping[str, Value]], Value]


def fill(template: str, names: Mapping[str, Value], work_out: WorkOut = Expression.value) -> Value:
    """What a template comes to where `names` are the values of names: a text, or, of one that is an expression in
    braces and nothing else, that expression's value. `work_out`: how expressions are. Raises `ExpressionError`."""
    pieces = _pieces(template)
    try:
        if len(pieces) == 1 and isinstance(pieces[0], Expression):
            return work_out(pieces[0], names)
        return "".join(one if isinstance(one, str) else written(work_out(one, names)) for one in pieces)
    except ExpressionError as error:
        raise ExpressionError(f"{template!r}: {error}") from None


def fill_data(data: Any, names: Mapping[str, Value], work_out: WorkOut = Expression.value) -> Any:
    """Nested mappings and lists with each text in them as `fill` has it. Raises `ExpressionError`."""
    match data:
        case str():
            return fill(data, names, work_out)
        case list():
            return [fill_data(one, names, work_out) for one in data]
        case dict():
            return {key: fill_data(one, names, work_out) for key, one in data.items()}
    return data


def expressions(template: str) -> Iterator[Expression]:
    """The expressions of a template. Raises `ExpressionError` for a text that is none."""
    return (one for one in _pieces(template) if isinstance(one, Expression))


def written(value: Value) -> str:
    """A value as it stands within a text. Raises `ExpressionError` for None, which has no place there."""
    if value is None:
        raise ExpressionError("None can only stand alone, where it leaves out all")
    return str(value).lower() if isinstance(value, bool) else str(value)


@lru_cache(maxsize=4096)
def _pieces(template: str) -> tuple[str | Expression, ...]:
    """The plain texts and the expressions of a template, in their order."""
    pieces: list[str | Expression] = []
    end = 0
    try:
        for match in _PIECES.finditer(template):
            pieces.append(template[end : match.start()])
            end = match.end()
            if match["lost"]:
                raise ExpressionError(f"{match['lost']!r} stands alone; write it twice if it is meant as such")
            pieces.append(match["brace"][0] if match["brace"] else parse(match["expression"]))
    except ExpressionError as error:
        raise ExpressionError(f"{template!r}: {error}") from None
    pieces.append(template[end:])
    return tuple(one for one in pieces if one != "")
