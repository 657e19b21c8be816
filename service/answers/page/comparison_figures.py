"""Figures of a comparison of searches, each of a table alone, as `service.answers.page.figures` has those of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from service.answers.compare.comparing import PARTS
from service.answers.page.figures import ROW, WIDTH, Spec, bars, hollow, room_beside, tipped, word_of
from service.answers.page.layouts import short
from service.answers.page.table import Column, Table
from service.answers.page.theme import Theme

ABREAST = 3
"""Panels in a row of a figure."""

NARROWEST = 90
"""Width of a panel, at least, in pixels."""


def best(table: Table, theme: Theme) -> Spec:
    """A panel a figure, a row a search: its best value with the 95% interval."""
    searches = list(dict.fromkeys(row["search"] for row in table.rows))
    room = room_beside(searches)
    panels = []
    for number, title in enumerate(dict.fromkeys(row["title"] for row in table.rows)):
        rows = [
            {"name": row["search"], "value": row["value"], "low": row.get("low"), "high": row.get("high")}
            | {"how": word_of(row.get("value_method")), "tip": f"{title}, {row['search']}: {row['tip']}"}
            for row in tipped(table)
            if row["title"] == title
        ]
        head, joint, unit = title.rpartition(" (")
        rates = dict.fromkeys(row["rate"] for row in table.rows if row["title"] == title and row["rate"])
        lines = [head, f"({unit}" if joint else "", *([f"at {', '.join(rates)}"] if rates else [])]
        panels.append(_dots(rows, searches, lines, (WIDTH - room) // ABREAST - 20, theme, number % ABREAST == 0))
    return {
        "vconcat": [
            {"hconcat": panels[start : start + ABREAST], "spacing": 12} for start in range(0, len(panels), ABREAST)
        ],
        "spacing": 18,
    }


def layouts(table: Table, theme: Theme) -> Spec:
    """A panel a figure, a row a layout: by how much it differs from what it did in the first search."""
    rows = [row for row in tipped(table) if row.get("other") is not None]
    columns = [column for column in table.columns if column.unit == "%"]
    return _changes(rows, _names(rows), columns, theme)


def causes(table: Table, theme: Theme) -> Spec:
    """Stacked ms: to the right what takes longer than in the first search, to the left what takes less."""
    names = _names(table.rows)
    rows = [
        {"name": name, "part": title, "place": place, "value": row[key], "tip": f"{name}: {title} {row[key]:+,.1f} ms"}
        for row, name in zip(table.rows, names, strict=True)
        for place, (key, title) in enumerate(PARTS.items())
        if row[key] is not None
    ]
    whole = [
        {"name": name, "value": row["step"], "tip": f"{name}: whole step {row['step']:+,.1f} ms"}
        for row, name in zip(table.rows, names, strict=True)
    ]
    kinds = {"domain": list(PARTS.values()), "range": [theme.palette[i] for i in (4, 0, 2, 1)] + [theme.faint]}
    colour: Spec = {"field": "part", "type": "nominal", "scale": kinds, "title": None, "legend": {"columns": 5}}
    return bars(
        names, rows, "more time in a step than in the first search (ms)", colour, whole, "whole step", 60, theme
    )


def scaling(table: Table, theme: Theme) -> Spec:
    """A panel a figure, a row a way to split and a machine: by how much out differs from up."""
    names = [f"{row['layout']}: {row['out']}" for row in table.rows]
    return _changes(tipped(table), names, [column for column in table.columns if column.unit == "%"], theme)


def _changes(rows: Sequence[Mapping[str, Any]], names: Sequence[str], columns: Sequence[Column], theme: Theme) -> Spec:
    """A panel a column, a row a name: its change in per cent, beside a line at none."""
    width = max(NARROWEST, (WIDTH - room_beside(names)) // len(columns) - 14)
    panels = []
    for place, column in enumerate(columns):
        values = [
            {"name": name, "value": row[column.key], "how": word_of(None), "tip": row["tip"], "zero": 0}
            for row, name in zip(rows, names, strict=True)
            if row.get(column.key) is not None
        ]
        head, joint, what = column.title.partition(" of ")
        title = [head + joint, f"{what} (%)"] if joint else [column.heading]
        panels.append(_dots(values, list(dict.fromkeys(names)), title, width, theme, place == 0))
    return {"hconcat": panels, "spacing": 12}


def _dots(
    rows: Sequence[Spec], order: Sequence[str], title: Sequence[str], width: int, theme: Theme, labelled: bool
) -> Spec:
    """A panel: a row a name, a mark at its `value`, a rule from `zero` where there is one, a bar from `low` to `high`.
    Rows are named on the left if `labelled`."""
    y: Spec = {"field": "name", "type": "nominal", "sort": order, "scale": {"domain": order}, "title": None}
    y |= {"axis": {"labels": labelled, "ticks": False, "grid": True}}
    x: Spec = {"field": "value", "type": "quantitative", "title": list(filter(None, title)), "scale": {"zero": True}}
    x["axis"] = {"tickCount": 3, "labelSeparation": 8}
    if max(abs(row["value"]) for row in rows) >= 1e4:
        x["axis"] |= {"format": "~s"}
    ends = {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}}
    from_zero = {"x": x, "x2": {"field": "zero"}}
    layers: list[Spec] = [
        {"mark": {"type": "rule", "color": theme.faint}, "transform": [{"filter": "isValid(datum.zero)"}]}
        | {"encoding": from_zero},
        {
            "mark": {"type": "rule", "color": theme.ink, "strokeWidth": 2},
            "transform": [{"filter": "isValid(datum.low)"}],
        }
        | {"encoding": ends},
        {
            "mark": {"type": "point", "size": 45, "color": theme.palette[0], "fill": theme.palette[0]},
            "encoding": {"x": x, "fillOpacity": hollow(), "description": {"field": "tip"}},
        },
    ]
    return {
        "data": {"values": list(rows)},
        "width": width,
        "height": {"step": ROW},
        "encoding": {"y": y},
        "layer": layers,
    }


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of rows: the layout, cut to what tells it apart, and the other search where there are some."""
    names = short([row["layout"] for row in rows])
    several = len({row["other"] for row in rows}) > 1
    return [names[row["layout"]] + (f", {row['other']}" if several else "") for row in rows]
