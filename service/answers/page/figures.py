"""Figures as Vega-Lite has them (Satyanarayan et al. 2017), each of a table alone.

What is not measured is hollow. Every mark is described by its row, which the page shows where a pointer rests on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from service.answers.page.devices import OVERLAPPED
from service.answers.page.devices import PARTS as STEP_PARTS
from service.answers.page.evidence import GAUGES, TRAFFIC
from service.answers.page.layouts import FIGURES, MEASURED, WORDS, short
from service.answers.page.layouts import PARTS as MEMORY_PARTS
from service.answers.page.table import Column, Table
from service.answers.page.theme import DASHES, FILLED, HOLLOW, SEQUENCE, SHAPES, Theme

Spec = dict[str, Any]

WIDTH = 860
"""Of a whole figure, its axes included, in pixels, as are all lengths here."""
AXIS = 75
"""Width of a left axis with numbers and a title."""
ROW = 20
"""Height of a layout's row."""
LETTER = 5.8
"""Width of a letter of a label, on average."""

OUTCOMES = ("on the front", "dominated", "breaks a constraint")
PREDICTED = "predicted"


def front(table: Table, theme: Theme) -> Spec:
    """The first objective against each other one: layouts, their intervals, and where they were predicted to be."""
    first, *others = _objectives(table)
    return _stacked([_pair(table, theme, first, other) for other in others])


def _pair(table: Table, theme: Theme, across: Column, up: Column) -> Spec:
    x, y = across.key, up.key
    rows = tipped(table)
    seen = [outcome for outcome in OUTCOMES if any(row["outcome"] == outcome for row in rows)]
    colours = dict(zip(OUTCOMES, (theme.palette[1], theme.faint, theme.palette[3]), strict=True))
    kinds = {"domain": seen, "range": [colours[outcome] for outcome in seen]}
    shapes = {"domain": seen, "range": [SHAPES[OUTCOMES.index(outcome)] for outcome in seen]}
    layers: list[Spec] = [
        {
            "transform": [{"filter": f"datum.outcome === '{OUTCOMES[0]}'"}],
            "mark": {"type": "line", "color": theme.palette[1], "opacity": 0.5, "strokeWidth": 1},
            "encoding": {"x": _q(across), "y": _q(up), "order": {"field": x}, "description": {"value": "the front"}},
        }
    ]
    for low, high, other, along in ((f"{x}_low", f"{x}_high", y, "x"), (f"{y}_low", f"{y}_high", x, "y")):
        if table.has(low):
            ends = {along: {"field": low, "type": "quantitative"}, f"{along}2": {"field": high}}
            across_it = {"y" if along == "x" else "x": {"field": other, "type": "quantitative"}}
            layers.append(
                {
                    "transform": [{"filter": f"isValid(datum['{low}'])"}],
                    "mark": {"type": "rule", "color": theme.ink},
                    "encoding": ends | across_it,
                }
            )
    if table.has(f"{x}_predicted") and table.has(f"{y}_predicted"):
        foretold = {"x": {"field": f"{x}_predicted", "type": "quantitative"}}
        foretold |= {"y": {"field": f"{y}_predicted", "type": "quantitative"}}
        for scale, looks in ((kinds, theme.faint), (shapes, "cross")):
            scale["domain"], scale["range"] = [*scale["domain"], PREDICTED], [*scale["range"], looks]
        cross: Spec = {"datum": PREDICTED, "type": "nominal", "title": None}
        chosen = f"datum.outcome === '{OUTCOMES[0]}' && isValid(datum['{x}_predicted'])"
        tied = foretold | {"x2": {"field": x}, "y2": {"field": y}}
        layers += [
            {
                "transform": [{"filter": chosen}],
                "mark": {"type": "rule", "color": theme.faint, "strokeDash": [2, 2]},
                "encoding": tied,
            },
            {
                "transform": [{"filter": chosen}],
                "mark": {"type": "point", "size": 45, "angle": 45},
                "encoding": foretold
                | {"color": cross | {"scale": kinds}, "shape": cross | {"scale": shapes}}
                | {"description": {"field": "foretold"}},
            },
        ]
        for row in rows:
            row["foretold"] = f"{PREDICTED}: {row['tip']}"
    layers.append(
        {
            "mark": {"type": "point", "size": 60, "strokeWidth": 1.5},
            "encoding": {
                "x": _q(across),
                "y": _q(up),
                "color": {"field": "outcome", "type": "nominal", "scale": kinds, "title": None},
                "fill": {"field": "outcome", "type": "nominal", "scale": kinds, "title": None},
                "shape": {"field": "outcome", "type": "nominal", "scale": shapes, "title": None},
                "fillOpacity": hollow(),
                "description": {"field": "tip"},
            },
        }
    )
    return {"data": {"values": rows}, "width": WIDTH - AXIS, "height": 320, "layer": layers}


