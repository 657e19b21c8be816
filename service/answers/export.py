"""A layout with all that is needed to launch it."""

from __future__ import annotations

from typing import Any

from search_spaces.layout import Layout
from service.answers.candidates import Candidate
from service.answers.exports import megatron_lm
from service.record.results import SearchRecord
from trainables.engines.deepspeed import configuration


def export(search: SearchRecord, candidate: Candidate) -> dict[str, Any]:
    """All that is needed to launch the layout and to judge it, JSON-safe."""
    return {
        "search_id": search.id,
        "search": search.name,
        "trial_id": candidate.trial_id,
        "purpose": candidate.purpose,
        "trials": [trial.trial_id for trial in candidate.trials],
        "workload": search.params,
        "config": candidate.layout.to_dict(),
        **_launch(candidate.layout),
        "metrics": candidate.metrics,
        "intervals": candidate.intervals,
        "methods": candidate.methods,
    }


def _launch(layout: Layout) -> dict[str, Any]:
    """The layout as its framework takes it, and what of it the framework has no word for."""
    if layout.engine == "deepspeed":
        return {
            "deepspeed": configuration.configuration(layout),
            "not_expressible": configuration.not_expressible(layout),
        }
    return {"megatron_lm": megatron_lm.arguments(layout), "not_expressible": megatron_lm.not_expressible(layout)}
