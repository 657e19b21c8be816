"""One trial that is to be run: the value that goes from a search to Ray Tune, and from there to the gang; and what it
needs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from search_spaces.layout import Layout
from service.result import Purpose


@dataclass(frozen=True)
class Wish:
    """What a trial needs: so many workers of one gang, with nobody else at work on their nodes if `alone`."""

    size: int
    alone: bool


@dataclass(frozen=True)
class Step:
    """The layout to run, for which purpose, and the objectives of each point of the front so far."""

    layout: Layout
    purpose: Purpose
    front: tuple[dict[str, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """What Tune gets as the trial's configuration: `layout`, `purpose` and `front`, JSON-safe."""
        return {"layout": self.layout.to_dict(), "purpose": self.purpose.value, "front": list(self.front)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Step:
        """Inverse of `to_dict`, also after a round trip through JSON."""
        return cls(Layout.from_dict(values["layout"]), Purpose(values["purpose"]), tuple(values["front"]))