def axes(table: Table, theme: Theme) -> Spec:
    """Parallel coordinates (Inselberg 1985): a line a layout, across its axes and its objectives."""
    columns = [column for column in table.columns if column.key not in ("layout", "outcome")]
    metrics = {column.key for column in _objectives(table)}
    lines: list[Spec] = []
    ticks: list[Spec] = []
    first = next(column for column in columns if column.key in metrics)
    rows = tipped(table)
    for column in columns:
        values = [row[column.key] for row in rows]
        if column.key in metrics:
            low, high = min(values), max(values)
            places = {value: (value - low) / (high - low) if high > low else 0.5 for value in values}
            ends = [(place, format(value, column.style)) for value, place in ((low, places[low]), (high, places[high]))]
        else:
            kinds = sorted({str(value) for value in values}, key=_number_first)
            places = {kind: i / (len(kinds) - 1) if len(kinds) > 1 else 0.5 for i, kind in enumerate(kinds)}
            ends = [(place, kind) for kind, place in places.items()]
        ticks += [{"axis": column.heading, "place": place, "text": _lines(text)} for place, text in ends]
        for i, row in enumerate(rows):
            value = row[column.key] if column.key in metrics else str(row[column.key])
            lines.append(
                {"axis": column.heading, "place": places[value], "line": i, "tip": row["tip"]}
                | {"outcome": row["outcome"], "first": row[first.key]}
            )
    place = {"field": "axis", "type": "nominal", "sort": [column.heading for column in columns], "title": None}
    x: Spec = place | {
        "axis": {"labelAngle": -30, "grid": True, "domain": False, "labelOverlap": False},
        "scale": {"padding": 0.4},
    }
    y: Spec = {"field": "place", "type": "quantitative", "axis": None}
    chosen = {"test": f"datum.outcome === '{OUTCOMES[0]}'"}
    return {
        "width": WIDTH - 60,
        "height": 300,
        "layer": [
            {
                "data": {"values": lines},
                "mark": {"type": "line"},
                "encoding": {
                    "x": x,
                    "y": y,
                    "detail": {"field": "line"},
                    "color": {
                        "field": "first",
                        "type": "quantitative",
                        "scale": {"scheme": {"name": SEQUENCE, "extent": [0.15, 0.9]}},  # to be seen on any paper
                        "title": first.heading,
                        "legend": {"gradientLength": 240},
                    },
                    "strokeWidth": {"condition": chosen | {"value": 3.5}, "value": 1},
                    "opacity": {"condition": chosen | {"value": 1}, "value": 0.7},
                    "description": {"field": "tip"},
                },
            },
            {
                "data": {"values": ticks},
                "mark": {"type": "text", "align": "left", "dx": 4, "dy": -6, "fontSize": 10, "lineHeight": 11},
                "encoding": {"x": x, "y": y, "text": {"field": "text"}},
            },
        ],
    }


