"""What is known of a program of the user's: what its trainer says, and what holds for any program."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar

from search_spaces.coefficients import Coefficients
from search_spaces.engines.base import Condition, EngineFacts, Rule, Same
from search_spaces.engines.megatron import Megatron
from search_spaces.engines.others import OTHERS
from search_spaces.expressions import ExpressionError, Value, parse
from search_spaces.layout import AXES, Layout, axis_of
from search_spaces.models import ModelShape
from search_spaces.trainer import Trainer
from search_spaces.workload import Workload

DERIVED = {"data_parallel_size": "pipeline_parallel_size", "gradient_accumulation_steps": "micro_batch_size"}
"""Sizes that follow from axes -> the last of these to be settled."""


class Program(EngineFacts):
    """What holds of any: its trainer says which layouts it can run and which are alike."""

    unused: ClassVar[Mapping[str, Condition]] = {}
    same: ClassVar[Mapping[str, Same]] = {}
    fp8 = True
    is_ours = False
    routes_evenly = False

    def memory_is_measured(self, layout: Layout, model: ModelShape) -> bool:
        return False


class Unknown(Megatron):
    """Memory and cost are taken to be as with torch's own primitives, until trials tell otherwise."""

    launched_more_ms: ClassVar[Mapping[str, tuple[float, float]]] = {}

    def launch_s(self, layout: Layout, calibration: Coefficients) -> float:
        return 0.0


@lru_cache(maxsize=64)
def facts_of_trainer(trainer: Trainer) -> EngineFacts:
    """The facts of a trainer's program, or of the one as which it is predicted, under its name and with its rules."""
    by_axis: dict[str, tuple[Rule, ...]] = {}
    for text in trainer.rules:
        axis = _settles(text, trainer)
        by_axis[axis] = (*by_axis.get(axis, ()), _rule(text))

    known = Unknown if trainer.predicted_as is None else type(OTHERS[trainer.predicted_as])
    facts: EngineFacts = type("Facts", (Program, known), {"name": trainer.name, "rules": by_axis})()
    return facts


def names_of(layout: Layout, work: Workload) -> dict[str, Value]:
    """The names that expressions have for a layout, the user's own axes among them, and for what it trains.

    `hidden` and the like are there where the model is known. Axes whose values are lists have none.
    """
    names: dict[str, Value] = {axis: getattr(layout, axis) for axis, row in AXES.items() if not row.lists}
    names |= {name: getattr(layout, name) for name in DERIVED} | dict(layout.own)
    names |= {"global_batch_size": layout.global_batch_size}
    names |= {"sequence_length": work.sequence_length, "gpus_per_node": work.gpus_per_node}
    return names if work.model is None else names | vars(work.model)


def _rule(text: str) -> Rule:
    expression = parse(text)

    def rule(layout: Layout, work: Workload) -> str | None:
        names = names_of(layout, work)
        try:
            if expression.holds(names):
                return None
            why = ", ".join(f"{name} {names[name]}" for name in sorted(expression.names))
        except ExpressionError as error:
            why = str(error)
        return f"the trainer's rule {text} does not hold: {why}"

    rule.__name__ = text
    return rule


def _settles(text: str, trainer: Trainer) -> str:
    """The axis at which a rule is judged: the last to be settled of those that it looks at."""
    named = {DERIVED.get(name, name) for name in parse(text).names}
    rows = [axis_of(name, trainer.own.get(name, ())) for name in named if name in AXES or name in trainer.own]
    return max(rows, key=lambda row: (row.settled, row.name)).name if rows else "engine"
