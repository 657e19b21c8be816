"""Which placements of the best layout are tried, by how fast GPUs were seen to be and how long its passes took, and in
which order."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from search_spaces.layout import Layout
from search_spaces.placement import placements, plain
from search_spaces.rules import refusal
from search_spaces.schedules import Pass, PassTime
from service.answers.candidates import candidates
from service.answers.ranking import leaders
from service.problem import Problem
from service.result import Purpose, RankRecord, TrialResult, slowest_passes
from service.sampling.finalists import rounds
from trainables.status import Status

PAIRS = 6
"""Trials of each placement, and as many of the plain layout between them: fewer prove nothing (`service.paired`)."""

OFTEN = 0.5
"""Share of trials in which a GPU must have held the others up to be a slow one."""


def due(results: Sequence[TrialResult], problem: Problem, known: Mapping[str, float], workers: int) -> list[Layout]:
    """What is to be run next to hold the best layout on the first objective against its placements, in this order.

    In rounds of all of them. Which are tried is settled with the first of their trials: later ones see no other GPUs.
    None where the problem asks for none, the layout has no pipeline or leaves workers idle, or nothing is to be gained.
    `known`: by UUID, how much longer the slowest GPU takes than each, from examinations before the search.
    """
    tried = [result for result in results if result.purpose == Purpose.PLACEMENT]
    layouts = list(dict.fromkeys(result.layout for result in tried)) or _chosen(results, problem, known, workers)
    batch = rounds(layouts, PAIRS, problem.seed)
    for done in tried:
        if done.layout in batch:
            batch.remove(done.layout)
    return batch


def _chosen(results: Sequence[TrialResult], problem: Problem, known: Mapping[str, float], workers: int) -> list[Layout]:
    if not problem.placement:
        return []
    best = next(iter(leaders(problem.goals.among(candidates(results))).values()), None)
    if best is None or best.layout != plain(best.layout) or best.layout.num_gpus != workers:
        return []
    times = slow_workers(results, known, workers)
    passes = stage_passes(results, best.layout)
    others = placements(best.layout, problem.workload, times, problem.placement, passes)
    legal = [one for one in others if refusal(one, problem.workload) is None]
    return [best.layout, *legal] if legal else []


def stage_passes(results: Sequence[TrialResult], layout: Layout) -> list[PassTime]:
    """How long the passes of each stage take the slowest of its ranks: the medians of the layout's trials."""
    slowest: dict[tuple[int, Pass], list[PassTime]] = defaultdict(list)
    for one in results:
        if one.status == Status.OK and one.layout == layout and len(one.ranks) == layout.num_gpus:
            for passed in slowest_passes(one.ranks):
                slowest[passed.stage, passed.step].append(passed)
    return [
        PassTime(*kind, statistics.median(one.first_s for one in each), statistics.median(one.later_s for one in each))
        for kind, each in slowest.items()
    ]


def slow_workers(results: Sequence[TrialResult], known: Mapping[str, float], workers: int) -> dict[int, float]:
    """By worker, how many times as long as the fastest its GPU takes; those of which nothing is known are left out.

    By the trials that had all workers and no pipeline, in which all ranks have the same to do, each rank's median; of
    a search that has none, or of which the record has no more, by which GPU mostly held others up; else by
    examinations.
    """
    all_had = [one for one in results if one.status == Status.OK and one.layout.num_gpus == workers]
    seen = [
        times
        for one in all_had
        if one.layout.pipeline_parallel_size == 1 and len(times := _slower(one.ranks)) == workers
    ]
    if seen:
        return {worker: statistics.median(times[worker] for times in seen) for worker in seen[0]}
    costs: dict[int, list[float]] = {}
    comparable = [one for one in all_had if workers > one.layout.pipeline_parallel_size]
    for one in comparable:
        if one.straggler is not None:
            order = one.layout.rank_order or range(workers)
            costs.setdefault(order[one.straggler.rank], []).append(one.straggler.cost)
    held_up = {
        worker: 1 / (1 - statistics.median(each))
        for worker, each in costs.items()
        if len(each) > OFTEN * len(comparable)
    }
    if held_up:
        return held_up
    device_of = {rank.worker: rank.device for one in all_had for rank in one.ranks}
    attained = {worker: known[device] for worker, device in device_of.items() if device is not None and device in known}
    return {worker: max(attained.values()) / each for worker, each in attained.items()}


def _slower(ranks: Sequence[RankRecord]) -> dict[int, float]:
    """By worker, how many times as long as the fastest of these ranks, which have the same work, it takes for that."""
    times = {rank.worker: rank.work_s for rank in ranks if rank.work_s > 0}
    return {worker: work_s / min(times.values()) for worker, work_s in times.items()}