def figures(table: Table, theme: Theme) -> Spec:
    """A panel a quantity, a row a layout: its mean, and its extreme over all GPUs and time."""
    names = short([row["layout"] for row in table.rows])
    pairs = [(mean, extreme) for mean, extreme in FIGURES if table.has(mean)]
    panels = []
    for i, (mean, extreme) in enumerate(pairs):
        column = table.column(mean)
        rows: list[Spec] = []
        for told, row in zip(tipped(table), table.rows, strict=True):
            name = names[row["layout"]]
            for key, what in ((mean, "mean"), (extreme, "lowest" if extreme == "min_sm_clock_mhz" else "peak")):
                if key is not None and row.get(key) is not None:
                    rows.append(
                        {"name": name, "value": row[key], "what": what, "how": word_of(row.get(f"{key}_method"))}
                        | {"tip": told["tip"], "other": row.get(mean)}
                        | {"low": row.get(f"{key}_low"), "high": row.get(f"{key}_high")}
                    )
        y: Spec = {"field": "name", "type": "nominal", "sort": list(names.values()), "title": None}
        y |= {"axis": {"labels": i == 0, "ticks": False, "grid": True}}
        x: Spec = {"field": "value", "type": "quantitative", "scale": {"zero": False, "nice": True}}
        x |= {"title": [column.title, f"({column.unit})"], "axis": {"tickCount": 3, "labelSeparation": 8}}
        if min(row["value"] for row in rows) >= 1e4:
            x["axis"] |= {"format": "~s"}
        shapes = {"domain": ["mean", "peak", "lowest"], "range": ["circle", "triangle-right", "triangle-left"]}
        panels.append(
            {
                "data": {"values": rows},
                "width": (WIDTH - room_beside(names.values())) // len(pairs) - 14,
                "height": {"step": ROW},
                "encoding": {"y": y},
                "layer": [
                    {
                        "mark": {"type": "rule", "color": theme.faint},
                        "encoding": {"x": x, "x2": {"field": "other"}},
                    },
                    {
                        "mark": {"type": "rule", "color": theme.ink, "strokeWidth": 2},
                        "transform": [{"filter": "isValid(datum.low)"}],
                        "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}},
                    },
                    {
                        "mark": {"type": "point", "size": 45, "color": theme.palette[0], "fill": theme.palette[0]},
                        "encoding": {
                            "x": x,
                            "shape": {"field": "what", "type": "nominal", "scale": shapes, "title": None},
                            "fillOpacity": hollow(),
                            "description": {"field": "tip"},
                        },
                    },
                ],
            }
        )
    return {"hconcat": panels, "spacing": 12, "resolve": {"legend": {"shape": "shared"}}}


