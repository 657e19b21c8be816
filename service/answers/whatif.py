"""What machines unlike those that were measured would make of the layouts that a search explored by slices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from search_spaces.composition import Fleet, compose
from search_spaces.kinds import first_rank
from search_spaces.layout import Layout
from search_spaces.network import Network
from service.answers.candidates import Candidate, explored
from service.answers.ranking import ranked
from service.answers.tables import render
from service.errors import InputError, NoAnswerError
from service.metrics import Method, heading, number
from service.problem import Problem
from service.record.results import SearchRecord, TrialRecord
from service.result import TrialResult

_PERCENT = re.compile(r"^\s*([+-]?\d+(?:\.\d+)?)\s*%\s*$")


@dataclass(frozen=True)
class Change:
    """How machines differ: by what share one GPU of each layout is slower, and how much more bandwidth links have."""

    slow_gpu: float = 0.0
    link: float = 0.0

    def fleets(self, layout: Layout) -> dict[int | None, Fleet]:
        """The machines by the rank that the slow GPU has: the first of each pipeline rank; None if no GPU is slow."""
        links = 1 / (1 + self.link)
        if not self.slow_gpu:
            return {None: Fleet(links=links)}
        ranks = [first_rank(layout, rank) for rank in range(layout.pipeline_parallel_size)]
        return {rank: Fleet({rank: 1 + self.slow_gpu}, links) for rank in ranks}


class Figures(NamedTuple):
    """Of an optimizer step; joules are None where power was not measured."""

    step_time_s: float
    joules_per_token: float | None


@dataclass(frozen=True)
class Changed:
    """A layout before and after. `rank`: of the slow GPU, where it costs most; None if no GPU is slow."""

    candidate: Candidate
    before: Figures
    after: Figures
    rank: int | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; the layout is under `config`."""
        return {
            "trial_id": self.candidate.trial_id,
            "label": self.candidate.label,
            "config": self.candidate.layout.to_dict(),
            "before": self.before._asdict(),
            "after": self.after._asdict(),
            "slow_rank": self.rank,
        }


@dataclass(frozen=True)
class WhatIf:
    """The layouts that a search explored by slices, the best before on its first objective first. `notices` tell of
    which there is no answer."""

    search_id: str
    change: Change
    layouts: tuple[Changed, ...]
    notices: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        layouts = [one.to_dict() for one in self.layouts]
        return {"search_id": self.search_id, **asdict(self.change), "layouts": layouts, "notices": list(self.notices)}


class _Lacking(Exception):
    """What a record lacks to tell."""


def parse_change(slow_gpu: str | None, link: str | None) -> Change:
    """The change that texts make, such as ``5%`` and ``-20%``. Raises `InputError`."""
    change = Change(_share("slow-gpu", slow_gpu), _share("link", link))
    if change.slow_gpu < 0:
        raise InputError(f"slow-gpu: {slow_gpu!r} is not above 0: give by how much the GPU is slower, such as 5%")
    if change.link <= -1:
        raise InputError(f"link: {link!r} leaves no bandwidth: give more than -100%, such as -20%")
    if change == Change():
        raise InputError("whatif: give --slow-gpu or --link, other than 0%")
    return change


def whatif(
    search: SearchRecord, problem: Problem, change: Change, read: Callable[[TrialRecord], TrialResult | None]
) -> WhatIf:
    """What `change` makes of the layouts of a search of `problem`; `read` gives all that was recorded of a trial.

    Raises `NoAnswerError` if nothing was explored by slices, or no record of it tells.
    """
    sliced = [one for one in _ordered(search) if {Method.SLICE, Method.EXTRAPOLATED} & set(one.methods.values())]
    layouts, lacking = [], Counter[str]()
    for one in sliced:
        try:
            layouts.append(_changed(problem, one, change, read))
        except _Lacking as reason:
            lacking[str(reason)] += 1
    notices = [f"{count} layout{'s' * (count > 1)} left out: {reason}" for reason, count in lacking.items()]
    if not layouts:
        raise NoAnswerError(f"search {search.id}: {'; '.join(notices) or 'no layout was explored by slices'}")
    return WhatIf(search.id, change, tuple(layouts), tuple(notices))


