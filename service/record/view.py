"""How MLflow's own pages show a search: its trials alone, sorted by the first objective, with what was searched as
columns, and charts of the objectives.

MLflow keeps such a view in a tag of the experiment, from where a link and the list of saved views take it (MLflow 3.17,
`mlflow.sharedViewState.KEY`: an envelope with a name, two times in ms and the state, deflated).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from service.metrics import Direction
from service.record import store

SHARED = "mlflow.sharedViewState."
"""How the tag of a view begins; its key follows."""

_COLUMNS = {"objectives": 2, "axes": 1, "memory": 2}
"""Charts beside each other, by section."""

_CHOSEN, _NAME = "0", "attributes.`Run Name`"
"""MLflow's names for the first two columns, of boxes to tick and of runs' names."""

_FRAME, _CHARACTER = 120, 6.5
"""Pixels of what stands beside a run's name, its purpose among it, and of a character of it."""

MEMORY = "peak_memory_gib"


def link(pages: str, experiment: str, search_id: str | None = None) -> str:
    """Where MLflow's pages, at such a URL, show the experiment's runs, or a search in its view; without a URL, from one
    of these pages."""
    home = f"{pages.rstrip('/')}/" if pages else ""
    shared = f"&viewStateShareKey={search_id}" if search_id else ""
    return f"{home}#/experiments/{experiment}/runs?workflowType=machine_learning{shared}"


def tag(
    search_id: str,
    name: str,
    objectives: Mapping[str, Direction],
    axes: Sequence[str],
    memory: bool,
    longest: int,
    now_ms: int,
) -> tuple[str, str]:
    """Key and value of the tag with the view of a search of that name.

    `axes`: those on which its layouts differ; `memory`: whether its trials have a peak of memory; `longest`: characters
    of the longest label of its layouts.
    """
    state = json.dumps(_state(search_id, objectives, axes, memory, longest), separators=(",", ":"))
    packed = "deflate;" + base64.b64encode(zlib.compress(state.encode(), 9)).decode()
    envelope = {"name": f"{name} ({search_id})", "createdAt": now_ms, "updatedAt": now_ms, "state": packed}
    return SHARED + search_id, json.dumps(envelope)


def _state(
    search_id: str, objectives: Mapping[str, Direction], axes: Sequence[str], memory: bool, longest: int
) -> dict[str, Any]:
    first, way = next(iter(objectives.items()))
    metrics = list(dict.fromkeys([*objectives, *([MEMORY] if memory else [])]))
    sections = {"axes": "Axes and objectives"}
    if len(objectives) > 1:
        sections = {"objectives": "Objectives"} | sections
    if memory:
        sections["memory"] = "Memory"
    columns = [
        *(_column("metrics", metric) for metric in metrics),
        *(_column("tags", key) for key in (store.STATUS, store.PURPOSE)),
        *(_column("params", axis) for axis in axes),
    ]
    return {
        "searchFilter": store.having({store.SEARCH_ID: search_id, store.ROLE: store.TRIAL}, {}),
        "orderByKey": _column("metrics", first),
        "orderByAsc": way is Direction.MINIMIZE,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": columns,
        "columnOrder": [_CHOSEN, _NAME, *columns],
        "columnWidths": {_CHOSEN: 73, _NAME: _FRAME + _CHARACTER * longest, **dict.fromkeys(columns, 130)},
        "runsHiddenMode": "SHOW_ALL",
        "runListHidden": False,
        "hideEmptyCharts": True,
        "isAccordionReordered": True,
        "compareRunSections": [_section(uuid, title) for uuid, title in sections.items()]
        # What MLflow adds by itself, a chart a metric, stays shut.
        + [_section(f"own {title}", title, False) for title in ("step", *store.GROUPS, store.REST)]
        + [_section("own metrics", "Model metrics", False)],
        "compareRunCharts": [
            *(_scatter(first, metric, "objectives") for metric in list(objectives)[1:]),
            _parallel(axes, list(objectives), "axes"),
            *([_scatter(MEMORY, first, "memory"), _bar(MEMORY, "memory")] if memory else []),
        ],
    }


def _column(kind: str, key: str) -> str:
    return f"{kind}.`{key}`"


def _section(uuid: str, title: str, shown: bool = True) -> dict[str, Any]:
    placed = {"isReordered": True, "deleted": False, "isGenerated": False}
    return {"uuid": uuid, "name": title, "display": shown, "columns": _COLUMNS.get(uuid, 3), "cardHeight": 400} | placed


def _chart(kind: str, name: str, section: str, title: str) -> dict[str, Any]:
    return {"type": kind, "uuid": f"{section} {name}", "metricSectionId": section, "displayName": title} | {
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": 1000,
    }


def _scatter(across: str, up: str, section: str) -> dict[str, Any]:
    axes = {name: {"key": metric, "type": "METRIC"} for name, metric in (("xaxis", across), ("yaxis", up))}
    return _chart("SCATTER", f"{across} {up}", section, f"{up} by {across}") | axes


def _parallel(axes: Sequence[str], metrics: Sequence[str], section: str) -> dict[str, Any]:
    chosen = {"selectedParams": list(axes), "selectedMetrics": list(metrics), "showAllRuns": True}
    return _chart("PARALLEL", "all", section, "Axes and objectives") | chosen


def _bar(metric: str, section: str) -> dict[str, Any]:
    return _chart("BAR", metric, section, metric) | {"metricKey": metric}
