"""The Optuna study behind a search: which legal layout to try next, and what became of the ones tried."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from search_spaces.layout import Layout, axis_of
from search_spaces.memory import MemoryModel, Needed
from search_spaces.space import varying
from service.errors import InputError
from service.goals import Goals
from service.record.store import alone, first_line, sqlite_file
from service.result import TrialResult
from service.sampling.surrogate import Coordinates, SurrogateSampler
from service.sampling.uniform import UniformSampler
from trainables.status import Status

optuna.logging.set_verbosity(optuna.logging.ERROR)

STARTUP_TRIALS = 8
"""Trials before Optuna's samplers model anything."""

SURROGATE_TRIALS = 100
"""Trials after which `auto` goes over to TPE, of which a suggestion takes no longer with every trial."""

FITS, EXCEEDS, LEAST = -1.0, 1.0, 0.01
"""A constraint's value where the size of the violation is not known, and its smallest where it is."""


def make_sampler(name: str, seed: int) -> BaseSampler:
    """One of Optuna's samplers that take several objectives and constraints."""
    samplers: dict[str, Callable[[], BaseSampler]] = {
        "tpe": lambda: TPESampler(seed=seed, multivariate=True, n_startup_trials=STARTUP_TRIALS),
        "gp": lambda: GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS),
        "nsga2": lambda: NSGAIISampler(seed=seed, population_size=STARTUP_TRIALS),
    }
    return samplers[name]()


def study_exists(name: str, storage: str) -> bool:
    """Whether the database at an Optuna URL is there and has a study of this name."""
    database = sqlite_file(storage)
    if database is not None and not database.exists():
        return False
    with _opening(storage):
        return name in optuna.get_all_study_names(storage)


@contextlib.contextmanager
def _opening(storage: str | None) -> Iterator[None]:
    """What is raised of a storage that cannot be opened, as an `InputError`; one process at a time opens it."""
    database = None if storage is None else sqlite_file(storage)
    try:
        with alone(database):
            yield
    except SQLAlchemyError as error:
        raise InputError(f"{database or storage}: cannot be read: {first_line(error)}") from None


