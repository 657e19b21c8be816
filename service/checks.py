"""What is wrong with a problem whose spec is well-formed: nobody can mean it, or the machines cannot do it.

Held against what somebody asks for, in `service.client`, and not against a record, whose search was run as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from search_spaces.coefficients import data_sheet
from search_spaces.trainer import Trainer
from service.errors import InputError
from service.goals import Limit
from service.metrics import Direction, Needs, known
from service.problem import Cluster, Problem
from trainables.bounds import refusal
from trainables.data import DataError, MissingDataError, open_tokens
from trainables.logs import LAST_RANK_LOGS
from trainables.objects import is_uri

WHAT_DATA = "the path of tokens, or synthetic for made-up ones"

EVENLY = (
    "model.num_experts: all experts get equally many tokens in trials; "
    "leave time and memory for what your router does not balance"
)
"""Why: docs/design.md."""

MOST_TRIALS = 1_000_000
MOST_REPEATS = 1_000
MOST_TOKENS = 10**12
"""Of one optimizer step: the largest batches that models were ever trained with are below 10^9."""
MOST_CPUS = 1_000
"""Of one worker."""
LONGEST_S = 365 * 24 * 3600
WORKERS_PER_CPU = 64
"""Worker processes on a core of this machine, beyond which it would not come up."""


def check(problem: Problem, source: str) -> Problem:
    """The problem, or `InputError` with the first thing in it that nobody can mean; `source` is where it is from."""
    for fault in _faults(problem):
        raise InputError(f"{source}: {fault}")
    return problem


def notices(problem: Problem) -> list[str]:
    """What of the problem no trial will have: of each objective and constraint, and of a mixture."""
    lacking = _lacking(problem)
    named = [(f"objectives.{metric}", metric) for metric in problem.goals.objectives]
    named += [(f"constraints: {limit.text!r}", limit.metric) for limit in problem.goals.limits]
    lines = [f"{field}: {lacking[metric]}" for field, metric in named if metric in lacking]
    return [*lines, *routing(problem)]


def routing(problem: Problem) -> list[str]:
    """What routers of a mixture do not do in trials."""
    return [EVENLY] if problem.trainer is None and problem.workload.shape.num_experts else []


def check_named(problem: Problem) -> None:
    """Raise `InputError` if there is nothing to train on, which a plan does without."""
    if problem.trainer is None and problem.data is None:
        raise InputError(f"data: this field is required to train: {WHAT_DATA}")


def check_data(problem: Problem, places: Sequence[str] | None = None) -> None:
    """Raise `InputError` unless the data lie below one of `places`, if there is such a bound, and are tokens that the
    model can read, or a trainer's own affair."""
    if (refused := refusal(problem.data, places)) is not None:
        raise InputError(refused)
    check_named(problem)
    if problem.trainer is not None or problem.data is None:
        return
    try:
        open_tokens(problem.data, problem.workload.shape.vocab).sequence(0, problem.sequence_length)
    except DataError as error:
        raise InputError(f"data: {error}") from None


def data_from_afar(problem: Problem) -> list[str]:
    """As `check_data`, but data that are not on this machine are a notice: they are read where trials run."""
    if problem.trainer is not None:
        return []
    if problem.data is None:
        return [f"data: none are named, which a search needs: {WHAT_DATA}"]
    if is_uri(problem.data):
        return [f"data: {problem.data} is looked at by a search, which copies it to every node"]
    try:
        open_tokens(problem.data, problem.workload.shape.vocab)
    except MissingDataError as error:
        return [f"data: {error}; a search needs them on every node"]
    except DataError:
        pass
    check_data(problem)
    return []


def check_machine(cluster: Cluster) -> None:
    """Raise `InputError` if the search is to run on this machine alone and that has not what `cluster` needs.

    Looks, and starts nothing. A Ray that is there is asked by `service.cluster.check_cluster`.
    """
    ray = sys.modules.get("ray")
    if os.environ.get("RAY_ADDRESS") or (ray is not None and ray.is_initialized()):
        return
    _check_trace()
    workers = f"cluster: {cluster.nodes} x {cluster.gpus_per_node} {cluster.accelerator} workers"
    elsewhere = "set RAY_ADDRESS to run on a Ray cluster"
    if (most := workers_here(cluster)) == cluster.size:
        return
    if cluster.device.platform == "cpu":
        raise InputError(f"{workers} are too many for this machine's {most} CPUs; {elsewhere}")
    raise InputError(f"{workers} need {cluster.size} GPU, NVML and AMD SMI show {most} here; {elsewhere}")


