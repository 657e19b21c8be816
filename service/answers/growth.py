"""How the front of a search grew, trial by trial, and the GPU hours that this took."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.answers.candidates import explored
from service.metrics import Method
from service.pareto import REFERENCE, hypervolume, pareto_front, scaled
from service.record.results import SearchRecord, TrialRecord


@dataclass(frozen=True)
class Advance:
    """A trial by which the front grew: the `trials` and `gpu_hours` that the search had taken when it ended.

    `hypervolume` is the share that the front had reached of what the last one dominates.
    """

    trials: int
    gpu_hours: float
    hypervolume: float
    label: str


def advances(search: SearchRecord) -> list[Advance]:
    """How the hypervolume of the explored trials' front grew, trial by trial, in the order in which they ended.

    What was measured again is not counted: it says more about the front but moves it by noise alone.
    """
    comparison = search.goals.among(explored(search.trials))
    ranked = comparison.ranked(comparison.admitted)
    if not ranked:
        return []
    costs = scaled(comparison.costs(ranked))
    rows = {one.trial_id: row for one, row in zip(ranked, costs, strict=True)}
    reference = np.full(costs.shape[1], REFERENCE)
    whole = hypervolume(costs, reference)
    grown, front, so_far, gpu_hours, trials = [], np.empty((0, costs.shape[1])), 0.0, 0.0, 0
    over = [trial for trial in search.trials if trial.status not in ("running", "stopped")]
    alone = explores_alone(search)
    for trial in sorted(over, key=end_of):
        gpu_hours += gpu_hours_of(trial, alone)
        trials += 1
        if trial.trial_id not in rows:
            continue
        front = np.vstack([front, rows[trial.trial_id]])
        front = front[pareto_front(front)]
        if (reached := hypervolume(front, reference)) > so_far:
            so_far = reached
            grown.append(Advance(trials, gpu_hours, reached / whole, trial.label))
    return grown


def spent_gpu_hours(search: SearchRecord) -> float:
    """GPUs times hours of all trials that are over."""
    alone = explores_alone(search)
    return sum(gpu_hours_of(trial, alone) for trial in search.trials)


def explores_alone(search: SearchRecord) -> bool:
    """Whether the search explored by slices, each of which takes one GPU."""
    return any(Method.SLICE in trial.methods.values() for trial in search.trials)


def gpu_hours_of(trial: TrialRecord, alone: bool) -> float:
    """GPUs times hours of a trial that is over; `alone`: of a search that `explores_alone`."""
    if trial.started is None or trial.ended is None:
        return 0.0
    gpus = 1 if alone and trial.purpose.as_explored else trial.layout.num_gpus
    return (trial.ended - trial.started).total_seconds() / 3600 * gpus


def end_of(trial: TrialRecord) -> float:
    """When a trial ended, in seconds since 1970; 0 while it runs."""
    return trial.ended.timestamp() if trial.ended else 0.0
