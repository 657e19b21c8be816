"""Searches as they are read from the record, made by hand, and problems to record."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from search_spaces.layout import Layout
from service.metrics import DIRECTIONS, Direction, Method
from service.problem import Problem
from service.record.results import SearchRecord, TrialRecord
from service.spec import make_problem
from service.step import Wish

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


class Room:
    """Lends as many workers of one gang as it has left; one that is alone waits for, and keeps away, all others."""

    def __init__(self, workers: int = 10**6) -> None:
        self.workers, self.lent = workers, dict[str, Wish]()

    def free(self) -> int:
        alone = any(wish.alone for wish in self.lent.values())
        return 0 if alone else self.workers - sum(wish.size for wish in self.lent.values())

    def lend(self, trial_id: str, wishes: Sequence[Wish]) -> int | None:
        for number, wish in enumerate(wishes):
            if wish.size <= self.free() and not (wish.alone and self.lent):
                self.lent[trial_id] = wish
                return number
        return None

    def release(self, trial_id: str) -> None:
        del self.lent[trial_id]


class Plenty:
    """Lends whatever is asked for."""

    def free(self) -> int | None:
        return 10**6

    def lend(self, trial_id: str, wishes: Sequence[Wish]) -> int | None:
        return 0


PLENTY = Plenty()


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
