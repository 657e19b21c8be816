"""The Optuna study behind a search: which legal point to try next, and what became of the ones tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from search_spaces.config import TrialConfig
from service.spec import excess
from service.store import sqlite_file
from trainables.result import TrialResult

optuna.logging.set_verbosity(optuna.logging.ERROR)

STARTUP_TRIALS = 8


def make_sampler(name: str, seed: int) -> BaseSampler:
    """One of Optuna's samplers; each takes several objectives and, random apart, constraints."""
    samplers = {
        "tpe": lambda: TPESampler(seed=seed, multivariate=True, n_startup_trials=STARTUP_TRIALS),
        "gp": lambda: GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS),
        "nsga2": lambda: NSGAIISampler(seed=seed, population_size=STARTUP_TRIALS),
        "random": lambda: RandomSampler(seed=seed),
    }
    return samplers[name]()


def study_exists(name: str, storage: str) -> bool:
    """Whether the database at an Optuna URL is there and has a study of this name."""
    database = sqlite_file(storage)
    return (database is None or database.exists()) and name in optuna.get_all_study_names(storage)


class SnappingSampler(BaseSampler):
    """Moves each suggestion of another sampler to the point that `snap` answers with.

    So every trial of the study is one that is really run; samplers that breed from their own trials need that.
    """

    def __init__(
        self,
        inner: BaseSampler,
        space: dict[str, BaseDistribution],
        snap: Callable[[Mapping[str, Any]], dict[str, Any]],
    ) -> None:
        self.inner, self.space, self.snap = inner, space, snap

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
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
    """Asks for legal points only, each once.

    Numeric axes are ordinals: the position of a value among those that legal points take. A suggestion that is not
    legal, or was tried, is replaced by the nearest point that is neither. Failed trials are told as complete trials
    that violate a constraint, with the worst values seen, so that the sampler learns to keep away.
    """

    def __init__(
        self,
        name: str,
        points: Sequence[TrialConfig],
        objectives: Mapping[str, str],
        limits: Sequence[tuple[str, str, float]],
        sampler: str,
        seed: int,
        storage: str | None = None,
    ) -> None:
        """`limits` are (metric, '<=' or '>=', bound); `storage` is an Optuna URL, None keeps the study in memory."""
        self.objectives, self.limits = dict(objectives), list(limits)
        taken = {axis: {getattr(point, axis) for point in points} for axis in TrialConfig.__dataclass_fields__}
        self.axes: dict[str, list[Any]] = {
            axis: sorted(values, key=_ordered) for axis, values in taken.items() if len(values) > 1
        }
        self.distributions: dict[str, BaseDistribution] = {
            axis: IntDistribution(0, len(values) - 1)
            if _is_numeric(values)
            else CategoricalDistribution(range(len(values)))
            for axis, values in self.axes.items()
        }
        self.spans = [len(values) - 1 if _is_numeric(values) else None for values in self.axes.values()]
        self.unseen = {self._coordinates(point): point for point in points}
        self.trials: dict[TrialConfig, Trial] = {}
        self.worst: dict[str, float] = {}
        self.deferred: list[tuple[TrialConfig, TrialResult]] = []
        self.again: list[TrialConfig] = []
        self.study = optuna.create_study(
            storage=storage,
            study_name=name,
            directions=[StudyDirection[direction.upper()] for direction in self.objectives.values()],
            load_if_exists=True,
        )
        # A sampler that started anew from the same seed would want the same points as before.
        asked = len(self.study.get_trials(deepcopy=False))
        self.study.sampler = SnappingSampler(make_sampler(sampler, seed + asked), self.distributions, self._nearest)

    def recall(self, results: Sequence[TrialResult]) -> None:
        """Go on with a study that was broken off; `results` are all that came of it.

        They need not have been told to the study. What it was asked for without result, `ask` hands out before others.
        """
        recorded = {result.config: result for result in results}
        for result in results:
            if result.status == "ok":
                self._values(result)
        for left in self.study.get_trials(states=[TrialState.RUNNING]):
            if set(left.params) != set(self.axes):  # broken off while it was asked for
                self.study.tell(left.number, state=TrialState.FAIL)
                continue
            config = self.unseen.pop(tuple(left.params[axis] for axis in self.axes))
            self.trials[config] = Trial(self.study, left._trial_id)
            if config in recorded:
                self.tell(config, recorded[config])
            else:
                self.again.append(config)
        for config in recorded:
            self.unseen.pop(self._coordinates(config), None)

    def ask(self) -> TrialConfig | None:
        """The next point to try, or None when every legal point was handed out."""
        if self.again:
            return self.again.pop(0)
        if not self.unseen:
            return None
        trial = self.study.ask(self.distributions)
        config = self.unseen.pop(tuple(trial.params[axis] for axis in self.axes))
        self.trials[config] = trial
        return config

    def tell(self, config: TrialConfig, result: TrialResult) -> None:
        """Report the outcome of a point that `ask` handed out."""
        if result.status != "ok" and not self.worst:
            self.deferred.append((config, result))  # there are no values yet to be worse than
            return
        self._tell(config, result)
        while self.deferred and self.worst:
            self._tell(*self.deferred.pop())

    def _tell(self, config: TrialConfig, result: TrialResult) -> None:
        trial, ok = self.trials[config], result.status == "ok"
        # Samplers require the same constraints of every trial; above zero is violated.
        trial.set_constraint("ran", -1.0 if ok or result.status == "oom" else 1.0)
        trial.set_constraint("memory", 1.0 if result.status == "oom" else -1.0)
        for limit in self.limits:
            trial.set_constraint("".join(map(str, limit)), excess(limit, result.metrics))
        values = self._values(result) if ok else self.worst
        self.study.tell(trial, [values[metric] for metric in self.objectives])

    def _values(self, result: TrialResult) -> dict[str, float]:
        """The objectives of a trial that ended well, which the worst so far take in."""
        values = {}
        for metric in self.objectives:
            value = result.metrics.get(metric)
            if value is None:  # one that this machine never measures is the same for all and so decides nothing
                value = self.worst.get(metric, 0.0)
            values[metric] = value
            worse = min if self.objectives[metric] == "maximize" else max
            self.worst[metric] = worse(self.worst.get(metric, value), value)
        return values

    def _coordinates(self, point: TrialConfig) -> tuple[int, ...]:
        return tuple(choices.index(getattr(point, axis)) for axis, choices in self.axes.items())

    def _nearest(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The unseen point fewest steps from `wanted`, each axis scaled to 1; another category is a whole axis away."""
        goal = tuple(wanted[axis] for axis in self.axes)

        def distance(point: tuple[int, ...]) -> float:
            return sum(
                (here != there) if span is None else abs(here - there) / span
                for span, here, there in zip(self.spans, point, goal, strict=True)
            )

        chosen = goal if goal in self.unseen else min(self.unseen, key=distance)
        return dict(zip(self.axes, chosen, strict=True))


def _is_numeric(values: Sequence[Any]) -> bool:
    """Whether an axis has an order: text, lists and their default have none."""
    return all(isinstance(value, int) for value in values)


def _ordered(value: Any) -> Any:
    return () if value is None else value
