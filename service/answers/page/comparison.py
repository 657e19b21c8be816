"""The page of a comparison of searches: tables of it, figures of these, and around them what the report's page has."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import Any

from service.answers.change import Value
from service.answers.compare.causes import COUNTERS, Cause
from service.answers.compare.comparing import PARTS, Compared, in_words
from service.answers.compare.figures import FIGURES
from service.answers.compare.scale import COMPARED
from service.answers.page import comparison_figures, draw
from service.answers.page.document import listed, page, shown, tabulated
from service.answers.page.layouts import LAYOUT
from service.answers.page.sections import HOLLOW, Section
from service.answers.page.table import Column, Lacking, Table, metric_column

SEARCH = Column("search", "search")


def html(compared: Compared) -> str:
    """The whole page. Raises `InputError` if what draws is not installed."""
    draw.check()
    names = [side.name for side in compared.sides]
    tables = [(section, section.table(compared)) for section in SECTIONS]
    body = [
        f"<h1>{escape(' against '.join(names))}</h1>",
        f'<p class="facts">Searches compared by Wattune; written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.</p>',
        listed("In short", in_words(compared), "findings"),
        listed("Up or out, by how the model is split", [one.answer for one in compared.scalings], "findings"),
        listed("Notices", compared.notices, "findings"),
        *_differences(compared),
        *(shown(section, table) for section, table in tables if isinstance(table, Table)),
        listed(
            "Not shown", [f"{one.title}: {lack.reason}" for one, lack in tables if isinstance(lack, Lacking)], "plain"
        ),
    ]
    return page(f"{' against '.join(names)}: comparison", body)


def _differences(compared: Compared) -> list[str]:
    if not compared.differences:
        return []
    columns = [Column("fact", "what differs"), *(Column(side.name, side.name) for side in compared.sides)]
    names = [side.name for side in compared.sides]
    rows = [{"fact": fact, **dict(zip(names, values, strict=True))} for fact, values in compared.differences.items()]
    return ["<h2>What differs</h2>", tabulated(Table(tuple(columns), rows))]


def best(compared: Compared) -> Table | Lacking:
    """The best layout of each search by each figure, with the rates of the user's that the figure rests on."""
    rows = [
        {"figure": row.figure.key, "title": f"{row.figure.title} ({row.figure.unit})", "search": side.name}
        | {"layout": one.label, "rate": row.figure.by(side.rates), "change": made and str(made)}
        | _value("value", value)
        for row in compared.best
        for side, one, value, made in zip(compared.sides, row.layouts, row.values, (None, *row.changes), strict=True)
        if one is not None and value is not None
    ]
    if not rows:
        return Lacking("No search has any of the figures.")
    first = compared.sides[0].name
    columns = [Column("title", "the most of"), SEARCH, Column("value", "value"), Column("low", "95% from")]
    columns += [Column("high", "95% to"), Column("rate", "at"), Column("change", f"against {first}"), LAYOUT]
    return Table(tuple(column for column in columns if any(row.get(column.key) is not None for row in rows)), rows)


def layouts(compared: Compared) -> Table | Lacking:
    """What the first search and others made of the same layouts, with the counters beside."""
    keys = [figure for figure in FIGURES if any(figure.key in pair.changes for pair in compared.matched)]
    rows: list[dict[str, Any]] = []
    for pair in compared.matched:
        for place, (side, one) in enumerate(((pair.base, pair.one), (pair.side, pair.other))):
            row: dict[str, Any] = {"layout": pair.layout.label, "search": side.name}
            for figure in keys:
                row |= _value(figure.key, pair.values(figure.key)[place])
            if place == 1:
                row |= {"other": side.name} | {f"{key}_change": 100 * made.share for key, made in pair.changes.items()}
            rows.append(row | {name: one.metrics.get(name) for name in COUNTERS})
    if not rows or not keys:
        return Lacking("No layout was run by the first search and another one.")
    columns = [LAYOUT, SEARCH]
    for figure in keys:
        columns += [
            Column(figure.key, figure.title, figure.unit, figure.style),
            Column(f"{figure.key}_change", f"change of {figure.title}", "%", "+.1f"),
        ]
    columns += [metric_column(name) for name in COUNTERS if any(row[name] is not None for row in rows)]
    return Table(tuple(columns), rows)


