"""Nested data as TOML 1.0, which Python reads and does not write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def written(data: Mapping[str, Any]) -> str:
    """The TOML text of texts, numbers, switches, and lists and mappings of these.

    What is None is left out, as TOML has no word for it.
    """
    return "\n".join(_table(data, ())) + "\n"


def _table(data: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """The lines of a table: what it holds itself before the tables within it."""
    if path:
        yield f"[{'.'.join(map(_key, path))}]"
    for key, value in data.items():
        if value is not None and not isinstance(value, dict):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _table(value, (*path, key))


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    match value:
        case bool():
            return json.dumps(value)
        case str():
            return _text(value)
        case list():
            return f"[{', '.join(_value(one) for one in value if one is not None)}]"
        case dict():
            inner = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items() if one is not None)
            return f"{{{inner}}}"
    return repr(value)


def _text(text: str) -> str:
    """As JSON has it, whose escapes are TOML's too, but for one character that JSON leaves as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
