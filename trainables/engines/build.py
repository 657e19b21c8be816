"""The engine that a layout names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainables.engines.base import Engine, Job


def build_engine(job: Job) -> Engine:
    """Lay the model out over the ranks of the default process group. Collective.

    Raises `ValueError` for an engine that is not registered in `search_spaces.engines`.
    """
    engine: Engine = importlib.import_module(engine_module(job.layout.engine)).build(job)
    return engine


def engine_module(name: str) -> str:
    """The module whose `build(job: Job) -> Engine` makes the engine; whatever it imports, the fork server preloads."""
    return f"trainables.engines.{name}.engine"
