"""What searches are compared by: tokens for a GPU, a joule, a dollar and a kilogram of CO2."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.answers.candidates import Candidate
from service.answers.change import Value
from service.errors import InputError
from service.goals import Comparison
from service.metrics import Doubt, written

SPEED, ENERGY = "tokens_per_s_per_gpu", "joules_per_token"
PER_JOULE = "tokens_per_joule"
JOULES = 3.6e6
"""Of a kWh."""

HOUR_S = 3600.0
MILLION = 1e6


@dataclass(frozen=True)
class Rates:
    """What the user pays and emits: $ for an hour of one GPU, $ for a kWh, kg of CO2 for a kWh; None where not told."""

    gpu_hour: float | None = None
    kwh: float | None = None
    co2: float | None = None

    @property
    def price(self) -> str | None:
        """What dollars are counted by, such as ``2.5 $/GPU-hour + 0.1 $/kWh``."""
        parts = (self.gpu_hour, "$/GPU-hour"), (self.kwh, "$/kWh")
        return " + ".join(f"{rate:g} {unit}" for rate, unit in parts if rate is not None) or None

    @property
    def intensity(self) -> str | None:
        """What CO2 is counted by, such as ``0.35 kg/kWh``."""
        return None if self.co2 is None else f"{self.co2:g} kg/kWh"


def rates(gpu_hour: Sequence[float], kwh: Sequence[float], co2: Sequence[float], sides: int) -> list[Rates]:
    """Those of each of so many searches. Each is given once, for all of them, or once for each in their order, or not.

    Raises `InputError` for another number of them, and for one that is not above 0.
    """
    given = {"price-per-gpu-hour": gpu_hour, "price-per-kwh": kwh, "co2-per-kwh": co2}
    for name, values in given.items():
        if len(values) not in (0, 1, sides):
            raise InputError(f"{name}: give it once, or once for each of the {sides} searches, not {len(values)} times")
        for value in values:
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{name}: {value:g} is not above 0")
    spread = [_spread(values, sides) for values in given.values()]
    return [Rates(*of_side) for of_side in zip(*spread, strict=True)]


def _spread(values: Sequence[float], sides: int) -> list[float | None]:
    """One for each search."""
    if not values:
        return [None] * sides
    return [*values] * (sides if len(values) == 1 else 1)


@dataclass(frozen=True)
class Figure:
    """`of`: its value of a layout of a search at some rates. More is better of each. `by`: the rates that it rests on.

    `style`: Python's format of its values.
    """

    key: str
    title: str
    unit: str
    style: str
    of: Callable[[Comparison[Candidate], Candidate, Rates], Value | None]
    by: Callable[[Rates], str | None] = lambda rates: None

    def text(self, value: Value) -> str:
        """A value without its unit, such as ``41,804 ± 21``, with a mark if it is not measured."""
        return written(self.style, value.value, value.method, value.half_width)


def measured(comparison: Comparison[Candidate], one: Candidate, metric: str) -> Value | None:
    """A metric of a layout; None if it is missing, or more in doubt than that of other layouts of the search."""
    value = comparison.value(one, metric)
    return None if value is None else Value(value, one.intervals.get(metric), one.methods.get(metric))


def _per_gpu(comparison: Comparison[Candidate], one: Candidate, rates: Rates) -> Value | None:
    return measured(comparison, one, SPEED)


def _mfu(comparison: Comparison[Candidate], one: Candidate, rates: Rates) -> Value | None:
    return measured(comparison, one, "mfu")


def _per_joule(comparison: Comparison[Candidate], one: Candidate, rates: Rates) -> Value | None:
    return _inverse(measured(comparison, one, ENERGY), 1.0)


def _per_dollar(comparison: Comparison[Candidate], one: Candidate, rates: Rates) -> Value | None:
    """Million tokens for a dollar that goes into GPU hours, energy, or both: what a token costs of each adds up."""
    costs: list[Value | None] = []
    if rates.gpu_hour is not None:
        costs.append(_inverse(measured(comparison, one, SPEED), rates.gpu_hour / HOUR_S))
    if rates.kwh is not None:
        costs.append(_times(measured(comparison, one, ENERGY), rates.kwh / JOULES))
    return _inverse(_sum(costs), 1 / MILLION)


def _per_kg(comparison: Comparison[Candidate], one: Candidate, rates: Rates) -> Value | None:
    if rates.co2 is None:
        return None
    return _inverse(_times(measured(comparison, one, ENERGY), rates.co2 / JOULES), 1 / MILLION)


def _times(value: Value | None, factor: float) -> Value | None:
    if value is None:
        return None
    width = value.half_width
    return Value(value.value * factor, None if width is None else width * factor, value.method)


def _inverse(value: Value | None, factor: float) -> Value | None:
    """`factor` by the value, whose relative error stays the same, to first order."""
    if value is None or not value.value:
        return None
    result = factor / value.value
    width = value.half_width
    return Value(result, None if width is None else result * width / value.value, value.method)


def _sum(values: Sequence[Value | None]) -> Value | None:
    """Of values of which none is missing, as doubtful as the most doubtful of them; None if there are none."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    widths = [value.half_width for value in known if value.half_width is not None]
    width = math.hypot(*widths) if len(widths) == len(known) else None
    return Value(sum(value.value for value in known), width, max(known, key=lambda one: Doubt.of(one.method)).method)


FIGURES = (
    Figure(SPEED, "throughput per GPU", "tokens/s", ",.0f", _per_gpu),
    Figure("mfu", "model FLOPs utilisation", "1", ".1%", _mfu),
    Figure(PER_JOULE, "tokens for a joule", "tokens/J", ",.4g", _per_joule),
    Figure(
        "million_tokens_per_dollar",
        "tokens for a dollar",
        "million tokens/$",
        ",.4g",
        _per_dollar,
        lambda rates: rates.price,
    ),
    Figure(
        "million_tokens_per_kg_co2",
        "tokens for a kg of CO2",
        "million tokens/kg",
        ",.4g",
        _per_kg,
        lambda rates: rates.intensity,
    ),
)
"""Energy, and what is counted by it, is that of the GPUs alone."""