def workers_here(cluster: Cluster) -> int:
    """How many workers of `cluster` this machine can have: all of them, or one on each GPU or each CPU that it has."""
    if cluster.device.platform == "cpu":
        cpus = os.cpu_count() or 1
        return cluster.size if cluster.size <= WORKERS_PER_CPU * cpus else cpus
    from telemetry.devices import count_gpus

    return min(cluster.size, count_gpus())


def _check_trace() -> None:
    """Raise `InputError` if telemetry is to be played back from a trace that cannot be."""
    from telemetry.devices import replay

    if trace := os.environ.get(replay.TRACE):
        if not Path(trace).is_file():
            raise InputError(f"{replay.TRACE}: there is no file {trace}")
        try:
            replay.load_tracks(Path(trace), loop=os.environ.get(replay.LOOP) == "1")
        except (OSError, ValueError) as error:
            raise InputError(f"{replay.TRACE}: {trace} cannot be played: {str(error).splitlines()[0]}") from None


def _faults(problem: Problem) -> Iterator[str]:
    yield from _sizes(problem)
    yield from _machines(problem)
    yield from _times(problem)
    yield from _contradictions(problem)
    for metric, direction in problem.goals.objectives.items():
        if known(metric).direction not in (None, direction):
            better = "less" if direction is Direction.MAXIMIZE else "more"
            yield f"objectives.{metric}: {direction} would look for the worst: {better} of it is better"
    if problem.measurement.explore != "gang":
        yield from unsliced(problem)
    lacking = _lacking(problem)
    if all(metric in lacking for metric in problem.goals.objectives):
        yield "; ".join(f"objectives.{metric}: {lacking[metric]}" for metric in problem.goals.objectives)


def _sizes(problem: Problem) -> Iterator[str]:
    if problem.tokens_per_step > MOST_TOKENS:
        yield (
            f"global_batch_size: {problem.global_batch_size:,} sequences of {problem.sequence_length:,} tokens are "
            f"more than {MOST_TOKENS:,} tokens in a step"
        )
    for field, value, most in (
        ("budget.trials", problem.budget.trials, MOST_TRIALS),
        ("finalists.repeats", problem.finalists.repeats, MOST_REPEATS),
        ("cluster.cpus_per_worker", problem.cluster.cpus_per_worker, MOST_CPUS),
    ):
        if value > most:
            yield f"{field}: must be at most {most:,} (given: {value:,})"


def _machines(problem: Problem) -> Iterator[str]:
    """What is stated of the machines and cannot be."""
    cluster, sheet = problem.cluster, data_sheet(problem.cluster.accelerator)
    limit = cluster.power_limit_w
    if limit is not None and sheet is not None and limit <= sheet.idle_w:
        yield (
            f"cluster.power_limit_w: {limit:g} W are no more than what a GPU of {cluster.accelerator} draws while it "
            f"waits for others, {sheet.idle_w:g} W"
        )


def _times(problem: Problem) -> Iterator[str]:
    measurement, budget, finalists = problem.measurement, problem.budget, problem.finalists
    window_s, deadline_s = measurement.window_s, measurement.deadline_s
    for field, seconds in (
        ("measurement.window_s", window_s),
        ("measurement.warmup_max_s", measurement.warmup_max_s),
        ("measurement.deadline_s", deadline_s),
        ("finalists.window_s", finalists.window_s),
        ("budget.wall_time_s", budget.wall_time_s or 0.0),
    ):
        if seconds > LONGEST_S:
            yield f"{field}: {seconds:g} s are more than a year"
    if window_s >= deadline_s:
        yield f"measurement.window_s: {window_s:g} s are not over by measurement.deadline_s, {deadline_s:g} s"
    if finalists.count and finalists.window_s >= deadline_s:
        yield f"finalists.window_s: {finalists.window_s:g} s are not over by measurement.deadline_s, {deadline_s:g} s"
    if budget.wall_time_s is not None and window_s > budget.wall_time_s:
        yield f"budget.wall_time_s: {budget.wall_time_s:g} s are less than a window, measurement.window_s {window_s:g}"
    if budget.gpu_hours is not None:
        gpus = min(layout.num_gpus for layout in problem.legal.layouts) if measurement.explore == "gang" else 1
        if gpus * window_s / 3600 > budget.gpu_hours:
            yield (
                f"budget.gpu_hours: {budget.gpu_hours:g} is less than a window of {gpus} GPUs, measurement.window_s "
                f"{window_s:g}"
            )


