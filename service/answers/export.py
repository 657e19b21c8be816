"""A layout with all that is needed to launch it."""

from __future__ import annotations

from typing import Any

from search_spaces.layout import Layout
from service.answers.candidates import Candidate
from service.answers.commands import FORMAT
from service.answers.exports import megatron_lm
from service.record.results import SearchRecord
from trainables.engines.deepspeed import configuration as deepspeed

BESIDE = {
    "deepspeed": ("deepspeed", deepspeed.configuration, deepspeed.not_expressible),
    "megatron": ("megatron_lm", megatron_lm.arguments, megatron_lm.not_expressible),
}
"""Engine -> what an answer holds of its layouts beside their axes: a key, its value, and what that does not say. All
other formats of `service.answers.exports` are for who asks."""


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
        **_beside(candidate.layout),
        "metrics": candidate.metrics,
        "intervals": candidate.intervals,
        "methods": {metric: method.value for metric, method in candidate.methods.items()},
    }


def _beside(layout: Layout) -> dict[str, Any]:
    if layout.engine not in BESIDE:
        return {"not_expressible": {"engine": f"{layout.engine} is a program of its own: see --format {FORMAT}"}}
    key, settings, not_expressible = BESIDE[layout.engine]
    return {key: settings(layout), "not_expressible": not_expressible(layout)}
