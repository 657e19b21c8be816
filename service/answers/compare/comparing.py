"""The comparison of searches, and how it is told on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from service.answers.candidates import Candidate
from service.answers.change import Change, Value, comparable
from service.answers.compare.causes import COUNTERS, Matched, matched
from service.answers.compare.figures import FIGURES, PER_JOULE, Figure
from service.answers.compare.scale import Scaling, scalings
from service.answers.compare.sides import WORK, Side, check, differences
from service.answers.overview import contests
from service.answers.tables import render
from service.errors import InputError, NoAnswerError
from service.metrics import Doubt, heading, number

SHOWN = 8
"""Layouts that several searches ran of which a terminal shows what they did; programs and the page get all."""

PARTS = {
    "clock": "SM clock",
    "chip": "chip and kernels",
    "memory": "memory bandwidth",
    "fabric": "fabric",
    "waiting": "waiting",
}
"""Field of a `Cause` -> what it is called."""


@dataclass(frozen=True)
class Best:
    """The layout of each search with most of a figure, in the order of the searches; None of one that lacks it.

    `changes` are from the first search to each other one; None where they cannot be compared.
    """

    figure: Figure
    layouts: tuple[Candidate | None, ...]
    values: tuple[Value | None, ...]
    changes: tuple[Change | None, ...]


@dataclass(frozen=True)
class Compared:
    """Searches held against each other, the first of them against each other one.

    `differences`: fact -> what each search has there. `matched` are the layouts that the first and another one ran,
    `scalings` the ways to split that ran on few nodes or GPUs and on more. `notices`: what a reader must know.
    """

    sides: tuple[Side, ...]
    differences: dict[str, tuple[str | None, ...]]
    best: tuple[Best, ...]
    matched: tuple[Matched, ...]
    scalings: tuple[Scaling, ...]
    notices: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "searches": [
                {"name": side.name, "search_id": side.search.id, "workload": side.search.params}
                | {"environment": side.search.environment, "rates": asdict(side.rates)}
                for side in self.sides
            ],
            "differences": {name: list(values) for name, values in self.differences.items()},
            "best": {
                row.figure.key: {
                    "unit": row.figure.unit,
                    "layouts": [one and one.label for one in row.layouts],
                    "configs": [one and one.layout.to_dict() for one in row.layouts],
                    "values": [value and value.to_dict() for value in row.values],
                    "changes": [made and asdict(made) for made in row.changes],
                }
                for row in self.best
            },
            "matched": [pair.to_dict() for pair in self.matched],
            "scaling": [scaling.to_dict() for scaling in self.scalings],
            "notices": list(self.notices),
        }


def compare(sides: Sequence[Side]) -> Compared:
    """Hold searches against each other.

    Raises `InputError` for less than two and for one that is given twice, `NoAnswerError` for one without results, or
    if none has what they are compared by.
    """
    if len(sides) < 2:
        raise InputError("compare: give two searches or more")
    twice = [name for name, times in Counter(side.name for side in sides).items() if times > 1]
    if twice:
        raise InputError(f"compare: {twice[0]} is given twice")
    check(sides)
    best = [_best(sides, figure) for figure in FIGURES]
    pairs, scaled = matched(sides), scalings(sides)
    rows = tuple(row for row in best if any(value is not None for value in row.values))
    if not rows:
        raise NoAnswerError(f"compare: no search has any of {', '.join(figure.key for figure in FIGURES)}")
    return Compared(
        tuple(sides), differences(tuple(sides)), rows, tuple(pairs), tuple(scaled), tuple(_notices(sides, rows, scaled))
    )


def _best(sides: Sequence[Side], figure: Figure) -> Best:
    layouts = tuple(side.best(figure) for side in sides)
    values = tuple(None if one is None else side.value(figure, one) for side, one in zip(sides, layouts, strict=True))
    return Best(figure, layouts, values, tuple(comparable(value, values[0]) for value in values[1:]))


def _notices(sides: Sequence[Side], best: Sequence[Best], scaled: Sequence[Scaling]) -> list[str]:
    told = [f"{side.name}: {notice}" for side in sides for notice in contests(side.comparison)]
    if len({side.work for side in sides}) > 1:
        told.append(f"{' or '.join(WORK)} is not the same: a token of one search is not the work of a token of another")
    for row in best:
        doubts = {Doubt.of(value.method) for value in row.values if value is not None}
        if len(doubts) > 1:
            words = " and ".join(str(doubt) for doubt in sorted(doubts))
            told.append(f"{row.figure.title}: {words} values are not compared")
    unknown = [side.name for side in sides if side.accelerator is None or "gpus_per_node" not in side.search.params]
    if unknown:
        told.append(f"{', '.join(unknown)}: up or out cannot be told, as its GPUs and nodes are not known")
    elif not scaled:
        told.append("up or out cannot be told: no way to split ran on few nodes or GPUs and on more, in the same batch")
    if any(row.figure.key == PER_JOULE for row in best):
        told.append("energy, and what is counted by it, is that of the GPUs alone")
    return told


def text(compared: Compared) -> str:
    """For a terminal."""
    sides, others = compared.sides, compared.sides[1:]
    against = [f"{side.name} against {sides[0].name}" for side in others]
    parts = []
    if compared.differences:
        rows = [[name, *(value or "-" for value in values)] for name, values in compared.differences.items()]
        parts.append(render(["what differs", *(side.name for side in sides)], rows))
    rows = [
        [
            f"{row.figure.title}, {row.figure.unit}" if row.figure.unit != "1" else row.figure.title,
            *(_priced(row.figure, value, side) for value, side in zip(row.values, sides, strict=True)),
            *(str(made) if made is not None else "-" for made in row.changes),
        ]
        for row in compared.best
    ]
    parts.append(render(["the best of each search", *(side.name for side in sides), *against], rows))
    parts.append("\n".join(_named(compared)))
    parts += _matched_text(compared.matched)
    if compared.scalings:
        parts.append(
            "\n".join(["Up or out, by how the model is split:", *(f"  {one.answer}" for one in compared.scalings)])
        )
    return "\n\n".join([*parts, "\n".join(f"note: {notice}" for notice in compared.notices)]).strip()


def in_words(compared: Compared) -> list[str]:
    """By how much each search is off the first at its best, a sentence a figure."""
    first = compared.sides[0]
    told = []
    for row in compared.best:
        title, unit = row.figure.title[0].upper() + row.figure.title[1:], row.figure.unit.removeprefix("1")
        base = f"{_priced(row.figure, row.values[0], first)} in {first.name}"
        for side, value, made in zip(compared.sides[1:], row.values[1:], row.changes, strict=True):
            if made is not None:
                doubt = "" if made.sure else ", no more than chance may make of it"
                other = f"{_priced(row.figure, value, side, unit)} in {side.name}"
                told.append(f"{title}: {other} against {base}, {made}{doubt}.")
    return told


def _priced(figure: Figure, value: Value | None, side: Side, unit: str = "") -> str:
    """A value, and the rate of the user's that it rests on."""
    if value is None:
        return "-"
    rate = figure.by(side.rates)
    told = f"{figure.text(value)} {unit}".rstrip()
    return f"{told} at {rate}" if rate else told


