"""The agenda of a search: what to run next, from what was run so far.

A search explores, with a sentinel now and then; when that is over and nothing is under way, it measures finalists. The
whole of it follows from the results so far, so that a search which is resumed goes on where its record ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from search_spaces.layout import Layout
from service.metrics import Part, made_of
from service.problem import Problem
from service.result import Purpose, TrialResult
from service.sampling import drift, finalists
from service.step import Step
from trainables.status import Status

RETRIES = 2
"""Times that a layout is run again for one purpose when the machines failed it."""

RESERVED = 0.5
"""The share of a budget of time that finalists may take from exploring."""


@dataclass(frozen=True)
class Spent:
    """What a search has used of its budget of time."""

    wall_time_s: float = 0.0
    gpu_seconds: float = 0.0


class Study(Protocol):
    """Where an agenda gets the layouts from that explore; see `service.sampling.study.SearchStudy`."""

    def ask(self) -> Layout | None: ...

    def tell(self, layout: Layout, result: TrialResult) -> None: ...

    def give_back(self, layout: Layout) -> None: ...


class Agenda:
    """Hands out trials one by one, and takes their results, while the time lasts. What comes next is a subclass's.

    A trial is asked for when there are GPUs for it: time counts from the first one, and a trial's GPU time from when it
    is handed out. A trial that failed by the machines is handed out again, `RETRIES` times at most; its result counts
    only after that.
    """

    def __init__(self, problem: Problem, results: Sequence[TrialResult] = (), spent: Spent = Spent()) -> None:
        """`results`: all that came of a search that is resumed, in the order of their start."""
        self.problem = problem
        self.results = settled(results)
        self.faults = Counter((r.layout, r.purpose) for r in results if r.infrastructure)
        self.spent_s = spent.wall_time_s
        self.began: float | None = None
        self.gpu_seconds = spent.gpu_seconds
        self.under_way: dict[str, tuple[Step, float]] = {}
        self.again: list[Step] = []
        self.stopped = False

    @property
    def sought(self) -> int:
        """The most trials of the agenda's main purpose; those beside it are not counted."""
        raise NotImplementedError

    @property
    def to_come(self) -> int:
        """The most trials, of any purpose, that are planned and not yet over."""
        raise NotImplementedError

    def next(self, trial_id: str, purposes: Container[Purpose] = tuple(Purpose)) -> Step | None:
        """The next trial; None if there is none of these purposes, for good once none is under way either."""
        if self.closed:
            return None
        step = self.again.pop(0) if self.again else self.choose()
        if step is not None and step.purpose not in purposes:
            self.again.insert(0, step)
            return None
        if step is not None:
            self.under_way[trial_id] = step, time.monotonic()
            if self.began is None:
                self.began = time.monotonic() - self.spent_s
        return step

    @property
    def closed(self) -> bool:
        """Whether no more trials are handed out, whatever is left to do."""
        return self.stopped or self.out_of_time()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first trial, and those that a search which is resumed had spent before."""
        return self.spent_s if self.began is None else time.monotonic() - self.began

    def take(self, result: TrialResult) -> bool:
        """Learn what became of a trial. Returns whether its result counts, or else the trial is run again."""
        step, started = self.under_way.pop(result.trial_id)
        self.gpu_seconds += (time.monotonic() - started) * self._gpus(step)
        key = (result.layout, result.purpose)
        self.faults[key] += result.infrastructure
        if result.infrastructure and self.faults[key] <= RETRIES:
            self.give_back(step)
            return False
        self.results.append(result)
        self.learn(result)
        return True

    def out_of_time(self, reserve_s: float = 0.0, reserve_gpu_seconds: float = 0.0) -> bool:
        """Whether the budgets of wall time and GPU hours are used up, but for a reserve."""
        budget = self.problem.budget
        wall_s = budget.wall_time_s
        gpu_s = None if budget.gpu_hours is None else 3600 * budget.gpu_hours
        return (wall_s is not None and self.elapsed_s >= wall_s - min(reserve_s, RESERVED * wall_s)) or (
            gpu_s is not None and self.gpu_seconds >= gpu_s - min(reserve_gpu_seconds, RESERVED * gpu_s)
        )

    def _gpus(self, step: Step) -> int:
        """How many GPUs a trial has for itself."""
        return 1 if self.problem.measurement.sliced and step.purpose.explores else step.layout.num_gpus

    def drifts(self) -> dict[str, drift.Drift]:
        """Metric -> how far it moved on the sentinel, of an agenda that has one."""
        return {}

    def choose(self) -> Step | None:
        """The next trial of this agenda, None if there is none at present."""
        raise NotImplementedError

    def give_back(self, step: Step) -> None:
        """See to it that a trial which the machines failed is run again."""
        self.again.append(step)

    def learn(self, result: TrialResult) -> None:
        """Take a result in that counts."""


class SearchAgenda(Agenda):
    """Explores by a study, measures the sentinel again every so many trials, and the finalists in the end."""

    def __init__(
        self,
        study: Study,
        problem: Problem,
        gangs: int = 1,
        results: Sequence[TrialResult] = (),
        spent: Spent = Spent(),
    ) -> None:
        """`gangs` is how many trials run at a time. The study has been told of `results` already."""
        super().__init__(problem, results, spent)
        self.study, self.gangs = study, gangs
        self.plan: list[Layout] | None = None
        self.since_sentinel = 0
        for result in self.results:
            self._count(result.purpose)
            self._note(result)
        if self._of(Purpose.FINALIST):
            self.plan = self._due()

    @property
    def sought(self) -> int:
        return min(self.problem.budget.trials, len(self.problem.legal.layouts))

    @property
    def to_come(self) -> int:
        chosen = self.problem.finalists
        left = self.sought - len(self._of(Purpose.SEARCH)) if self.plan is None else 0
        last = chosen.count * chosen.repeats if self.plan is None else len(self.plan) + self._running(Purpose.FINALIST)
        every = self.problem.sentinel_every
        sentinels = (self.since_sentinel + left + last) // every if every else 0
        return left + last + sentinels

    @property
    def sentinel(self) -> Layout | None:
        """The layout by which the machine is watched: the first that ended well."""
        watching = [*self._of(Purpose.SENTINEL), *self._explored()]
        return watching[0].layout if watching else None

    def front(self) -> list[TrialResult]:
        """The Pareto front of the trials that explored."""
        return self.problem.goals.among(self._explored()).front()

    def drifts(self) -> dict[str, drift.Drift]:
        watching = (Purpose.SEARCH, Purpose.SENTINEL)
        runs = [r for r in self.results if r.layout == self.sentinel and r.purpose in watching]
        return drift.drifts([r for r in runs if r.status == Status.OK], self.gangs == 1)

    def choose(self) -> Step | None:
        step = self._sentinel_due() or self._explore() or self._finalist()
        if step is not None:
            self._count(step.purpose)
        return step

    def give_back(self, step: Step) -> None:
        if step.purpose == Purpose.SEARCH:
            self.study.give_back(step.layout)
        else:
            super().give_back(step)

    def learn(self, result: TrialResult) -> None:
        if result.purpose == Purpose.SEARCH:
            self.study.tell(result.layout, result)
        self._note(result)
        if self.plan == [] and not self.under_way and not self.again:
            self.plan = self._due()

    def _sentinel_due(self) -> Step | None:
        every, layout = self.problem.sentinel_every, self.sentinel
        if not every or layout is None or self.since_sentinel < every or not (self._exploring() or self.plan):
            return None
        return Step(layout, Purpose.SENTINEL)

    def _explore(self) -> Step | None:
        if not self._exploring() or (layout := self.study.ask()) is None:
            return None
        names = self.problem.goals.objectives
        objectives = [{m: v for m in names if (v := result.metrics.get(m)) is not None} for result in self.front()]
        return Step(layout, Purpose.SEARCH, tuple(objectives))

    def _exploring(self) -> bool:
        begun = len(self._of(Purpose.SEARCH)) + self._running(Purpose.SEARCH)
        if self.plan is not None or begun >= self.problem.budget.trials:
            return False
        return not self.out_of_time(*self._reserve())

    def _finalist(self) -> Step | None:
        if self.plan is None and not self.under_way:
            self.plan = self._due()
        return Step(self.plan.pop(0), Purpose.FINALIST) if self.plan else None

    def _due(self) -> list[Layout]:
        """The layouts that are measured again next, in their order."""
        return finalists.due(self.results, self.problem.goals, self.problem.finalists, self.problem.seed)

    def _finalists(self) -> list[TrialResult]:
        return finalists.contenders(self._explored(), self.problem.goals, self.problem.finalists.count)

    def _reserve(self) -> tuple[float, float]:
        """Seconds, and GPU seconds, that the finalists would take by the times of their trials so far."""
        if self.problem.budget.wall_time_s is None and self.problem.budget.gpu_hours is None:
            return 0.0, 0.0
        repeats = self.problem.finalists.repeats
        each = [(self._finalist_s(r.metrics), r.layout.num_gpus) for r in self._finalists()]
        wall_s = repeats * sum(seconds for seconds, _ in each) / self.gangs
        return wall_s, repeats * sum(seconds * gpus for seconds, gpus in each)

    def _finalist_s(self, metrics: dict[str, float | None]) -> float:
        """Seconds of one finalist trial: as its trial before, with a longer window at each depth."""
        window_s = max(
            self.problem.finalists.window_s,
            self.problem.measurement.window_min_steps * (metrics.get("step_time_s") or 0.0),
        )
        depths = 2 if self.problem.depth_proxy else 1
        before = sum(metrics.get(name) or 0.0 for name in made_of(Part.HELD) if name != "window_time_s")
        return before + depths * window_s

    def _count(self, purpose: Purpose) -> None:
        self.since_sentinel = 0 if purpose == Purpose.SENTINEL else self.since_sentinel + 1

    def _note(self, result: TrialResult) -> None:
        """The trial that first measured the sentinel is the first that watches the machine."""
        if result.purpose == Purpose.SEARCH and result.layout == self.sentinel:
            self.since_sentinel = 0

    def _of(self, purpose: Purpose) -> list[TrialResult]:
        return [r for r in self.results if r.purpose == purpose]

    def _explored(self) -> list[TrialResult]:
        """The results that explored and ended well."""
        return [r for r in self._of(Purpose.SEARCH) if r.status == Status.OK]

    def _running(self, purpose: Purpose) -> int:
        return sum(step.purpose == purpose for step, _ in self.under_way.values())


class CalibrationAgenda(Agenda):
    """Runs each of some layouts once."""

    def __init__(self, problem: Problem, layouts: Sequence[Layout]) -> None:
        super().__init__(problem)
        self.layouts = list(layouts)
        self.left = list(layouts)

    @property
    def sought(self) -> int:
        return len(self.layouts)

    @property
    def to_come(self) -> int:
        return self.sought - len(self.results)

    def choose(self) -> Step | None:
        return Step(self.left.pop(0), Purpose.CALIBRATION) if self.left else None


def settled(results: Sequence[TrialResult]) -> list[TrialResult]:
    """The results that count: without failures of the machines after which the layout was, or is, run again."""
    faults: Counter[tuple[Layout, Purpose]] = Counter()
    kept = []
    for result in results:
        faults[result.layout, result.purpose] += result.infrastructure
        if not result.infrastructure or faults[result.layout, result.purpose] > RETRIES:
            kept.append(result)
    return kept
