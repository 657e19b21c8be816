"""A layout with all that is needed to launch it."""

from __future__ import annotations

from typing import Any

from search_spaces.layout import Layout
from service.answers.candidates import Candidate
from service.answers.exports import exports_of
from service.record.results import SearchRecord


def export(search: SearchRecord, candidate: Candidate) -> dict[str, Any]:
    """All that is needed to launch the layout and to judge it, safe for JSON and YAML."""
    return {
        "search_id": search.id,
        "search": search.name,
        "trial_id": candidate.trial_id,
        "purpose": candidate.purpose.value,
        "trials": [trial.trial_id for trial in candidate.trials],
        "workload": search.params,
        "config": candidate.layout.to_dict(),
        **_launch(candidate.layout),
        "metrics": candidate.metrics,
        "intervals": candidate.intervals,
        "methods": {metric: method.value for metric, method in candidate.methods.items()},
    }


def _launch(layout: Layout) -> dict[str, Any]:
    """The layout as each framework takes it that can launch it, and what of it they have no word for."""
    settings: dict[str, Any] = {}
    otherwise: dict[str, list[str]] = {}
    for export in exports_of(layout):
        settings[export.key] = export.settings(layout)
        for field, how in export.not_expressible(layout).items():
            otherwise.setdefault(field, []).append(how)
    if not settings:
        otherwise["engine"] = [f"layouts of the engine {layout.engine} have no export"]
    return {**settings, "not_expressible": {field: "; ".join(ways) for field, ways in otherwise.items()}}