def _named(compared: Compared) -> list[str]:
    """Which layouts are the best of each search, each told once."""
    lines = []
    for place, side in enumerate(compared.sides):
        titles: dict[str, list[str]] = {}
        for row in compared.best:
            if (one := row.layouts[place]) is not None:
                titles.setdefault(one.label, []).append(row.figure.title)
        lines += [f"{side.name}, {', '.join(figures)}: {label}" for label, figures in titles.items()]
    return lines


def _matched_text(pairs: Sequence[Matched]) -> list[str]:
    if not pairs:
        return ["No layout was run by the first search and another one."]
    keys = [figure for figure in FIGURES if any(figure.key in pair.changes for pair in pairs)]
    shown = pairs[:SHOWN]
    left = f", the first {SHOWN} of {len(pairs)}" if len(pairs) > SHOWN else ""
    rows = [
        [f"{pair.layout.label}: {pair.side.name}", *(str(pair.changes.get(figure.key, "-")) for figure in keys)]
        for pair in shown
    ]
    parts = [render([f"alike layouts{left}, against {pairs[0].base.name}", *(figure.title for figure in keys)], rows)]
    parts += _counters_text(shown)
    told = [
        [
            f"{pair.layout.label}: {pair.side.name}",
            _ms(pair.cause.step_s),
            *(_ms(getattr(pair.cause, part)) for part in PARTS),
        ]
        for pair in shown
        if pair.cause is not None
    ]
    if told:
        parts.append(render(["what a step takes longer, in ms", "in all", *PARTS.values()], told))
    untold = Counter(f"{pair.side.name}: {reason}" for pair in pairs for reason in pair.untold)
    if untold:
        lines = [f"  {reason}, in {times} of {len(pairs)} alike layouts" for reason, times in untold.items()]
        parts.append("\n".join(["What cannot be told of the difference:", *lines]))
    return parts


def _counters_text(pairs: Sequence[Matched]) -> list[str]:
    """What GPUs did in the first search and in another one, of the counters that both have."""
    known = [
        name for name in COUNTERS if any(name in pair.one.metrics and name in pair.other.metrics for pair in pairs)
    ]
    if not known:
        return []
    rows = []
    for pair in pairs:
        values = [(pair.one.metrics.get(name), pair.other.metrics.get(name)) for name in known]
        cells = [
            "-" if before is None or after is None else f"{number(name, before)} > {number(name, after)}"
            for name, (before, after) in zip(known, values, strict=True)
        ]
        rows.append([f"{pair.layout.label}: {pair.side.name}", *cells])
    return [render([f"what GPUs did, {pairs[0].base.name} > other", *map(heading, known)], rows)]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:+,.1f}"