def unsliced(problem: Problem) -> Iterator[str]:
    """Why layouts cannot be explored by slices."""
    name, both = problem.cluster.accelerator, {"link_bytes_per_s", "network_bytes_per_s"}
    if data_sheet(name) is None and not both <= set(problem.cluster.stated):
        yield (
            f"measurement.explore: slices need to know how fast the network is, and nothing is known of accelerator "
            f"{name!r}: state cluster.network.gpu_gb_per_s and node_gb_per_s"
        )
    if True in problem.axes["async_tensor_parallel"]:
        yield "space.async_tensor_parallel: a slice is alone, and has no other GPU's memory to reach: leave true out"
    if problem.trainer is not None:
        yield from _unsliced_trainer(problem, problem.trainer)


def _unsliced_trainer(problem: Problem, trainer: Trainer) -> Iterator[str]:
    """Of whose program one rank alone stands for all, so that all of them must do the same."""
    for axis, why in (
        ("pipeline_parallel_size", "a program does not tell what each of its stages does, and when"),
        ("expert_parallel_size", "how many tokens come to an expert only all ranks together know"),
    ):
        if problem.axes[axis] != [1]:
            yield f"space.{axis}: slices of the trainer {trainer.name} take 1 alone: {why}"
    if trainer.steps in LAST_RANK_LOGS:
        yield (
            f"measurement.explore: slices run the first rank, and {trainer.steps} logs its steps on the last: "
            "trainer.steps: hook, or gang"
        )


def _contradictions(problem: Problem) -> Iterator[str]:
    """Constraints that no layout can keep."""
    limits = problem.goals.limits
    for limit in limits:
        low, high = known(limit.metric).range
        if limit.comparison == "<=" and limit.bound < low:
            yield f"constraints: {limit.text!r} can never hold: {limit.metric} is never below {low:g}"
        if limit.comparison == ">=" and limit.bound > high:
            yield f"constraints: {limit.text!r} can never hold: {limit.metric} is never above {high:g}"
    for least in limits:
        for most in limits:
            if _excludes(least, most):
                yield f"constraints: {least.text!r} and {most.text!r} cannot both hold"


def check_power_limits(problem: Problem, allowed: bool) -> None:
    """Raise `InputError` for a problem that sets power limits of GPUs, unless somebody who may do so allowed it."""
    if problem.sets_power_limits and not allowed:
        raise InputError("space.power_limit_w: it sets the power limits of GPUs, which takes --allow-power-limits")


def _excludes(least: Limit, most: Limit) -> bool:
    return (
        least.metric == most.metric and (least.comparison, most.comparison) == (">=", "<=") and least.bound > most.bound
    )


def _lacking(problem: Problem) -> dict[str, str]:
    """Metric -> why no trial will have it, of those that the goals name."""
    from telemetry.devices.cpu import counts_throttling

    on_cpu = problem.cluster.device.platform == "cpu"
    reasons = {
        Needs.GPU: "only GPUs have such a figure" if on_cpu else None,
        Needs.PEAK: _no_mfu(problem),
        Needs.THROTTLING: "the kernel of this machine does not count how long its CPUs are slowed for heat"
        if on_cpu and not counts_throttling()
        else None,
    }
    metrics = [*problem.goals.objectives, *(limit.metric for limit in problem.goals.limits)]
    needed = {metric: needs for metric in metrics if (needs := known(metric).needs) is not None}
    return {metric: f"no trial will have it: {why}" for metric, needs in needed.items() if (why := reasons[needs])}


def _no_mfu(problem: Problem) -> str | None:
    """Why there is no share of the peak FLOP/s."""
    if problem.shape is None:
        return "it takes a model, of which nothing is known beside a trainer"
    if problem.cluster.device.peak_flops is None:
        return f"the peak FLOP/s of accelerator {problem.cluster.accelerator!r} are not known"
    return None
