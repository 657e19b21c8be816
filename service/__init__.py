"""Who asks and who keeps the answer: specs, searches, the record, and what can be asked of it.

>>> from service import Wattune, load_spec
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.client import Wattune
    from service.errors import InputError, NoAnswerError, SearchError
    from service.problem import Problem
    from service.spec import load_spec, parse_spec

__all__ = ["InputError", "NoAnswerError", "Problem", "SearchError", "Wattune", "load_spec", "parse_spec"]

_HOMES = {
    "InputError": "errors",
    "NoAnswerError": "errors",
    "Problem": "problem",
    "SearchError": "errors",
    "Wattune": "client",
    "load_spec": "spec",
    "parse_spec": "spec",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
