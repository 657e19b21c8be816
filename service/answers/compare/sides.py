"""The searches that are compared, and what tells them apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from search_spaces.hardware import ACCELERATORS, Accelerator
from service.answers.candidates import Candidate
from service.answers.change import Value
from service.answers.compare.figures import Figure, Rates
from service.answers.ranking import compared
from service.errors import NoAnswerError
from service.goals import Comparison
from service.record import store
from service.record.results import SearchRecord

WORK = ("model", "sequence_length")
"""Facts of a search by which a token of one is as much work as a token of another."""

PASSING = ("load_average", "cores")
"""What a record says of the environment that makes no difference to tell."""


@dataclass(frozen=True)
class Side:
    """One of the searches, by the name that it is compared under."""

    name: str
    search: SearchRecord
    rates: Rates

    @cached_property
    def comparison(self) -> Comparison[Candidate]:
        """All that is ranked of it."""
        return compared(self.search)

    @property
    def accelerator(self) -> str | None:
        """Its GPUs by the name that specs have for them; None if that is not known."""
        name = self.search.params.get("accelerator")
        return str(name) if name else None

    @property
    def sheet(self) -> Accelerator:
        """What the data sheet says of its GPUs, as far as that is known."""
        return ACCELERATORS.get(self.accelerator or "", Accelerator())

    @property
    def work(self) -> tuple[Any, ...]:
        """What is trained: tokens of two searches are alike if that is the same. None stands for what is not known."""
        return tuple(self.search.params.get(fact) for fact in WORK)

    def value(self, figure: Figure, one: Candidate) -> Value | None:
        """A figure of one of its layouts."""
        return figure.of(self.comparison, one, self.rates)

    def best(self, figure: Figure, some: Iterable[Candidate] | None = None) -> Candidate | None:
        """The layout with most of a figure, of `some` or of all that keep the search's constraints."""
        valued = [(one, self.value(figure, one)) for one in (self.comparison.admitted if some is None else some)]
        known = [(one, value) for one, value in valued if value is not None]
        return max(known, key=lambda pair: pair[1].value)[0] if known else None


def check(sides: Iterable[Side]) -> None:
    """Raise `NoAnswerError` for a search of which no layout can be compared."""
    for side in sides:
        if not side.comparison.admitted:
            raise NoAnswerError(f"{side.name}: no trial of it came to a result that can be compared")


def differences(sides: tuple[Side, ...]) -> dict[str, tuple[str | None, ...]]:
    """Fact -> what each of the searches has there, of facts and parts of the environment that are not all the same."""
    described = [_facts(side) for side in sides]
    met = dict.fromkeys(name for facts in described for name in facts)
    # That older records lack the model's dimensions is no difference.
    names = [name for name in met if not name.startswith(store.MODEL) or all(name in facts for facts in described)]
    rows = {name: tuple(facts.get(name) for facts in described) for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _facts(side: Side) -> dict[str, str]:
    params = {name: value for name, value in side.search.params.items() if name not in ("legal_points", "seed")}
    environment = {name: value for name, value in side.search.environment.items() if name not in PASSING}
    sheet = side.sheet
    known = {
        "memory (GiB, data sheet)": sheet.memory_gib,
        "dense bf16 peak (TFLOP/s, data sheet)": _scaled(sheet.peak_flops, 1e12),
        "memory bandwidth (TB/s, data sheet)": _scaled(sheet.memory_bytes_per_s, 1e12),
        "links between GPUs (GB/s one way, data sheet)": _scaled(sheet.link_bytes_per_s, 1e9),
    }
    return {name: _written(value) for name, value in (params | environment | known).items() if value is not None}


def _written(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit
