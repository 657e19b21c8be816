"""Layouts as the frameworks take them that launch them: a module a format, each with an `Export` named `EXPORT`."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from search_spaces.layout import Layout


@dataclass(frozen=True)
class Export:
    """One format.

    `engines`: those whose layouts it can express. `key`: its name in what `service.answers.export` makes. `settings`:
    the layout in this format, JSON-safe. `not_expressible`: what of the layout the format has no word for, field of
    `Layout` -> what to do about it, by a text that names the framework.
    """

    engines: tuple[str, ...]
    key: str
    settings: Callable[[Layout], Any]
    not_expressible: Callable[[Layout], dict[str, str]]


def exports_of(layout: Layout) -> list[Export]:
    """The formats that can express a layout, of all modules here."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return [module.EXPORT for module in modules if layout.engine in module.EXPORT.engines]
