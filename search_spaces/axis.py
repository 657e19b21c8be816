"""What is to be said of one axis of a layout, in one row: see the fields of `search_spaces.layout.Layout`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from search_spaces.layout import Layout


class Scale(StrEnum):
    """How far apart the values of an axis are to a sampler."""

    LOG2 = "log2"
    LINEAR = "linear"
    CATEGORY = "category"
    """All alike: they have no order."""


class Range(NamedTuple):
    """Whole numbers from `low` to `high`, None where there is no highest."""

    low: int
    high: int | None = None


_KINDS = {str: "text", int: "whole numbers", bool: "true or false"}


@dataclass(frozen=True)
class Axis:
    """One setting of a layout.

    - `type`: of its values, as the field is annotated. `lists`: whether they are lists of whole numbers, or None.
      `optional`: whether a value that is no list may be None.
    - `default`: what a layout has of it where nothing is said; for `num_gpus` None, which is the whole cluster.
    - `idle`: what a layout without use for the axis has written, so that equal layouts are equal values. It is also
      what layouts were run with before there was the axis. `matters` says whether a layout, settled up to the axis, has
      use for it; an engine may have none besides (`search_spaces.engines.base.EngineFacts.unused`).
    - `allowed`: the words to choose from, or the range of its numbers; None where no more than the type is asked for.
    - `settled`: its place in the order in which a layout is settled and judged. `matters`, and the rules of an axis,
      look at axes up to it alone. Those that memory does not depend on come last, so that it is reckoned once for all
      of their values.
    - `label`: how a value reads in a layout's name. `meaning`: what docs/spec.md says of it.
    """

    name: str
    type: Any
    default: Any
    idle: Any
    allowed: tuple[str, ...] | Range | None
    settled: int
    scale: Scale
    label: Callable[[Any], str]
    meaning: str
    matters: Callable[[Layout], bool]
    optional: bool = False

    @property
    def lists(self) -> bool:
        return self.type not in (str, int, float, bool)

    @property
    def ordered(self) -> bool:
        return self.scale is not Scale.CATEGORY

    @property
    def documentation(self) -> str:
        """The axis's row in the table of docs/spec.md: name, type, default as YAML has it, and meaning."""
        kind = "lists of whole numbers, `auto`" if self.lists else _KINDS[self.type]
        kind += ", or null" if self.lists or self.optional else ""
        default = self.default if isinstance(self.default, str) else json.dumps(self.default)
        values = default if self.default is None and not (self.lists or self.optional) else f"[{default}]"
        return f"| `{self.name}` | list of {kind} | `{values}` | {self.meaning} |"

    def place(self, value: int | float) -> float:
        """Where a value lies on an ordered axis."""
        return math.log2(value) if self.scale is Scale.LOG2 else float(value)


def axis(
    meaning: str,
    *,
    settled: int,
    label: Callable[[Any], str],
    default: Any = MISSING,
    idle: Any = MISSING,
    allowed: tuple[str, ...] | Range | None = None,
    scale: Scale | None = None,
    matters: Callable[[Layout], bool] = lambda layout: True,
) -> dict[str, Any]:
    """Metadata that make a field of `Layout` an axis; see `Axis`.

    `default` and `idle` are the field's default where they are not given. `scale` follows from the type: sizes by their
    logarithm, switches as 0 and 1.
    """
    return {
        "axis": {
            "meaning": meaning,
            "settled": settled,
            "label": label,
            "default": default,
            "idle": idle,
            "allowed": allowed,
            "scale": scale,
            "matters": matters,
        }
    }


def row_of(declared: Field[Any], kind: Any) -> Axis:
    """The row of a field with metadata of `axis`; `kind` is its type."""
    row = dict(declared.metadata["axis"])
    if row["default"] is MISSING:
        row["default"] = declared.default
    if row["idle"] is MISSING:
        row["idle"] = row["default"]
    row["optional"] = kind == int | None
    kind = int if row["optional"] else kind
    row["scale"] = row["scale"] or {int: Scale.LOG2, bool: Scale.LINEAR}.get(kind, Scale.CATEGORY)
    return Axis(declared.name, kind, **row)


LAST = 100
"""Where axes of the user's own are settled: after all others."""


def own_axis(name: str, values: Sequence[Any]) -> Axis:
    """The row of an axis of the user's own, which is told by its values: texts, whole or decimal numbers, or switches.

    They are all of one kind. Numbers are ordered, by their logarithm if all are above zero.
    """
    kind = type(values[0])
    scale = {str: Scale.CATEGORY, bool: Scale.LINEAR}.get(kind) or (Scale.LOG2 if min(values) > 0 else Scale.LINEAR)
    return Axis(
        name=name,
        type=kind,
        default=None,
        idle=None,
        allowed=None,
        settled=LAST,
        scale=scale,
        label=lambda value: f"{name}={json.dumps(value) if isinstance(value, bool) else value}",
        meaning="",
        matters=lambda layout: True,
    )