def sweep(table: Table, theme: Theme) -> Spec:
    """Metrics over the microbatch, a line a layout that is otherwise the same."""
    names = short([row["layout"] for row in table.rows])
    metrics = [column for column in table.columns if column.key not in ("layout", "micro_batch_size")]
    rows = [row | {"name": names[row["layout"]]} for row in tipped(table)]
    order = list(dict.fromkeys(row["name"] for row in rows))
    legend = {"columns": max(1, WIDTH // (room_beside(order) + 30))}
    kind: Spec = {"field": "name", "type": "nominal", "title": None, "scale": {"domain": order}, "legend": legend}
    size = {"field": "micro_batch_size", "type": "ordinal", "axis": {"labelAngle": 0}}
    panels = [
        {
            "data": {"values": rows},
            "width": WIDTH // len(metrics) - AXIS,
            "height": 220,
            "encoding": {
                "x": size | {"title": table.column("micro_batch_size").heading},
                "y": _q(metric),
                "description": {"field": "tip"},
            },
            "layer": [
                {
                    "mark": {"type": "line", "point": {"size": 60}},
                    "encoding": {
                        "color": kind,
                        "shape": kind,
                        "strokeDash": kind | {"scale": {"domain": order, "range": list(DASHES)}},
                    },
                },
                {  # lines with points have no hollow ones
                    "transform": [{"filter": f"datum['{metric.key}_how'] !== '{MEASURED}'"}],
                    "mark": {"type": "point", "filled": True, "size": 18, "color": theme.paper},
                },
            ],
        }
        for metric in metrics
    ]
    return {"hconcat": panels, "spacing": 20}


def breakdown(table: Table, theme: Theme) -> Spec:
    """Stacked seconds of a step on each pipeline rank, and beside them the communication that computation hides."""
    names = short([row["layout"] for row in table.rows])
    label = {id(row): f"{names[row['layout']]}, rank {row['rank']}" for row in table.rows}
    order = [label[id(row)] for row in table.rows]
    colours = [theme.palette[i] for i in (0, 5, 2, 3, 1)] + [theme.lines]
    rows, hidden = [], []
    for row in table.rows:
        for place, (key, title) in enumerate(STEP_PARTS.items()):
            tip = f"{label[id(row)]}: {title} {row[key]:.4g} s of {row['span_s']:.4g} s"
            rows.append({"name": label[id(row)], "part": title, "place": place, "value": row[key], "tip": tip})
        tip = f"{label[id(row)]}: overlapped communication {row[OVERLAPPED]:.4g} s"
        hidden.append({"name": label[id(row)], "value": row[OVERLAPPED], "tip": tip})
    colour: Spec = {
        "field": "part",
        "type": "nominal",
        "scale": {"domain": list(STEP_PARTS.values()), "range": colours},
        "legend": {"columns": 3},
        "title": None,
    }
    return bars(order, rows, "time in a step (s)", colour, hidden, "overlapped communication", 35, theme)


def heat(table: Table, theme: Theme) -> Spec:
    """A map a quantity: layouts by GPUs. A line marks where a node begins."""
    names = short([row["layout"] for row in table.rows])
    heats = GAUGES | {name: (what, "GB/s") for name, (what, _) in TRAFFIC.items()}
    nodes = {row["device"]: row["node"] for row in sorted(table.rows, key=lambda row: row["node"])}
    devices = list(nodes)
    begins = [device for i, device in enumerate(devices) if i == 0 or nodes[device] != nodes[devices[i - 1]]]
    cell = max(14, min(64, (WIDTH - room_beside(names.values()) - AXIS) // len(devices)))
    maps = []
    for key, (title, unit) in heats.items():
        rows = [
            {"device": row["device"], "name": names[row["layout"]], "value": float(f"{row[key]:.4g}")}
            | {"tip": f"{row['layout']}, {row['device']}: {title} {row[key]:,.1f} {unit}"}
            for row in table.rows
            if row.get(key) is not None
        ]
        if not rows:
            continue
        values = [row["value"] for row in rows]
        middle = (min(values) + max(values)) / 2
        x: Spec = {"field": "device", "type": "nominal", "sort": devices, "title": None}
        x |= {"axis": {"labelAngle": -45, "labelOverlap": False}}
        y: Spec = {"field": "name", "type": "nominal", "sort": list(names.values()), "title": None}
        layers: list[Spec] = [
            {
                "mark": "rect",
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": {
                        "field": "value",
                        "type": "quantitative",
                        "scale": {"scheme": SEQUENCE, "zero": False},
                        "title": f"mean {title} ({unit})",
                        "legend": {"orient": "right", "gradientLength": min(120, ROW * len(set(names.values())))},
                    },
                    "description": {"field": "tip"},
                },
            }
        ]
        if cell >= 30:
            layers.append(
                {
                    "mark": {"type": "text", "fontSize": 9},
                    "encoding": {
                        "x": x,
                        "y": y,
                        "text": {"field": "value", "format": ",.0f" if max(values) >= 10 else ".2f"},
                        "color": {"condition": {"test": f"datum.value > {middle}", "value": "#000"}, "value": "#fff"},
                    },
                }
            )
        if len(begins) > 1:
            layers.append(
                {
                    "data": {"values": [{"device": device} for device in begins]},
                    "mark": {"type": "rule", "color": theme.ink, "strokeWidth": 2},
                    "encoding": {"x": x | {"bandPosition": 0}},
                }
            )
        maps.append({"data": {"values": rows}, "width": {"step": cell}, "height": {"step": ROW}, "layer": layers})
    return _stacked(maps) | {"resolve": {"scale": {"color": "independent"}}}


def imbalance(table: Table, theme: Theme) -> Spec:
    """Each GPU of each trial off the mean of its trial: the hotter against the slower."""
    keys = [key for key in ("warmer_c", "clock_mhz", "power_w") if table.has(key)]
    if len(keys) < 2:
        keys *= 2
    rows = tipped(table)
    kind = {"field": "node", "type": "nominal", "title": None}
    several = len({row["node"] for row in rows}) > 1
    marks: Spec = {"color": kind, "shape": kind} if several else {}
    zero = {"type": "rule", "color": theme.faint, "strokeDash": [3, 3]}
    return {
        "data": {"values": rows},
        "width": WIDTH - AXIS,
        "height": 280,
        "layer": [
            {"mark": zero, "encoding": {"x": {"datum": 0}}},
            {"mark": zero, "encoding": {"y": {"datum": 0}}},
            {
                "mark": {"type": "point", "filled": True, "size": 50, "color": theme.palette[0]},
                "encoding": {"x": _q(table.column(keys[0])), "y": _q(table.column(keys[1]))}
                | marks
                | {"description": {"field": "tip"}},
            },
        ],
    }


def over_time(table: Table, theme: Theme) -> Spec:
    """A panel a quantity over time, a line a device; ticks below mark where optimizer steps ended."""
    quantities = list(dict.fromkeys(row["quantity"] for row in table.rows if row.get("value") is not None))
    units = dict(GAUGES.values())
    steps = [{"time_s": row["time_s"]} for row in table.rows if row.get("value") is None]
    devices = list(dict.fromkeys(row["device"] for row in table.rows if row.get("value") is not None))
    few = len(devices) <= len(theme.palette)
    x: Spec = {
        "field": "time_s",
        "type": "quantitative",
        "title": table.column("time_s").heading,
        "axis": {"grid": False},
    }
    kind: Spec = {"field": "device", "type": "nominal", "title": None}
    lines: Spec = {"detail": kind}
    if few and len(devices) > 1:
        dashes = {"domain": devices, "range": [DASHES[i % len(DASHES)] for i in range(len(devices))]}
        lines = {"color": kind | {"scale": {"domain": devices}}, "strokeDash": kind | {"scale": dashes}}
    panels = []
    for quantity in quantities:
        rows = [row for row in table.rows if row["quantity"] == quantity]
        panels.append(
            {
                "width": WIDTH - AXIS,
                "height": 130,
                "layer": [
                    {
                        "data": {"values": steps},
                        "mark": {"type": "rule", "color": theme.lines, "strokeWidth": 1},
                        "encoding": {"x": x},
                    },
                    {
                        "data": {"values": rows},
                        "mark": {"type": "line", "strokeWidth": 1.5, "color": theme.palette[0]},
                        "encoding": {
                            "x": x,
                            "y": {"field": "value", "type": "quantitative", "scale": {"zero": False}}
                            | {"title": f"{quantity} ({units[quantity]})"},
                            "description": {"field": "device"},
                        }
                        | lines,
                    },
                ],
            }
        )
    return _stacked(panels)


def memory(table: Table, theme: Theme) -> Spec:
    """Stacked GiB of the fullest GPU as predicted, and a tick where it was measured."""
    names = short([row["layout"] for row in table.rows])
    rows = [
        {"name": names[row["layout"]], "part": part, "place": place, "value": row[part]}
        | {"tip": f"{row['layout']}: {part} {row[part]:.1f} GiB, predicted"}
        for row in table.rows
        for place, part in enumerate(MEMORY_PARTS)
    ]
    measured = [
        {"name": names[row["layout"]], "value": row["measured"], "tip": f"{row['layout']}: {row['measured']:.1f} GiB"}
        for row in table.rows
    ]
    parts = {"domain": list(MEMORY_PARTS), "range": list(theme.palette)}
    colour: Spec = {"field": "part", "type": "nominal", "scale": parts, "title": "predicted:", "legend": {"columns": 4}}
    x = "memory of the fullest GPU (GiB)"
    return bars(list(names.values()), rows, x, colour, measured, "measured", 55, theme)


def bars(
    order: Sequence[str],
    rows: Sequence[Spec],
    title: str,
    colour: Spec,
    beside: Sequence[Spec],
    label: str,
    size: int,
    theme: Theme,
) -> Spec:
    """Bars by name, stacked from the parts in `rows`, and a diamond of that size for each value in `beside`, which are
    called `label`. `title` is of the values."""
    y: Spec = {"field": "name", "type": "nominal", "sort": order, "title": None}
    x: Spec = {"field": "value", "type": "quantitative", "title": title}
    tip: Spec = {"field": "tip"}
    diamond: Spec = {"datum": label, "type": "nominal", "title": None, "scale": {"range": ["diamond"]}}
    return {
        "width": WIDTH - room_beside(order),
        "height": {"step": ROW},
        "layer": [
            {
                "data": {"values": rows},
                "mark": {"type": "bar", "stroke": theme.faint, "strokeWidth": 0.5},
                "encoding": {
                    "y": y,
                    "x": x | {"stack": True},
                    "color": colour,
                    "order": {"field": "place"},
                    "description": tip,
                },
            },
            {
                "data": {"values": beside},
                "mark": {"type": "point", "color": theme.ink, "fill": theme.ink, "size": size},
                "encoding": {"y": y, "x": x, "shape": diamond, "description": tip},
            },
        ],
    }


def predictions(table: Table, theme: Theme) -> Spec:
    """Measured over predicted; on the line they are the same."""
    metrics = [key for key in ("tokens_per_s", "joules_per_token") if table.has(key)]
    rows, panels = tipped(table), []
    engines = {"field": "engine", "type": "nominal", "title": None}
    for metric in metrics:
        measured, foretold = table.column(metric), table.column(f"{metric}_predicted")
        values = [row[key] for row in rows for key in (measured.key, foretold.key) if row.get(key) is not None]
        line = [{"x": value} for value in (min(values), max(values))]
        panels.append(
            {
                "width": WIDTH // len(metrics) - AXIS,
                "height": 280,
                "layer": [
                    {
                        "data": {"values": line},
                        "mark": {"type": "line", "color": theme.faint, "strokeDash": [4, 3]},
                        "encoding": {
                            "x": {"field": "x", "type": "quantitative"},
                            "y": {"field": "x", "type": "quantitative"},
                        },
                    },
                    {
                        "data": {"values": [row for row in rows if row.get(metric) is not None]},
                        "mark": {"type": "point", "size": 45},
                        "encoding": {
                            "x": _q(foretold),
                            "y": _q(measured),
                            "color": engines,
                            "fill": engines,
                            "shape": engines,
                            "fillOpacity": hollow(f"{metric}_how"),
                            "description": {"field": "tip"},
                        },
                    },
                ],
            }
        )
    return {"hconcat": panels, "spacing": 20}


def growth(table: Table, theme: Theme) -> Spec:
    """The share of the last front's hypervolume that was reached, over GPU hours."""
    return {
        "data": {"values": tipped(table)},
        "width": WIDTH - AXIS,
        "height": 220,
        "encoding": {
            "x": _q(table.column("gpu_hours")) | {"scale": {"zero": True}},
            "y": _q(table.column("share")) | {"scale": {"domain": [0, 100]}},
        },
        "layer": [
            {"mark": {"type": "line", "interpolate": "step-after", "color": theme.palette[0]}},
            {
                "mark": {"type": "point", "filled": True, "size": 45, "color": theme.palette[0]},
                "encoding": {"description": {"field": "tip"}},
            },
        ],
    }


def failures(table: Table, theme: Theme) -> Spec:
    """How many trials came to no result, by how they ended."""
    return {
        "data": {"values": [dict(row) for row in table.rows]},
        "width": WIDTH - room_beside(row["status"] for row in table.rows),
        "height": {"step": ROW},
        "mark": {"type": "bar", "color": theme.palette[1]},
        "encoding": {
            "y": {"field": "status", "type": "nominal", "sort": "-x", "title": None},
            "x": {
                "aggregate": "count",
                "type": "quantitative",
                "title": "trials (number)",
                "axis": {"tickMinStep": 1, "format": "d"},
            },
        },
    }


def _objectives(table: Table) -> list[Column]:
    """The columns of objectives: those whose rows say how their values came about."""
    keys = {key for row in table.rows for key in row}
    return [column for column in table.columns if f"{column.key}_method" in keys]


def tipped(table: Table) -> list[Spec]:
    """Copies of the rows, each with a `tip`: its cells in words."""
    titles = [column for column in table.columns if column.key != "layout"]
    told = []
    for row in table.rows:
        cells = [
            f"{column.title} {column.text(row)} {_unit(column)}" for column in titles if row.get(column.key) is not None
        ]
        hows = {f"{column.key}_how": word_of(row.get(f"{column.key}_method")) for column in titles}
        told.append(dict(row) | hows | {"tip": f"{row.get('layout', '')}: {'; '.join(cell.strip() for cell in cells)}"})
    return told


def _unit(column: Column) -> str:
    return "" if column.unit in (None, "1") else str(column.unit)


def _q(column: Column) -> Spec:
    """A quantity along an axis, whose range need not begin at 0."""
    return {"field": column.key, "type": "quantitative", "title": column.heading, "scale": {"zero": False}}


def hollow(how: str = "how") -> Spec:
    """Marks are filled for what was measured, as the field `how` tells."""
    return {"condition": {"test": f"datum['{how}'] === '{MEASURED}'", "value": FILLED}, "value": HOLLOW}


def word_of(method: str | None) -> str:
    return WORDS.get(method or "", MEASURED)


def _stacked(panels: Sequence[Mapping[str, Any]]) -> Spec:
    return {"vconcat": list(panels), "spacing": 18}


def room_beside(names: Iterable[str]) -> int:
    """Width that labels take to the left of a figure."""
    return round(LETTER * max(map(len, names))) + 12


def _lines(text: str) -> list[str]:
    """A long word in two lines, cut where it is joined."""
    head, joint, tail = text.partition("_")
    return [head + joint, tail] if len(text) > 12 and joint else [text]


def _number_first(text: str) -> tuple[bool, float, str]:
    """Numbers by their size, then words."""
    try:
        return False, float(text), text
    except ValueError:
        return True, 0.0, text
