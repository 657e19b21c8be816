"""What `best` is asked: by which metric, under which conditions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from service.errors import InputError
from service.goals import Limit, parse_condition
from service.metrics import Direction

_NEAR = re.compile(r"^\s*(\w+)\s+(\d+(?:\.\d+)?)\s*%\s*$")


@dataclass(frozen=True)
class Near:
    """How far a metric may be off its best value, as a share of it, such as ``tokens_per_s 2%``; `text` is how it was
    given."""

    metric: str
    share: float
    text: str = field(compare=False)


@dataclass(frozen=True)
class Query:
    """Conditions, and what is sought among the layouts that meet them all.

    `by` is a metric and which way it is better; None for the first objective of the search. With `knee` it is the point
    where the front bends most in its place. Made of texts by `parse_query`.
    """

    by: tuple[str, Direction] | None = None
    where: tuple[Limit, ...] = ()
    within: tuple[Near, ...] = ()
    knee: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        """All that it names, each once."""
        by = [] if self.by is None else [self.by[0]]
        conditions = [*(one.metric for one in self.where), *(one.metric for one in self.within)]
        return tuple(dict.fromkeys([*by, *conditions]))

    @property
    def conditions(self) -> str:
        """As they were given, in one line; empty without any."""
        return " and ".join([*(one.text for one in self.where), *(f"{one.text} of the best" for one in self.within)])


FIRST = Query()
"""The best on the first objective of the search."""


def parse_query(
    maximize: str | None = None,
    minimize: str | None = None,
    where: str | Iterable[str] = (),
    within: str | Iterable[str] = (),
    knee: bool = False,
) -> Query:
    """The query that texts make, conditions such as ``peak_gpu_temp_c<=80`` and ``tokens_per_s 2%``, one or several.

    Raises `InputError` for a malformed condition, and for more than one of `maximize`, `minimize` and `knee`.
    """
    if bool(maximize) + bool(minimize) + knee > 1:
        raise InputError("best: give one of maximize, minimize and knee")
    by = None
    if metric := maximize or minimize:
        by = metric, Direction.MAXIMIZE if maximize else Direction.MINIMIZE
    conditions = tuple(map(parse_condition, _texts("where", where)))
    return Query(by, conditions, tuple(map(_near, _texts("within", within))), knee)


def _texts(name: str, given: str | Iterable[str]) -> tuple[str, ...]:
    """One text or several, as several."""
    texts = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"{name}: {text!r} is no text")
    return texts


def _near(text: str) -> Near:
    match = _NEAR.match(text)
    if match is None:
        raise InputError(f"within: {text!r} is not 'METRIC NUMBER%'")
    return Near(match[1], float(match[2]) / 100, text)
