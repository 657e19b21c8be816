"""The agenda of a search: what to run next, from what was run so far, and in which order, by what workers are free.

A search explores, with a sentinel now and then; when that is over and nothing is under way, it measures finalists. The
whole of it follows from the results so far, so that a search which is resumed goes on where its record ends.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from search_spaces.layout import Layout
from service.metrics import Part, made_of
from service.problem import Problem
from service.result import Purpose, TrialResult
from service.sampling import drift, finalists, placing
from service.step import Step, Wish
from trainables.status import Status

RETRIES = 2
"""Times that a layout is run again for one purpose when the machines failed it."""

RESERVED = 0.5
"""The share of a budget of time that may be kept back from exploring."""


PATIENCE = 2
"""Times as many trials as are drawn ahead may be preferred to one that waits, before it is everybody's turn to wait."""


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


class Workers(Protocol):
    """Who lends workers to trials; see `service.trials.pool.Pool`."""

    def free(self) -> int | None:
        """How many workers a trial could have at most, at present; None while others have their turn."""

    def lend(self, trial_id: str, wishes: Sequence[Wish]) -> int | None:
        """Lend a trial what it needs by the first of `wishes` that can be met: which one, None if none can."""


@dataclass
class _Waiting:
    """A trial that is to be run, and how many that were chosen later were handed out before it."""

    step: Step
    passed: int = 0


