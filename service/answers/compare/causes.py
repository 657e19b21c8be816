"""Layouts that two searches ran, and what of the difference is clock, chip, memory, fabric and waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from search_spaces.layout import Layout
from service.answers.candidates import Candidate
from service.answers.change import Change, Value, comparable
from service.answers.compare.figures import FIGURES
from service.answers.compare.sides import Side
from service.metrics import Doubt

COUNTERS = (
    "mean_sm_clock_mhz",
    "power_cap_ratio",
    "throttle_ratio",
    "peak_gpu_temp_c",
    "gpu_temp_spread_c",
    "sm_clock_spread_mhz",
    "dram_activity",
    "link_utilisation",
    "pcie_utilisation",
)
"""What stands beside the figures of a layout that several searches ran."""

_BUSY = ("breakdown_matmul_s", "breakdown_attention_s")
_NEEDED = ("breakdown_span_s", *_BUSY, "breakdown_exposed_communication_s", "breakdown_idle_s")


@dataclass(frozen=True)
class Cause:
    """What a step takes longer on one search than on the first, in s, part by part; together that is `step_s`.

    `clock`: by how much longer matrix products and attention take, were it by the mean SM clock alone. `chip`: what of
    them is left, of kernels, versions and the chip itself; without `clock` it is all of them. `memory`: other kernels
    and copies, which memory bandwidth bounds. `fabric`: communication that nothing hides. `waiting`: when nothing runs.
    All are means over ranks in one profiled step.
    """

    step_s: float
    clock: float | None
    chip: float
    memory: float
    fabric: float
    waiting: float


@dataclass(frozen=True)
class Matched:
    """A layout that the first search, `base`, and another one, `side`, both ran.

    `changes` are by figure, from the first to the other, of those that both have. `cause` is None where a breakdown is
    missing, and `untold` says what cannot be told, and why.
    """

    layout: Layout
    base: Side
    side: Side
    one: Candidate
    other: Candidate
    changes: dict[str, Change]
    cause: Cause | None
    untold: tuple[str, ...]

    def values(self, key: str) -> tuple[Value | None, Value | None]:
        """A figure of the first and of the other."""
        figure = next(figure for figure in FIGURES if figure.key == key)
        return self.base.value(figure, self.one), self.side.value(figure, self.other)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        counters = {
            name: [one.metrics.get(name) for one in (self.one, self.other)]
            for name in COUNTERS
            if any(name in one.metrics for one in (self.one, self.other))
        }
        values = {key: [value and value.to_dict() for value in self.values(key)] for key in self.changes}
        return {
            "layout": self.layout.label,
            "config": self.layout.to_dict(),
            "searches": [self.base.name, self.side.name],
            "values": values,
            "changes": {key: asdict(made) for key, made in self.changes.items()},
            "counters": counters,
            "cause_s": self.cause and asdict(self.cause),
            "untold": list(self.untold),
        }


def matched(sides: Sequence[Side]) -> list[Matched]:
    """Layouts of the first of the searches that others ran too, those that the first ran fastest in front."""
    base = sides[0]
    ran = {one.layout: one for one in base.comparison.results}
    pairs = [
        _pair(base, side, ran[other.layout], other)
        for side in sides[1:]
        for other in side.comparison.results
        if other.layout in ran
    ]
    return sorted(pairs, key=lambda pair: -pair.one.metrics.get("tokens_per_s", 0.0))


def _pair(base: Side, side: Side, one: Candidate, other: Candidate) -> Matched:
    changes = {figure.key: comparable(side.value(figure, other), base.value(figure, one)) for figure in FIGURES}
    made = {key: changed for key, changed in changes.items() if changed is not None}
    cause, untold = _cause(base, side, one, other)
    return Matched(one.layout, base, side, one, other, made, cause, untold)


def _cause(base: Side, side: Side, one: Candidate, other: Candidate) -> tuple[Cause | None, tuple[str, ...]]:
    untold: list[str] = []
    clocks, why_not = _clocks(base, side, one, other)
    if why_not is not None:
        untold.append(f"clock: {why_not}")
    lacking = [place.name for place, ran in ((base, one), (side, other)) if not _broken_down(ran)]
    if lacking:
        where = " and ".join(lacking)
        untold.append(f"memory, fabric and waiting: no breakdown of a step (measurement.breakdown) in {where}")
        return None, tuple(untold)
    before, after = one.metrics, other.metrics
    busy = [sum(values[name] for name in _BUSY) for values in (before, after)]
    exposed = [values["breakdown_exposed_communication_s"] for values in (before, after)]
    idle = [values["breakdown_idle_s"] for values in (before, after)]
    spans = [values["breakdown_span_s"] for values in (before, after)]
    rest = [spans[i] - busy[i] - exposed[i] - idle[i] for i in (0, 1)]
    slowed = None if clocks is None else busy[0] * (clocks[0] / clocks[1] - 1)
    cause = Cause(
        step_s=spans[1] - spans[0],
        clock=slowed,
        chip=busy[1] - busy[0] - (slowed or 0.0),
        memory=rest[1] - rest[0],
        fabric=exposed[1] - exposed[0],
        waiting=idle[1] - idle[0],
    )
    return cause, tuple(untold)


def _broken_down(one: Candidate) -> bool:
    """Whether the times of a step are known, and measured."""
    return all(
        name in one.metrics and Doubt.of(one.methods.get(name)) is not Doubt.ESTIMATED for name in _NEEDED
    ) and bool(one.metrics["breakdown_span_s"])


def _clocks(base: Side, side: Side, one: Candidate, other: Candidate) -> tuple[tuple[float, float] | None, str | None]:
    """The mean SM clocks, where a cycle of both does as much work; else why they say nothing."""
    before, after = (ran.metrics.get("mean_sm_clock_mhz") for ran in (one, other))
    if not before or not after:
        lacking = [place.name for place, value in ((base, before), (side, after)) if not value]
        return None, f"no mean SM clock in {' and '.join(lacking)}"
    same = base.accelerator is not None and base.accelerator == side.accelerator
    if same or (base.sheet.peak_flops is not None and base.sheet.peak_flops == side.sheet.peak_flops):
        return (before, after), None
    return None, f"a cycle of {base.accelerator or 'one'} and of {side.accelerator or 'the other'} is not the same work"
