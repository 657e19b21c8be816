"""Two smaller runs of a layout, and what they say of the trial that they stand for.

Smaller by layers (depth proxies): a step's time and energy, and a GPU's memory, are a constant (embedding, head, loss)
and a share for every layer. Or by microbatches of a step (short trials): time and energy are a constant (filling the
pipeline, reducing gradients, the optimizer) and a share for every microbatch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from service.metrics import Method, Part, made_of
from service.problem import Problem
from service.result import Proxy, TrialResult
from service.trials.figures import of_step
from trainables.status import Status

OVER_DEPTH = made_of(Part.TIME, Part.ENERGY, Part.MEMORY)
OVER_BATCH = made_of(Part.TIME, Part.ENERGY, Part.POWER)
"""The metrics that follow from two smaller runs, over layers and over microbatches."""

SPENT = made_of(Part.HELD)
"""What a trial took of its gang: the sum over its runs."""


class NoLine(Exception):
    """The larger run took no more than the smaller, so that no line leads on."""


def line(places: tuple[int, int], values: tuple[float, float], place: int) -> float:
    """The value at `place` of the straight line through `values` at `places`."""
    (near, far), (low, high) = places, values
    return high + (high - low) * (place - far) / (far - near)


@dataclass(frozen=True)
class Growth:
    """The way from two runs, the smaller first, to what they stand for: `place`, where they are at `places`."""

    places: tuple[int, int]
    place: int
    unit: str

    def follow(self, amount: str, values: Sequence[float | None]) -> float | None:
        """An amount of a step at `place`; None if a run lacks it. Raises `NoLine`."""
        low, high = values
        if low is None or high is None:
            return None
        if high <= low:
            raise NoLine(
                f"{amount} of a step is {high:.4g} with {self.places[1]} {self.unit}, {low:.4g} with {self.places[0]}: "
                f"no line leads to {self.place}"
            )
        return line(self.places, (low, high), self.place)

    def error(self, samples: Sequence[Sequence[float]]) -> float | None:
        """Standard error of the mean at `place`, from that of each run's samples; None if a run has a single one."""
        if min(map(len, samples)) < 2:
            return None
        near, far = self.places
        weight = (self.place - near) / (far - near)
        errors = [statistics.stdev(of_run) / math.sqrt(len(of_run)) for of_run in samples]
        return math.hypot((1 - weight) * errors[0], weight * errors[1])


def over_depth(trial_id: str, problem: Problem, shallow: Proxy, deep: Proxy) -> TrialResult:
    """The result of the whole model of `problem` from two runs that ended well; `invalid` if no line leads there.

    What is not in `OVER_DEPTH` or `SPENT` is the deeper run's.
    """
    runs, layers = (shallow, deep), problem.workload.shape.layers
    growth = Growth((shallow.layers, deep.layers), layers, "layers")
    problems = [f"at {run.layers} layers: {run.result.cause}" for run in runs if run.result.cause]
    try:
        metrics = followed(problem, growth, runs)
    except NoLine as error:
        return TrialResult(trial_id, deep.result.layout, Status.INVALID, str(error), proxies=runs)
    metrics["peak_memory_gib"] = peak_memory(layers, shallow, deep)
    spent: dict[str, float | None] = {name: sum(run.result.metrics.get(name) or 0.0 for run in runs) for name in SPENT}
    return replace(
        deep.result,
        trial_id=trial_id,
        cause="; ".join(problems) or None,
        metrics=deep.result.metrics | metrics | spent,
        methods=deep.result.methods | _methods(Method.EXTRAPOLATED, metrics, runs),
        proxies=runs,
    )


def over_batch(problem: Problem, result: TrialResult, few: Proxy, many: Proxy) -> TrialResult:
    """The result of steps of the whole global batch from steps of two smaller ones; `invalid` if no line leads there.

    `result` is all that is known of the trial beside that; what of its figures is not in `OVER_BATCH` is of steps of
    `many` microbatches.
    """
    runs = (few, many)
    batches = few.result.layout.global_batch_size, many.result.layout.global_batch_size
    growth = Growth(batches, result.layout.global_batch_size, "sequences")
    try:
        metrics = followed(problem, growth, runs)
    except NoLine as error:
        return TrialResult(result.trial_id, result.layout, Status.INVALID, str(error), proxies=runs)
    rate, energy = metrics["tokens_per_s"], metrics["joules_per_token"]
    assert rate is not None, "a line that leads on has a speed"
    metrics["mean_power_w"] = energy and energy * rate
    error_s = growth.error([run.result.step_times_s for run in runs])
    uncertain = error_s if error_s is None else error_s * rate / problem.tokens_per_step
    return replace(
        result,
        metrics=result.metrics | metrics | {"extrapolation_error": uncertain},
        methods=result.methods | _methods(Method.SHORT, metrics, runs),
        proxies=runs,
    )


def followed(problem: Problem, growth: Growth, runs: tuple[Proxy, Proxy]) -> dict[str, float | None]:
    """What is made of a step's time and energy, of the problem's own model and batch. Raises `NoLine`.

    None where a run lacks what it takes.
    """
    metrics = [run.result.metrics for run in runs]
    tokens = [run.result.layout.global_batch_size * problem.sequence_length for run in runs]
    rates = [of_run["tokens_per_s"] for of_run in metrics]
    seconds = growth.follow("mean time", [rate and count / rate for count, rate in zip(tokens, rates, strict=True)])
    assert seconds is not None, "every run that ended well has a speed"
    joules = growth.follow("energy", [of_run.get("energy_per_step_j") for of_run in metrics])
    return of_step(
        problem,
        runs[0].result.layout.num_gpus,
        problem.tokens_per_step,
        mean_s=seconds,
        median_s=growth.follow("median time", [of_run["step_time_s"] for of_run in metrics]),
        energy_j=joules,
    )


def peak_memory(layers: int, shallow: Proxy, deep: Proxy) -> float | None:
    """GiB of the fullest GPU with `layers` layers: each rank has a line of its own, and another may lead at the end."""
    lines = [
        line((shallow.layers, deep.layers), (before.peak_memory_gib, after.peak_memory_gib), layers)
        for before, after in zip(shallow.result.ranks, deep.result.ranks, strict=True)
        if before.peak_memory_gib is not None and after.peak_memory_gib is not None
    ]
    return max(lines, default=None)


def _methods(method: Method, metrics: Mapping[str, float | None], runs: Sequence[Proxy]) -> dict[str, Method]:
    """`method` for the metrics that are there, but what was estimated stays so: it says more against a figure."""
    guessed = {name for run in runs for name, how in run.result.methods.items() if how == Method.ESTIMATED}
    present = [name for name, value in metrics.items() if value is not None]
    return {name: Method.ESTIMATED if name in guessed else method for name in present}
