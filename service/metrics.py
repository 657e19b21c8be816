"""What is known of a trial's metrics: one table, a row a metric, and how their values are printed.

All that the rest of the service knows of a metric by its name is here, so that another objective is a row of `TABLE`
and whatever produces its values: `service.trials.figures` or `telemetry`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, IntEnum, StrEnum


class Direction(StrEnum):
    """Which way a metric is better."""

    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"

    def cost(self, value: float) -> float:
        """The value, or its negative, whichever is better the smaller it is."""
        return -value if self is Direction.MAXIMIZE else value


class Method(StrEnum):
    """How a value came about; its text is what records hold. A value without a method was plainly measured."""

    COUNTER = "counter"
    """Read from a counter of the hardware."""
    INTEGRATED = "integrated"
    """The integral over samples."""
    SAMPLED = "sampled"
    """From single samples."""
    SLICE = "slice"
    """Put together from ranks that were measured alone, beside stand-ins for all others."""
    SHORT = "short"
    """Measured in steps of fewer microbatches, followed to the whole batch."""
    EXTRAPOLATED = "extrapolated"
    """Measured on models of fewer layers, followed to the whole depth."""
    ESTIMATED = "estimated"
    """Not measured at all."""


class Doubt(IntEnum):
    """How far values are to be doubted, the least first. They are only compared with values as little in doubt."""

    MEASURED = 0
    SLICED = 1
    EXTRAPOLATED = 2
    ESTIMATED = 3

    @classmethod
    def of(cls, method: str | None) -> Doubt:
        """That of values which came about by a `Method`, or plainly."""
        return next((doubt for doubt, doubted in _DOUBTED.items() if method == doubted), cls.MEASURED)

    @property
    def method(self) -> Method | None:
        """How values in this doubt came about; None of measured ones."""
        return _DOUBTED.get(self)

    def __str__(self) -> str:
        return self.name.lower()


_DOUBTED = {
    Doubt.SLICED: Method.SLICE,
    Doubt.EXTRAPOLATED: Method.EXTRAPOLATED,
    Doubt.ESTIMATED: Method.ESTIMATED,
}


class Part(Enum):
    """What a metric is made of, by which it follows from smaller runs of a trial (`service.trials.extrapolation`)."""

    TIME = "the time of a step"
    ENERGY = "the energy of a step"
    POWER = "the energy of a step by its time"
    MEMORY = "the memory of the fullest GPU"
    HELD = "the time for which a trial holds its gang"


class Needs(Enum):
    """What a metric takes that not every machine has."""

    GPU = "a GPU"
    PEAK = "a data sheet's peak FLOP/s"
    THROTTLING = "a count of the time that devices are slowed for heat"


ANY, POSITIVE, SHARE = (-math.inf, math.inf), (0.0, math.inf), (0.0, 1.0)


@dataclass(frozen=True)
class Metric:
    """What is known of one metric.

    - `unit`: the unit and what is counted, as docs/spec.md has it.
    - `direction`: which way it is better; None where neither way is.
    - `part`: what it is made of; None where that does not follow from a step.
    - `heading`, `style`: how tables print it: what stands over it or after it, and Python's format of its value.
    - `least`: a value that nothing falls below and that some trials reach, so that it bounds what a trial can come to.
    - `noise`: how far values of one layout lie apart on GPUs that do not drift, with room to spare, as a share; None
      where the sentinel is not held against it.
    - `always`: whether tables show it beside the objectives.
    - `aim`: whether it may be an objective, or in a constraint.
    - `range`: between what its values lie, whatever is run.
    - `needs`: what it takes that not every machine has.
    """

    name: str
    unit: str
    direction: Direction | None = None
    part: Part | None = None
    heading: str | None = None
    style: str = ".4g"
    least: float | None = None
    noise: float | None = None
    always: bool = False
    aim: bool = True
    range: tuple[float, float] = POSITIVE
    needs: Needs | None = None

    def bounded(self, direction: Direction) -> bool:
        """Whether some steps of a trial bound the best, in this direction, that it can come to."""
        return direction is self.direction and (self.part in (Part.TIME, Part.ENERGY) or self.least is not None)


MORE, LESS = Direction.MAXIMIZE, Direction.MINIMIZE

TABLE = (
    Metric("tokens_per_s", "tokens/s", MORE, Part.TIME, "tokens/s", ",.0f", noise=0.01),
    Metric("tokens_per_s_per_gpu", "tokens/s", MORE, Part.TIME, "tokens/s/GPU", ",.0f", always=True),
    Metric(
        "mfu",
        "model FLOPs (PaLM, appendix B) over the data sheet's dense bf16 peak, 0 to 1",
        MORE,
        Part.TIME,
        "MFU",
        ".1%",
        always=True,
        range=SHARE,
        needs=Needs.PEAK,
    ),
    Metric("step_time_s", "s, median of the window", LESS, Part.TIME, "step s"),
    Metric("joules_per_token", "J, of the trial's GPUs alone", LESS, Part.ENERGY, "J/token", noise=0.03),
    Metric(
        "energy_per_step_j", "J of an optimizer step, of the trial's GPUs alone", LESS, Part.ENERGY, "J/step", ",.0f"
    ),
    Metric(
        "idle_energy_j",
        "J in the window, of GPUs that the trial kept from others and left idle on the nodes it runs on, as a finalist "
        "does; missing where the gang shares a node's GPUs",
        LESS,
        heading="idle J",
        style=",.0f",
        least=0.0,
        needs=Needs.GPU,
    ),
    Metric("mean_power_w", "W, over all GPUs", LESS, Part.POWER, "power W", ",.0f"),
    Metric("peak_power_w", "W, over all GPUs", LESS, heading="peak W", style=",.0f"),
    Metric("power_spread_w", "W between the means of the GPU that draws most and the one that draws least", LESS),
    Metric("mean_hbm_power_w", "W of the GPUs' memory, over all GPUs", needs=Needs.GPU),
    Metric("energy_ratio", "energy by integrated power over the energy counters', of windows of some seconds near 1"),
    Metric(
        "throttle_ratio",
        "share of GPU time slowed for heat, 0 to 1",
        LESS,
        heading="throttle",
        style=".2%",
        least=0.0,
        range=SHARE,
        needs=Needs.THROTTLING,
    ),
    Metric(
        "power_cap_ratio",
        "share of GPU time slowed by the power limit, 0 to 1",
        LESS,
        heading="power cap",
        style=".1%",
        least=0.0,
        range=SHARE,
        needs=Needs.GPU,
    ),
    Metric("throttle_time_s", "s slowed for heat, over all GPUs", LESS, least=0.0, needs=Needs.THROTTLING),
    Metric("mean_sm_clock_mhz", "MHz", heading="SM MHz", style=",.0f", needs=Needs.GPU),
    Metric("min_sm_clock_mhz", "MHz, lowest sample of any GPU", needs=Needs.GPU),
    Metric(
        "sm_clock_spread_mhz",
        "MHz between the means of the fastest and the slowest GPU",
        heading="MHz apart",
        style=",.0f",
        needs=Needs.GPU,
    ),
    Metric("mean_gpu_temp_c", "degC", LESS, range=ANY, needs=Needs.GPU),
    Metric("peak_gpu_temp_c", "degC", LESS, heading="GPU degC", style=".0f", range=ANY, needs=Needs.GPU),
    Metric(
        "gpu_temp_spread_c",
        "degC between the means of the hottest and the coolest GPU",
        LESS,
        heading="degC apart",
        style=".1f",
        needs=Needs.GPU,
    ),
    Metric(
        "min_gpu_temp_margin_c",
        "degC that the hottest GPU was below the temperature at which it slows down",
        MORE,
        heading="margin degC",
        style=".0f",
        range=ANY,
        needs=Needs.GPU,
    ),
    Metric("peak_hbm_temp_c", "degC", LESS, heading="HBM degC", style=".0f", range=ANY, needs=Needs.GPU),
    Metric(
        "tensor_activity",
        "share of cycles in which tensor cores worked, 0 to 1",
        heading="tensor cores",
        style=".1%",
        range=SHARE,
        needs=Needs.GPU,
    ),
    Metric(
        "dram_activity",
        "share of cycles in which GPU memory was read or written, 0 to 1",
        heading="DRAM",
        style=".1%",
        range=SHARE,
        needs=Needs.GPU,
    ),
    Metric("pcie_bytes_per_s", "bytes/s received and sent over PCIe, over all GPUs", needs=Needs.GPU),
    Metric(
        "pcie_utilisation",
        "share of its peak of PCIe in the busier direction, of the busiest GPU, 0 to 1",
        heading="PCIe peak",
        style=".1%",
        range=SHARE,
        needs=Needs.GPU,
    ),
    Metric(
        "link_bytes_per_s",
        "bytes/s received and sent over the links between GPUs (NVLink, xGMI), over all GPUs",
        needs=Needs.GPU,
    ),
    Metric(
        "link_utilisation",
        "share of their peak of these links in the busier direction, of the busiest GPU, 0 to 1",
        heading="link peak",
        style=".1%",
        range=SHARE,
        needs=Needs.GPU,
    ),
    Metric(
        "peak_memory_gib",
        "GiB of the fullest GPU",
        LESS,
        Part.MEMORY,
        "memory GiB",
        ".1f",
        always=True,
        needs=Needs.GPU,
    ),
    Metric(
        "bubble_ratio",
        "share of GPU time spent waiting for other pipeline ranks, by the schedule and the time of each pass, 0 to 1",
        LESS,
        heading="bubble",
        style=".1%",
        range=SHARE,
        aim=False,
    ),
    Metric(
        "stage_imbalance",
        "share by which the pipeline rank with most to do computes longer than they do on average",
        LESS,
        heading="uneven stages",
        style=".1%",
        aim=False,
    ),
    Metric(
        "trial_overhead_s",
        "s that the trial held its workers outside compiling, warm-up, window and breakdown",
        LESS,
        Part.HELD,
        range=ANY,
    ),
    Metric("compile_time_s", "s of the first steps, which compile", part=Part.HELD, aim=False),
    Metric("warmup_time_s", "s of the other steps before the window", part=Part.HELD, aim=False),
    Metric("window_time_s", "s of the window's steps", part=Part.HELD, aim=False),
    Metric("breakdown_time_s", "s that the breakdown of a step took", part=Part.HELD, aim=False),
)

METRICS = tuple(metric.name for metric in TABLE if metric.aim)
"""What objectives and constraints can name."""

DIRECTIONS = {metric.name: metric.direction for metric in TABLE if metric.direction is not None}
"""Which way a metric is better, of those for which one way is."""

ALWAYS = tuple(metric.name for metric in TABLE if metric.always)
"""What tables show beside the objectives."""

SHOWN = 8
"""Names that a message lists where none is like the one that it is about."""

OFF = "slice_error_"
"""What the name of a metric begins with that says, of a layout measured in full, how far off its slices were."""

MARKS: dict[str, str] = {Method.ESTIMATED: "*", Method.EXTRAPOLATED: "~", Method.SLICE: "^"}
"""Method -> what its values carry, where they are not measured."""


def made_of(*parts: Part) -> tuple[str, ...]:
    """The metrics that are made of any of these."""
    return tuple(metric.name for metric in TABLE if metric.part in parts)


def known(name: str) -> Metric:
    """The row of a metric, also of one that the table has not: all that is known of it then is its name."""
    return next((metric for metric in TABLE if metric.name == name), Metric(name, "", aim=False))


def nearest(name: str, names: Iterable[str]) -> str:
    """What to say of a name that is none of `names`, which are metrics: those most like it, else some of them."""
    ranks = {metric.name: rank for rank, metric in enumerate(TABLE)}
    listed = sorted(names, key=lambda one: (ranks.get(one, len(ranks)), one))
    if (
        alike := get_close_matches(name.lower(), listed, cutoff=0.7)
        or [one for one in listed if name and name.lower() in one][:3]
    ):
        return f"did you mean {' or '.join(alike)}?"
    more = len(listed) - SHOWN
    return f"known: {', '.join(listed[:SHOWN])}" + (f" and {more} more" if more > 0 else "")


def heading(metric: str) -> str:
    """What stands over a metric's values in tables, or after one in text; its name if there is no other."""
    return known(metric).heading or metric


def with_unit(metric: str, value: float, method: str | None, half_width: float | None = None) -> str:
    """A value with its unit, such as ``41,804 ± 21 tokens/s``; see `number`."""
    return f"{number(metric, value, method, half_width)} {heading(metric)}"


def number(metric: str, value: float, method: str | None = None, half_width: float | None = None) -> str:
    """A value such as ``41,804 ± 21``, without its unit, with a mark if by its method it is not measured.

    `half_width` is that of the confidence interval of a mean: it is printed with two digits that count, and the value
    with no more digits than are sure.
    """
    return written(known(metric).style, value, method, half_width)


def written(style: str, value: float, method: str | None = None, half_width: float | None = None) -> str:
    """A value in one of Python's formats; see `number`."""
    mark = MARKS.get(method or "", "")
    if half_width is None or half_width <= 1e-6 * abs(value):
        return format(value, style) + mark
    if style.endswith("%"):
        return f"{value:{style}} ± {half_width:{style}}{mark}"
    digits = max(0, 1 - math.floor(math.log10(half_width)))
    return f"{value:,.{digits}f} ± {half_width:,.{digits}f}{mark}"
