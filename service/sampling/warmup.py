"""What a search knows before its first trial: predictions, what fits, and the layouts to begin with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice

from search_spaces.coefficients import Coefficients
from search_spaces.cost import predicted_metrics
from search_spaces.layout import Layout
from search_spaces.memory import MemoryModel
from search_spaces.space import varying
from search_spaces.workload import Workload
from service.answers.ranking import pareto
from service.metrics import Direction
from service.problem import Problem
from service.record.results import SearchRecord
from service.sampling.study import SearchStudy

WINNERS, PREDICTED = 4, 4
"""How many layouts of earlier fronts a search begins with, at most, and how many that are predicted to be good."""

APART = 2
"""Axes that layouts to begin with differ in, where there are enough of them."""


def open_study(
    problem: Problem,
    search_id: str,
    storage: str,
    calibration: Coefficients | None,
    earlier: Iterable[SearchRecord] = (),
) -> SearchStudy:
    """The study of a search, new or as `storage`, an Optuna URL, has it; with all that is known ahead.

    `earlier` are searches of the same model and hardware; no more of them are read than it takes. The samplers `random`
    and `exhaustive` are left without predictions and winners; `auto` weighs predictions itself, others begin with the
    best.
    """
    layouts, memory = problem.legal.layouts, MemoryModel(problem.workload)
    predicted: dict[Layout, dict[str, float]] = {}
    first: list[Layout] = []
    if problem.sampler not in ("random", "exhaustive"):
        if calibration is not None and problem.shape is not None:
            predicted = predictions(layouts, problem.workload, calibration)
        leading = {} if problem.sampler == "auto" else predicted
        first = first_points(winners(earlier, problem), leading, problem.goals.objectives, memory)
    if problem.baseline_layout is not None:
        first.insert(0, problem.baseline_layout)
    return SearchStudy(
        search_id,
        layouts,
        problem.goals,
        problem.sampler,
        problem.seed,
        storage,
        first=first,
        memory=memory,
        predicted=predicted,
    )


def predictions(layouts: Iterable[Layout], work: Workload, calibration: Coefficients) -> dict[Layout, dict[str, float]]:
    """Metrics, by their name, that the cost model predicts of each layout."""
    return {layout: predicted_metrics(layout, work, calibration) for layout in layouts}


def winners(searches: Iterable[SearchRecord], problem: Problem) -> Iterator[Layout]:
    """Layouts on the fronts of `searches`, in their order, with the batch of `problem`, in which they must be legal."""
    left = set(problem.legal.layouts)
    for search in searches:
        for candidate in pareto(search):
            layout = replace(candidate.layout, global_batch_size=problem.global_batch_size)
            if layout in left:
                left.remove(layout)
                yield layout


def first_points(
    winners: Iterable[Layout],
    predicted: Mapping[Layout, Mapping[str, float]],
    objectives: Mapping[str, Direction],
    memory: MemoryModel,
) -> list[Layout]:
    """Layouts to begin with: winners, then those predicted to be the best on each objective in turn.

    The latter differ from all before them in `APART` axes, as far as there are such. None is on the edge of memory.
    """
    chosen = list(islice((layout for layout in winners if _is_safe(layout, memory)), WINNERS))
    orders = []
    for metric, direction in objectives.items():
        if all(metric in metrics for metrics in predicted.values()):
            costs = {layout: direction.cost(metrics[metric]) for layout, metrics in predicted.items()}
            orders.append(sorted(costs, key=costs.__getitem__))
    for order in islice(cycle(orders), PREDICTED if predicted else 0):
        if (layout := _next(order, chosen, memory)) is not None:
            chosen.append(layout)
    return chosen


def _next(order: Iterable[Layout], chosen: Sequence[Layout], memory: MemoryModel) -> Layout | None:
    """The first of `order` that is not just a neighbour of one that was chosen; else the first that was not chosen."""
    neighbour = None
    for layout in order:
        if layout not in chosen and _is_safe(layout, memory):
            if all(_differ(layout, other) for other in chosen):
                return layout
            neighbour = neighbour or layout
    return neighbour


def _is_safe(layout: Layout, memory: MemoryModel) -> bool:
    return memory.band(layout) in ("fits", None)


def _differ(one: Layout, other: Layout) -> bool:
    """Whether two layouts are not just neighbours."""
    return len(varying([one, other])) >= APART
