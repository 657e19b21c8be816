"""A layout with all that is needed to launch it."""

from __future__ import annotations

from typing import Any

from search_spaces.config import TrialConfig
from service.answers.candidates import Candidate
from service.record.results import SearchRecord
from trainables import deepspeed_config, megatron_args


def export(search: SearchRecord, candidate: Candidate) -> dict[str, Any]:
    """All that is needed to launch the layout and to judge it, JSON-safe."""
    return {
        "search_id": search.id,
        "search": search.name,
        "trial_id": candidate.trial_id,
        "purpose": candidate.purpose,
        "trials": [trial.trial_id for trial in candidate.trials],
        "workload": search.params,
        "config": candidate.config,
        **_launch(TrialConfig.from_dict(candidate.config)),
        "metrics": candidate.metrics,
        "intervals": candidate.intervals,
        "methods": candidate.methods,
    }


def _launch(config: TrialConfig) -> dict[str, Any]:
    """The layout as its framework takes it, and what of it the framework has no word for."""
    if config.engine == "deepspeed":
        return {
            "deepspeed": deepspeed_config.configuration(config),
            "not_expressible": deepspeed_config.not_expressible(config),
        }
    return {"megatron_lm": megatron_args.arguments(config), "not_expressible": megatron_args.not_expressible(config)}
