"""One trial that is to be run: the value that goes from a search to Ray Tune, and from there to the gang; and what it
needs there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

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

    def to_config(self) -> dict[str, str]:
        """What Tune gets as the trial's configuration: one text, as Tune keeps each value of it, for as long as the
        search runs, five times over."""
        values = {"layout": self.layout.to_dict(), "purpose": self.purpose.value, "front": self.front}
        return {"step": json.dumps(values)}

    @classmethod
    def from_config(cls, config: Mapping[str, str]) -> Step:
        """Inverse of `to_config`."""
        values = json.loads(config["step"])
        return cls(Layout.from_dict(values["layout"]), Purpose(values["purpose"]), tuple(values["front"]))
