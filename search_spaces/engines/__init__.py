"""The engines that a layout may name, each in a file of its own: here is what is known of them without running one."""

from __future__ import annotations

from search_spaces.engines.base import EngineFacts
from search_spaces.engines.deepspeed import DeepSpeed
from search_spaces.engines.foreign import facts_of_trainer
from search_spaces.engines.megatron import Megatron
from search_spaces.engines.others import OTHERS
from search_spaces.layout import Layout
from search_spaces.workload import Workload

ENGINES: dict[str, EngineFacts] = {
    Megatron.name: Megatron(),
    DeepSpeed.name: DeepSpeed(),
}


def engine_of(layout: Layout | str) -> EngineFacts:
    """The engine of a layout, or of a name. Raises `ValueError` for one that there is not."""
    name = layout if isinstance(layout, str) else layout.engine
    if (facts := ENGINES.get(name) or OTHERS.get(name)) is None:
        raise ValueError(f"unknown engine {name!r}; must be one of {', '.join(ENGINES)}")
    return facts


def facts_of(layout: Layout, work: Workload) -> EngineFacts:
    """The facts of what trains a layout: the program of the work's trainer, or the engine that the layout names.

    Raises `ValueError` for an engine that there is not.
    """
    if work.trainer is not None and work.trainer.name == layout.engine:
        return facts_of_trainer(work.trainer)
    return engine_of(layout)