def causes(compared: Compared) -> Table | Lacking:
    """What a step of each layout takes longer than on the first search, part by part."""
    rows = [
        {"layout": pair.layout.label, "other": pair.side.name, "step": 1e3 * pair.cause.step_s}
        | {name: None if value is None else 1e3 * value for name, value in _parts(pair.cause).items()}
        for pair in compared.matched
        if pair.cause is not None
    ]
    if not rows:
        why = dict.fromkeys(reason for pair in compared.matched for reason in pair.untold)
        return Lacking(f"Cannot be told: {'; '.join(why) or 'no layout was run by the first search and another one'}.")
    columns = [
        LAYOUT,
        Column("other", "search"),
        *(Column(name, title, "ms", "+,.1f") for name, title in PARTS.items()),
    ]
    untold = dict.fromkeys(reason for pair in compared.matched for reason in pair.untold)
    note = f"Cannot be told of some: {'; '.join(untold)}." if untold else ""
    return Table((*columns, Column("step", "whole step", "ms", "+,.1f")), rows, note)


def scaling(compared: Compared) -> Table | Lacking:
    """By how much more nodes or GPUs differ from few, for each way to split."""
    rows = [
        {"layout": one.split, "up": one.up.machine, "out": one.out.machine}
        | {"up_layout": one.up.candidate.label, "out_layout": one.out.candidate.label}
        | {key: 100 * made.share for key, made in one.changes.items()}
        for one in compared.scalings
    ]
    figures = [figure for figure in COMPARED if any(figure.key in row for row in rows)]
    if not rows or not figures:
        return Lacking("No way to split ran on few nodes or GPUs and on more, with the same work in the same batch.")
    columns = [Column("layout", "split"), Column("up", "up"), Column("out", "out")]
    columns += [Column(figure.key, f"change of {figure.title}", "%", "+.1f") for figure in figures]
    columns += [Column("up_layout", "layout up"), Column("out_layout", "layout out")]
    return Table(tuple(columns), rows)


SECTIONS: tuple[Section[Compared], ...] = (
    Section(
        "best",
        "The best of each search",
        "Each by the layout that has most of it; more is better. Bars are 95% intervals of what was measured again. "
        f"Energy is that of the GPUs alone. {HOLLOW}",
        best,
        comparison_figures.best,
    ),
    Section(
        "layouts",
        "The same layouts",
        "By how much each layout differs from what it did in the first search; right of the line there is more, which "
        "is better.",
        layouts,
        comparison_figures.layouts,
    ),
    Section(
        "causes",
        "What the difference is",
        "How much longer a profiled step takes than in the first search, on the mean over ranks; left of the line it "
        "takes less. SM clock: what the mean clock alone makes of matrix products and attention; chip and kernels: "
        "what is left of these; memory bandwidth: other kernels and copies, which it bounds; fabric: communication "
        "that nothing hides; waiting: nothing runs. Diamonds are the whole step.",
        causes,
        comparison_figures.causes,
    ),
    Section(
        "scaling",
        "Up or out",
        "By how much more nodes, or more GPUs of another kind, differ from few, each by the fastest layout for a GPU; "
        "right of the line there is more, which is better.",
        scaling,
        comparison_figures.scaling,
    ),
)


def _value(key: str, value: Value | None) -> dict[str, Any]:
    """Cells of a figure."""
    if value is None:
        return {}
    cells: dict[str, Any] = {key: value.value, f"{key}_method": value.method and value.method.value}
    if value.half_width is not None and key == "value":
        cells |= {"low": value.value - value.half_width, "high": value.value + value.half_width}
    return cells


def _parts(cause: Cause) -> dict[str, float | None]:
    return {name: getattr(cause, name) for name in PARTS}