class Agenda:
    """Hands out trials one by one, and takes their results, while the time lasts. What comes next is a subclass's.

    A trial is handed out when workers are lent for it: time counts from the first one, but for the turns of others, and
    a trial's GPU time from when it is handed out. Of some trials that explore, drawn ahead where layouts differ in
    size, the largest that fits goes first; one that was passed over too often goes before all others. The rest keep
    their order. A trial that failed by the machines is handed out again, `RETRIES` times at most; its result counts
    only after that.
    """

    def __init__(
        self,
        problem: Problem,
        results: Sequence[TrialResult] = (),
        spent: Spent = Spent(),
        workers: int | None = None,
    ) -> None:
        """`results`: all that came of a search that is resumed, in the order of their start. `workers` are those that
        run the trials, as many as the largest layout has GPUs if that is None."""
        self.problem = problem
        self.workers = workers or problem.gang_size
        sizes = {1} if problem.measurement.sliced else {layout.num_gpus for layout in problem.legal.layouts}
        self.smallest = min(sizes)
        self.ahead = self.at_a_time if len(sizes) > 1 else 1
        self.results = settled(results)
        self.faults = Counter((r.layout, r.purpose) for r in results if r.infrastructure)
        self.spent_s = spent.wall_time_s
        self.began: float | None = None
        self.paused: float | None = None
        self.gpu_seconds = spent.gpu_seconds
        self.under_way: dict[str, tuple[Step, float]] = {}
        self.waiting: list[_Waiting] = []
        self.dry = False
        self.stopped = False
        self.slower: Mapping[str, float] = {}
        """By GPU's UUID, how much longer the slowest takes than it, as far as that is known before any trial."""

    @property
    def over(self) -> bool:
        """Whether there was no trial left when one was asked for last, and none is under way that may bring another."""
        return (self.closed or self.dry) and not self.under_way and not self.waiting

    @property
    def at_a_time(self) -> int:
        """The most trials that are under way side by side."""
        return self.workers // self.smallest

    @property
    def sought(self) -> int:
        """The most trials of the agenda's main purpose; those beside it are not counted."""
        raise NotImplementedError

    @property
    def to_come(self) -> int:
        """The most trials, of any purpose, that are planned and not yet over."""
        raise NotImplementedError

    def next(self, trial_id: str, workers: Workers) -> Step | None:
        """The next trial, for which workers were lent; None if there is none at present, or any more: see `over`."""
        if self.closed:
            self.waiting.clear()
            return None
        free = workers.free()
        self._pause(free is None and not self.under_way)
        self.draw(free or 0)
        if not self.waiting:
            return None
        first = self.waiting[0]
        candidates = sorted(self.waiting, key=lambda one: -self._gpus(one.step) if one.step.purpose.explores else 0)
        if first.passed >= PATIENCE * self.ahead or not first.step.purpose.explores:
            candidates = [first]
        if (number := workers.lend(trial_id, [self._wish(one.step) for one in candidates])) is None:
            return None
        chosen = candidates[number]
        for one in self.waiting[: self.waiting.index(chosen)]:
            one.passed += 1
        self.waiting.remove(chosen)
        step = self.ready(chosen.step)
        self.under_way[trial_id] = step, time.monotonic()
        if self.began is None:
            self.began = time.monotonic() - self.spent_s
        return step

    def draw(self, free: int) -> None:
        """Have trials wait that are to be run next, where there are workers free for any: more than one if they explore
        and differ in size."""
        self.dry = False
        while (
            free >= self.smallest
            and len(self.waiting) < self.ahead
            and all(one.step.purpose.explores for one in self.waiting)
            and not self.dry
        ):
            if (step := self.choose()) is not None:
                self.waiting.append(_Waiting(step))
            self.dry = step is None

    @property
    def closed(self) -> bool:
        """Whether no more trials are handed out, whatever is left to do."""
        return self.stopped or self.out_of_time()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first trial, and those that a search which is resumed had spent before, without the turns
        of others."""
        now = time.monotonic() if self.paused is None else self.paused
        return self.spent_s if self.began is None else now - self.began

    def _pause(self, paused: bool) -> None:
        """Have the time stand still, or go on."""
        now = time.monotonic()
        if paused:
            self.paused = now if self.paused is None else self.paused
        elif self.paused is not None:
            self.began = None if self.began is None else self.began + now - self.paused
            self.paused = None

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

    def _wish(self, step: Step) -> Wish:
        """What a trial needs: those that explore run side by side, all others alone."""
        return Wish(self._gpus(step), alone=not step.purpose.explores)

    def _gpus(self, step: Step) -> int:
        """How many GPUs a trial has for itself."""
        return 1 if self.problem.measurement.sliced and step.purpose.as_explored else step.layout.num_gpus

    def drifts(self) -> dict[str, drift.Drift]:
        """Metric -> how far it moved on the sentinel, of an agenda that has one."""
        return {}

    def choose(self) -> Step | None:
        """The next trial of this agenda, None if there is none at present."""
        raise NotImplementedError

    def ready(self, step: Step) -> Step:
        """A trial as it is handed out now, which was chosen some time ago."""
        return step

    def give_back(self, step: Step) -> None:
        """See to it that a trial which the machines failed is run again."""
        self.waiting.insert(0, _Waiting(step))

    def learn(self, result: TrialResult) -> None:
        """Take a result in that counts."""


class SearchAgenda(Agenda):
    """Explores by a study, measures the sentinel again every so many trials, and in the end the finalists, then the
    best of them in other places."""

    def __init__(
        self,
        study: Study,
        problem: Problem,
        results: Sequence[TrialResult] = (),
        spent: Spent = Spent(),
        workers: int | None = None,
    ) -> None:
        """The study has been told of `results` already."""
        super().__init__(problem, results, spent, workers)
        self.study = study
        self.plan: list[Layout] | None = None
        self.places: list[Layout] | None = None
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
        last = chosen.count * chosen.repeats if self.plan is None else len(self.plan) + self._begun(Purpose.FINALIST)
        every = self.problem.sentinel_every
        last += len(self.places or ()) + self._begun(Purpose.PLACEMENT)
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
        one_place = self.sentinel is not None and self.sentinel.num_gpus == self.workers
        return drift.drifts([r for r in runs if r.status == Status.OK], one_place)

    def draw(self, free: int) -> None:
        if self.out_of_time(*self._reserve()):  # what is waiting is not begun any more
            for one in [one for one in self.waiting if one.step.purpose == Purpose.SEARCH]:
                self.waiting.remove(one)
                self.study.give_back(one.step.layout)
        super().draw(free)

    def ready(self, step: Step) -> Step:
        if step.purpose != Purpose.SEARCH:
            return step
        names = self.problem.goals.objectives
        front = [{m: v for m in names if (v := result.metrics.get(m)) is not None} for result in self.front()]
        return replace(step, front=tuple(front))

    def choose(self) -> Step | None:
        step = self._sentinel_due() or self._explore() or self._finalist() or self._placement()
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
        if self.plan == [] and not self.under_way and not self.waiting:
            self.plan = self._due()

    def _sentinel_due(self) -> Step | None:
        every, layout = self.problem.sentinel_every, self.sentinel
        if not every or layout is None or self.since_sentinel < every or not (self._exploring() or self.plan):
            return None
        return Step(layout, Purpose.SENTINEL)

    def _explore(self) -> Step | None:
        if not self._exploring() or (layout := self.study.ask()) is None:
            return None
        return Step(layout, Purpose.SEARCH)

    def _exploring(self) -> bool:
        begun = len(self._of(Purpose.SEARCH)) + self._begun(Purpose.SEARCH)
        if self.plan is not None or begun >= self.problem.budget.trials:
            return False
        return not self.out_of_time(*self._reserve())

    def _finalist(self) -> Step | None:
        if self.plan is None and not self.under_way and not self.waiting:
            self.plan = self._due()
        return Step(self.plan.pop(0), Purpose.FINALIST) if self.plan else None

    def _placement(self) -> Step | None:
        if self.plan != [] or self.under_way or self.waiting:
            return None
        if self.places is None:
            self.places = placing.due(self.results, self.problem, self.slower, self.workers)
        return Step(self.places.pop(0), Purpose.PLACEMENT) if self.places else None

    def _due(self) -> list[Layout]:
        """The layouts that are measured again next, in their order."""
        return finalists.due(self.results, self.problem.goals, self.problem.finalists, self.problem.seed)

    def _finalists(self) -> list[TrialResult]:
        return finalists.contenders(self._explored(), self.problem.goals, self.problem.finalists.count)

    def _reserve(self) -> tuple[float, float]:
        """Seconds, and GPU seconds, that the finalists would take by the times of their trials so far, and one more
        trial that explores by the median of those."""
        if self.problem.budget.wall_time_s is None and self.problem.budget.gpu_hours is None:
            return 0.0, 0.0
        held = [(_held_s(r.metrics), self._gpus(Step(r.layout, r.purpose))) for r in self._explored()]
        next_s = statistics.median([seconds for seconds, _ in held] or [0.0])
        next_gpu_s = statistics.median([seconds * gpus for seconds, gpus in held] or [0.0])
        repeats = self.problem.finalists.repeats
        each = [(self._finalist_s(r.metrics), r.layout.num_gpus) for r in self._finalists()]
        at_a_time = max(1, min(self.workers // self.problem.gang_size, self.problem.cluster.nodes))
        wall_s = repeats * sum(seconds for seconds, _ in each) / at_a_time
        return next_s + wall_s, next_gpu_s + repeats * sum(seconds * gpus for seconds, gpus in each)

    def _finalist_s(self, metrics: dict[str, float | None]) -> float:
        """Seconds of one finalist trial: as its trial before, with a longer window at each depth."""
        window_s = max(
            self.problem.finalists.window_s,
            self.problem.measurement.window_min_steps * (metrics.get("step_time_s") or 0.0),
        )
        depths = 2 if self.problem.depth_proxy else 1
        return _held_s(metrics) - (metrics.get("window_time_s") or 0.0) + depths * window_s

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

    def _begun(self, purpose: Purpose) -> int:
        """How many trials of a purpose are under way or waiting."""
        steps = [*(step for step, _ in self.under_way.values()), *(one.step for one in self.waiting)]
        return sum(step.purpose == purpose for step in steps)


class CalibrationAgenda(Agenda):
    """Runs each of some layouts once."""

    def __init__(self, problem: Problem, layouts: Sequence[Layout], workers: int | None = None) -> None:
        super().__init__(problem, workers=workers)
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

    def change(self, layouts: Sequence[Layout]) -> None:
        """Run these instead. None was run yet."""
        self.layouts, self.left = list(layouts), list(layouts)


def settled(results: Sequence[TrialResult]) -> list[TrialResult]:
    """The results that count: without failures of the machines after which the layout was, or is, run again."""
    faults: Counter[tuple[Layout, Purpose]] = Counter()
    kept = []
    for result in results:
        faults[result.layout, result.purpose] += result.infrastructure
        if not result.infrastructure or faults[result.layout, result.purpose] > RETRIES:
            kept.append(result)
    return kept


def _held_s(metrics: Mapping[str, float | None]) -> float:
    """Seconds for which a trial held its GPUs, but for a probe's."""
    return sum(metrics.get(name) or 0.0 for name in made_of(Part.HELD))
