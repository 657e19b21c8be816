"""The engines that a layout may name, each in a file of its own: here is what is known of them without running one."""

from __future__ import annotations

from search_spaces.engines.base import EngineFacts
from search_spaces.engines.deepspeed import DeepSpeed
from search_spaces.engines.megatron import Megatron
from search_spaces.layout import Layout

ENGINES: dict[str, EngineFacts] = {
    Megatron.name: Megatron(),
    DeepSpeed.name: DeepSpeed(),
}


def engine_of(layout: Layout | str) -> EngineFacts:
    """The engine of a layout, or of a name. Raises `ValueError` for one that there is not."""
    name = layout if isinstance(layout, str) else layout.engine
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; must be one of {', '.join(ENGINES)}")
    return ENGINES[name]