class SnappingSampler(BaseSampler):
    """Moves each suggestion of another sampler to the layout that `snap` answers with, once `first` has none left.

    So every trial of the study is one that is really run; samplers that breed from their own trials need that.
    """

    def __init__(
        self,
        inner: BaseSampler,
        space: dict[str, BaseDistribution],
        snap: Callable[[Mapping[str, Any]], dict[str, Any]],
        first: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:
        self.inner, self.space, self.snap, self.first = inner, space, snap, first

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if (layout := self.first()) is not None:
            return layout
        known = self.inner.infer_relative_search_space(study, trial)
        wanted = self.inner.sample_relative(study, trial, known)
        rest = {name: axis for name, axis in search_space.items() if name not in wanted}
        return self.snap(
            wanted | {name: self.inner.sample_independent(study, trial, name, axis) for name, axis in rest.items()}
        )

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self.inner.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self.inner.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self.inner.after_trial(study, trial, state, values)


class SearchStudy:
    """Asks for legal layouts only, each once.

    Sizes are ordered by their logarithm to base 2, so that 1, 2, 4 and 8 are as far apart; settings without an order
    are categories. A suggestion that is not legal, was tried, or is expected to run out of memory is replaced by the
    nearest layout that is none of these, while there are such. Failed trials are told as complete trials that violate a
    constraint, with the worst values seen, so that the sampler learns to keep away.
    """

    def __init__(
        self,
        name: str,
        layouts: Sequence[Layout],
        goals: Goals,
        sampler: str,
        seed: int,
        storage: str | None = None,
        *,
        first: Iterable[Layout] = (),
        memory: MemoryModel | None = None,
        predicted: Mapping[Layout, Mapping[str, float]] | None = None,
    ) -> None:
        """`storage` is an Optuna URL, None keeps the study in memory.

        `first` are layouts to begin with. `memory` says what is expected to fit, and learns from the trials.
        `predicted` has metrics of layouts by name; only the sampler `auto` makes use of them.
        """
        self.goals, self.memory = goals, memory
        self.axes = varying(layouts)
        self.rows = {axis: axis_of(axis, values) for axis, values in self.axes.items()}
        self.distributions: dict[str, BaseDistribution] = {
            axis: FloatDistribution(self.rows[axis].place(values[0]), self.rows[axis].place(values[-1]))
            if self.rows[axis].ordered
            else CategoricalDistribution(range(len(values)))
            for axis, values in self.axes.items()
        }
        self.unseen = {self._coordinates(layout): layout for layout in layouts}
        self.first = chain(
            [layout for layout in first if layout in layouts], layouts if sampler == "exhaustive" else ()
        )
        self.trials: dict[Layout, Trial] = {}
        self.good: list[TrialResult] = []
        self.deferred: list[tuple[Layout, TrialResult]] = []
        self.again: list[Layout] = []
        with _opening(storage):
            self.study = optuna.create_study(
                storage=storage,
                study_name=name,
                directions=[StudyDirection[direction.name] for direction in goals.objectives.values()],
                load_if_exists=True,
            )
        # A sampler that started anew from the same seed would want the same layouts as before.
        self.seed = seed + self._asked()
        if sampler == "auto":
            figures = {
                self._coordinates(layout): [metrics.get(metric) for metric in goals.objectives]
                for layout, metrics in (predicted or {}).items()
            }
            inner: BaseSampler = SurrogateSampler(
                self.distributions,
                self._candidates,
                self._needed,
                figures,
                self.seed,
                doubtful_memory=memory is not None and memory.is_doubtful,
            )
        elif sampler in ("random", "exhaustive"):
            inner = UniformSampler(self.distributions, self._candidates, self.seed)
        else:
            inner = make_sampler(sampler, self.seed)
        self.sampler = SnappingSampler(inner, self.distributions, self._nearest, self._first)
        self.study.sampler = self.sampler

    def recall(self, results: Sequence[TrialResult]) -> None:
        """Go on with a study that was broken off; `results` are all that came of it.

        They need not have been told to the study. What it was asked for without result, `ask` hands out before others.
        """
        recorded = {result.layout: result for result in results}
        for result in results:
            self._observe(result)
        for left in self.study.get_trials(states=[TrialState.RUNNING]):
            if set(left.params) != set(self.axes):  # broken off while it was asked for
                self.study.tell(left.number, state=TrialState.FAIL)
                continue
            layout = self.unseen.pop(tuple(left.params[axis] for axis in self.axes))
            self.trials[layout] = Trial(self.study, left._trial_id)
            if layout in recorded:
                self._report(layout, recorded[layout])
            else:
                self.again.append(layout)
        for layout in recorded:
            self.unseen.pop(self._coordinates(layout), None)

    def ask(self) -> Layout | None:
        """The next layout to try, or None when every legal one was handed out."""
        if self.again:
            return self.again.pop(0)
        if not self.unseen:
            return None
        if isinstance(self.sampler.inner, SurrogateSampler) and self._asked() >= SURROGATE_TRIALS:
            self.sampler.inner = make_sampler("tpe", self.seed)
        trial = self.study.ask(self.distributions)
        layout = self.unseen.pop(tuple(trial.params[axis] for axis in self.axes))
        self.trials[layout] = trial
        return layout

    def give_back(self, layout: Layout) -> None:
        """Take back a layout that `ask` handed out and of which nothing was learnt: it is handed out again first."""
        self.again.append(layout)

    def tell(self, layout: Layout, result: TrialResult) -> None:
        """Report the outcome of a layout that `ask` handed out."""
        self._observe(result)
        self._report(layout, result)

    def _report(self, layout: Layout, result: TrialResult) -> None:
        """Tell the study of an outcome, once there are values to tell it with."""
        if result.status in (Status.PRUNED, Status.CANCELLED):  # neither says what it would have come to
            self.study.tell(self.trials[layout], state=TrialState.PRUNED)
            return
        if not self.good:
            self.deferred.append((layout, result))  # there are no values yet to be worse than
            return
        self._tell(layout, result)
        while self.deferred:
            self._tell(*self.deferred.pop())

    def _tell(self, layout: Layout, result: TrialResult) -> None:
        trial, comparison = self.trials[layout], self.goals.among(self.good)
        ok, oom = result.status == Status.OK, result.status == Status.OOM
        # Samplers require the same constraints of every trial; above zero is violated.
        trial.set_constraint("ran", FITS if ok or oom else EXCEEDS)
        trial.set_constraint("memory", self._excess_of_memory(layout, oom))
        for limit in self.goals.limits:
            name = f"{limit.metric}{limit.comparison}{limit.bound}"
            trial.set_constraint(name, comparison.excess(result, limit) if ok else 0.0)
        values = self.worst
        if ok:
            values |= {metric: value for metric in values if (value := comparison.value(result, metric)) is not None}
        self.study.tell(trial, list(values.values()))

    def _observe(self, result: TrialResult) -> None:
        """Learn from a trial, but for its place in the study: what the worst values are, and what fits in memory."""
        ok = result.status == Status.OK
        if ok:
            self.good.append(result)
        if self.memory is not None and (ok or result.status == Status.OOM):
            self.memory.observe(result.layout, result.metrics.get("peak_memory_gib") if ok else None, fits=ok)

    def _excess_of_memory(self, layout: Layout, exceeds: bool) -> float:
        share = None if self.memory is None else self.memory.share(layout)
        if share is None:
            return EXCEEDS if exceeds else FITS
        return max(share - 1, LEAST) if exceeds else min(share - 1, -LEAST)

    @property
    def worst(self) -> dict[str, float]:
        """The worst value so far of each objective, for trials that lack it.

        One that no trial has is 0: what this machine never measures is the same for all, and so decides nothing.
        """
        comparison = self.goals.among(self.good)
        values = {
            metric: [value for one in self.good if (value := comparison.value(one, metric)) is not None]
            for metric in self.goals.objectives
        }
        return {
            metric: max(values[metric], key=direction.cost, default=0.0)
            for metric, direction in self.goals.objectives.items()
        }

    def _asked(self) -> int:
        return len(self.study.get_trials(deepcopy=False))

    def _coordinates(self, layout: Layout) -> Coordinates:
        return tuple(
            self.rows[axis].place(layout.setting(axis))
            if self.rows[axis].ordered
            else values.index(layout.setting(axis))
            for axis, values in self.axes.items()
        )

    def _candidates(self) -> dict[Coordinates, float | None]:
        """What may be handed out, with the share of memory that it is estimated to need, None where that is not known.

        Points that are expected not to fit are left out while there are others, but where the sampler itself learns
        how far expectations can be trusted.
        """
        if self.memory is None:
            return dict.fromkeys(self.unseen)
        shares = {where: self.memory.share(layout) for where, layout in self.unseen.items()}
        weighed = self.memory.is_doubtful and isinstance(self.sampler.inner, SurrogateSampler)
        fitting = [where for where, share in shares.items() if weighed or share is None or share <= 1] or shares
        return {where: self.memory.prior(self.unseen[where]) for where in fitting}

    def _needed(self) -> dict[Coordinates, Needed]:
        """What layouts that were tried needed of memory."""
        needed = {} if self.memory is None else self.memory.needed
        return {self._coordinates(layout): shares for layout, shares in needed.items()}

    def _first(self) -> dict[str, Any] | None:
        """The next of the layouts to begin with."""
        for layout in self.first:
            if (where := self._coordinates(layout)) in self.unseen:
                return dict(zip(self.axes, where, strict=True))
        return None

    def _nearest(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The candidate nearest to `wanted`, each axis scaled to 1; another category is a whole axis away."""
        goal = tuple(wanted[axis] for axis in self.axes)
        spans = [
            axis.high - axis.low if isinstance(axis, FloatDistribution) else None
            for axis in self.distributions.values()
        ]
        candidates = self._candidates()

        def distance(layout: Coordinates) -> float:
            apart = zip(spans, layout, goal, strict=True)
            return sum(
                float(here != there) if span is None else abs(here - there) / span for span, here, there in apart
            )

        chosen = goal if goal in candidates else min(candidates, key=distance)
        return dict(zip(self.axes, chosen, strict=True))
