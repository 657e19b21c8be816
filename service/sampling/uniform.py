"""A sampler that draws evenly from what may be handed out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from service.sampling.surrogate import Coordinates


class UniformSampler(BaseSampler):
    """Each candidate is as likely as any other.

    Values drawn axis by axis would favour the edges of a space whose inside is partly illegal.
    """

    def __init__(
        self, space: dict[str, BaseDistribution], candidates: Callable[[], Collection[Coordinates]], seed: int
    ) -> None:
        self.space, self.candidates, self.random = space, candidates, Random(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return dict(zip(self.space, self.random.choice(list(self.candidates())), strict=True))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise NotImplementedError("all axes are drawn at once")