def text(answer: WhatIf) -> str:
    """For a terminal: a row a layout, and the notices."""
    slow = bool(answer.change.slow_gpu)
    columns = [heading("step_time_s"), "then", "", heading("joules_per_token"), "then", ""]
    headings = ["layout", *columns, *(["slow rank"] if slow else [])]
    rows = [
        [
            one.candidate.label,
            *_cells("step_time_s", one.before.step_time_s, one.after.step_time_s),
            *_cells("joules_per_token", one.before.joules_per_token, one.after.joules_per_token),
            *([str(one.rank)] if slow else []),
        ]
        for one in answer.layouts
    ]
    return "\n".join([render(headings, rows), *(f"note: {notice}" for notice in answer.notices)])


def _share(name: str, given: str | None) -> float:
    if given is None:
        return 0.0
    match = _PERCENT.match(given)
    if match is None:
        raise InputError(f"{name}: {given!r} is not a number of percent, such as 5%")
    return float(match[1]) / 100


def _cells(metric: str, before: float | None, after: float | None) -> list[str]:
    if before is None or after is None:
        return ["-"] * 3
    return [*(number(metric, value, Method.SLICE) for value in (before, after)), f"{after / before - 1:+.1%}"]


def _ordered(search: SearchRecord) -> list[Candidate]:
    """What was explored, in the order of `best`; what its answers may not name comes last."""
    comparison = search.goals.among(explored(search.trials))
    some, objectives = ranked(comparison), [*comparison.objectives.items()]
    first = comparison.ordered(some, *objectives[0]) if objectives else some
    return [*first, *(one for one in comparison.results if one not in first)]


def _changed(
    problem: Problem, one: Candidate, change: Change, read: Callable[[TrialRecord], TrialResult | None]
) -> Changed:
    (trial,) = one.trials
    assert isinstance(trial, TrialRecord)
    result = read(trial)
    if result is None:
        raise _Lacking("their results are not in reach")
    tokens = one.layout.global_batch_size * problem.sequence_length

    def figures(fleet: Fleet) -> Figures:
        step_s, energy_j = _step(problem, result, fleet)
        return Figures(step_s, None if energy_j is None else energy_j / tokens)

    if change.link:
        _check_exposed(_runs(result))
    after = {rank: figures(fleet) for rank, fleet in change.fleets(one.layout).items()}
    worst = max(after, key=lambda rank: after[rank].step_time_s)
    return Changed(one, figures(Fleet()), after[worst], worst)


def _step(problem: Problem, result: TrialResult, fleet: Fleet) -> tuple[float, float | None]:
    """Seconds and joules of a step, put together from its ranks, or followed from those of smaller runs."""
    if not result.proxies:
        return _composed(problem, result, fleet)
    smaller = [_step(problem.at_depth(proxy.layers), proxy.result, fleet) for proxy in result.proxies]
    layers = [proxy.layers for proxy in result.proxies]
    batches = [proxy.result.layout.global_batch_size for proxy in result.proxies]
    over_depth = layers[0] != layers[1]
    (near, far), place = (layers, problem.workload.shape.layers) if over_depth else (batches, problem.global_batch_size)

    def followed(low: float, high: float) -> float:
        return high + (high - low) * (place - far) / (far - near)

    (low_s, low_j), (high_s, high_j) = smaller
    return followed(low_s, high_s), None if low_j is None or high_j is None else followed(low_j, high_j)


def _composed(problem: Problem, result: TrialResult, fleet: Fleet) -> tuple[float, float | None]:
    """Of two slices of a kind, as older records have them, the second, with the fullest rank's tokens, tells how long
    all take; what the others draw meanwhile it does not."""
    measured = {one.kind: one.times for one in result.slices}
    step = compose(result.layout, problem.workload.run, measured, _network(result), fleet)
    powered = len(measured) == len(result.slices) and all(times.busy_power_w for times in measured.values())
    return step.step_time_s, step.energy_j if powered else None


def _network(result: TrialResult) -> Network:
    if not result.slices:
        raise _Lacking("they were not explored by slices")
    if result.network is None:
        raise _Lacking("their records lack the network that was assumed, which earlier versions did not keep")
    return result.network


def _runs(result: TrialResult) -> Iterable[TrialResult]:
    """Those that a result follows from; itself, if from none."""
    if not result.proxies:
        yield result
    for proxy in result.proxies:
        yield from _runs(proxy.result)


def _check_exposed(runs: Iterable[TrialResult]) -> None:
    """Raise `_Lacking` where ranks communicate and nobody knows how long they did nothing else."""
    for run in runs:
        if run.layout.num_gpus > 1 and not all(one.times.exposed_s for one in run.slices):
            raise _Lacking("their records lack the communication that was exposed, which `measurement.breakdown` tells")
