"""Searches as they are read from the record, made by hand, and problems to record."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from search_spaces.layout import Layout
from service.metrics import DIRECTIONS, Direction, Method
from service.problem import Problem
from service.record.results import SearchRecord, TrialRecord
from service.spec import make_problem

CONFIG = Layout("deepspeed", 2, 16, micro_batch_size=4, zero_stage=2, recompute="full", precision="fp32")
STARTED = datetime(2026, 1, 1, tzinfo=UTC)
DEFAULT = {name: DIRECTIONS[name] for name in ("tokens_per_s", "joules_per_token", "throttle_ratio")}


def trial(trial_id: str, energy: str = "counter", status: str = "ok", **metrics: float) -> TrialRecord:
    methods = {"joules_per_token": Method(energy)} if "joules_per_token" in metrics else {}
    return TrialRecord(trial_id, CONFIG.label, CONFIG, status, None, metrics, methods, f"run-{trial_id}")


def search(
    *trials: TrialRecord, objectives: dict[str, Direction] | None = None, constraints: tuple[str, ...] = ()
) -> SearchRecord:
    facts = {"model": "tiny-llama", "accelerator": "cpu", "data": "synthetic"}
    objectives = DEFAULT if objectives is None else objectives
    return SearchRecord("s1", "tiny", "finished", STARTED, objectives, constraints, facts, {}, (), "run", trials)


def problem(**changes: Any) -> Problem:
    """Of a tiny model on two CPU workers, with `changes` to the spec's fields."""
    fields = {
        "name": "tiny",
        "model": "tiny-llama",
        "data": "synthetic",
        "sequence_length": 64,
        "global_batch_size": 16,
        "cluster": {"gpus_per_node": 2, "accelerator": "cpu"},
    }
    return make_problem(fields | changes)
