"""The Optuna study behind a search: which legal point to try next, and what became of the ones tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import Trial, TrialState

from search_spaces.config import TrialConfig
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
        self.axes = {
            axis: sorted({point.to_dict()[axis] for point in points})
            for axis in TrialConfig.__dataclass_fields__
            if len({point.to_dict()[axis] for point in points}) > 1
        }
        self.distributions: dict[str, BaseDistribution] = {
            axis: CategoricalDistribution(range(len(values)))
            if isinstance(values[0], str)
            else IntDistribution(0, len(values) - 1)
            for axis, values in self.axes.items()
        }
        self.unseen = {self._coordinates(point): point for point in points}
        self.trials: dict[TrialConfig, Trial] = {}
        self.worst: dict[str, float] = {}
        self.deferred: list[tuple[TrialConfig, TrialResult]] = []
        self.study = optuna.create_study(
            storage=storage,
            study_name=name,
            sampler=make_sampler(sampler, seed),
            directions=list(self.objectives.values()),
        )

    def ask(self) -> TrialConfig | None:
        """The next point to try, or None when every legal point was handed out."""
        if not self.unseen:
            return None
        trial = self.study.ask(self.distributions)
        wanted = tuple(trial.params[axis] for axis in self.axes)
        chosen = min(self.unseen, key=lambda point: self._distance(point, wanted))
        if chosen != wanted:
            self.study.tell(trial, state=TrialState.FAIL)
            self.study.enqueue_trial(dict(zip(self.axes, chosen, strict=True)))
            trial = self.study.ask(self.distributions)
        config = self.unseen.pop(chosen)
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
        for metric, sense, bound in self.limits:
            value = result.metrics.get(metric)
            scale = abs(bound) or 1.0
            excess = 0.0 if value is None else (value - bound) / scale
            trial.set_constraint(f"{metric}{sense}{bound}", excess if sense == "<=" else -excess)
        if ok:
            # A metric that this machine cannot measure is the same for all points and so decides nothing.
            values = {metric: result.metrics.get(metric) or 0.0 for metric in self.objectives}
            for metric, value in values.items():
                worse = min if self.objectives[metric] == "maximize" else max
                self.worst[metric] = worse(self.worst.get(metric, value), value)
        else:
            values = self.worst
        self.study.tell(trial, [values[metric] for metric in self.objectives])

    def _coordinates(self, point: TrialConfig) -> tuple[int, ...]:
        values = point.to_dict()
        return tuple(choices.index(values[axis]) for axis, choices in self.axes.items())

    def _distance(self, point: tuple[int, ...], wanted: tuple[Any, ...]) -> float:
        """Steps along the ordinal axes, each axis scaled to 1; another category is as far as the whole axis."""
        total = 0.0
        for axis, here, there in zip(self.axes, point, wanted, strict=True):
            if isinstance(self.distributions[axis], CategoricalDistribution):
                total += here != there
            else:
                total += abs(here - there) / max(1, len(self.axes[axis]) - 1)
        return total
