"""The sections of the page in their order: for each a table, and a figure of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from service.answers.page import course, devices, figures, layouts
from service.answers.page.evidence import Evidence
from service.answers.page.figures import Spec
from service.answers.page.table import Lacking, Table
from service.answers.page.theme import Theme

E = TypeVar("E")


@dataclass(frozen=True)
class Section(Generic[E]):
    """`key` names its figure, of what is known in `E`. `lead`: what that shows, and how to read it."""

    key: str
    title: str
    lead: str
    table: Callable[[E], Table | Lacking]
    draw: Callable[[Table, Theme], Spec]


HOLLOW = "Hollow marks are not measured: estimated, extrapolated or put together from slices, as the table says."

SECTIONS: tuple[Section[Evidence], ...] = (
    Section(
        "front",
        "The front",
        "Layouts by their objectives. The line joins those that no other beats on all of them. Bars are 95% confidence "
        f"intervals of what was measured again; crosses are predictions for the layouts on the front. {HOLLOW}",
        layouts.front,
        figures.front,
    ),
    Section(
        "axes",
        "What the axes do",
        "A line is a layout, coloured by the first objective; thick ones are on the front. Axes that matter most come "
        "first.",
        layouts.axes,
        figures.axes,
    ),
    Section(
        "layouts",
        "Speed, energy, power, heat and clock of each layout",
        "Circles are means over the window and all GPUs (power: the sum over GPUs), triangles the highest sample of "
        f"any GPU (power: of the sum), of the clock the lowest. Bars are 95% intervals. {HOLLOW}",
        layouts.figures,
        figures.figures,
    ),
    Section(
        "microbatch",
        "Microbatch",
        f"Layouts that differ in the microbatch alone. {HOLLOW}",
        layouts.sweep,
        figures.sweep,
    ),
    Section(
        "breakdown",
        "Where the time of a step goes",
        "One profiled step by pipeline rank, as the mean over the GPUs that share it. Bars add up to the step; "
        "diamonds are communication that computation hides, which costs no time.",
        devices.breakdown,
        figures.breakdown,
    ),
    Section(
        "gpus",
        "Layouts by GPU",
        "Means over the window, weighted by time. A vertical line marks where a node begins.",
        devices.by_device,
        figures.heat,
    ),
    Section(
        "imbalance",
        "Imbalance between GPUs",
        "Each GPU of each layout, off the mean of its trial. The table says what the slowest GPU costs at most, were "
        "the trial's speed to follow its clock: an estimate.",
        devices.imbalance,
        figures.imbalance,
    ),
    Section(
        "time",
        "One trial over time",
        "Means of short parts of the window.",
        devices.over_time,
        figures.over_time,
    ),
    Section(
        "memory",
        "Memory, predicted and measured",
        "Bars are what the memory model foretells of the fullest GPU, part by part; diamonds what was measured.",
        layouts.memory,
        figures.memory,
    ),
    Section(
        "predictions",
        "Predicted and measured",
        f"On the dashed line both are the same; above it more was measured than predicted. {HOLLOW}",
        layouts.predictions,
        figures.predictions,
    ),
    Section(
        "growth",
        "Was the budget enough?",
        "The share of the last front's hypervolume that the search had reached. A line that still climbs at its end "
        "asks for a larger budget.",
        course.growth,
        figures.growth,
    ),
    Section(
        "failures",
        "Trials without result",
        "Each has its cause in the table.",
        course.failures,
        figures.failures,
    ),
)
