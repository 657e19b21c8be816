"""The engine that a layout names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from search_spaces.engines import engine_of

if TYPE_CHECKING:
    from trainables.engines.base import Job, TrainingEngine


def build_engine(job: Job) -> TrainingEngine:
    """Lay the model out over the ranks of the default process group. Collective.

    Raises `ValueError` for an engine that is not registered in `search_spaces.engines`.
    """
    module = importlib.import_module(engine_module(engine_of(job.layout).name))
    engine: TrainingEngine = module.build(job)
    return engine


def engine_module(name: str) -> str:
    """Name of the module of an engine: its `build(job: Job) -> TrainingEngine` makes the engine.

    The fork server of trials preloads it, and whatever it imports.
    """
    return f"trainables.engines.{name}.engine"
