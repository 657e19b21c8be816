"""The searcher hands out layouts while the budget lasts and tells the study what became of each."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from ray.tune.search import Searcher

from search_spaces.config import TrialConfig
from search_spaces.models import PRESETS
from search_spaces.rules import Workload
from search_spaces.space import enumerate_space
from service.searcher import StudySearcher, outcome_of
from service.spec import BudgetSpec
from service.study import SearchStudy
from trainables.result import TrialResult

AXES: dict[str, list[Any]] = {
    "engine": ["megatron"],
    "num_gpus": [2],
    "tensor_parallel_size": [1, 2],
    "pipeline_parallel_size": [1],
    "zero_stage": [0, 3],
    "micro_batch_size": [1, 2],
    "recompute": ["none"],
    "sequence_parallel": [True],
    "compile": [False],
    "precision": ["fp32"],
}
POINTS = enumerate_space(AXES, Workload(PRESETS["tiny-llama"], 128, 8)).points


def make(**budget: Any) -> StudySearcher:
    study = SearchStudy("search", POINTS, {"tokens_per_s": "maximize"}, [], "random", 0)
    return StudySearcher(study, BudgetSpec(**budget))


def suggested(searcher: StudySearcher, trial_id: str) -> TrialConfig | None:
    values = searcher.suggest(trial_id)
    if values == Searcher.FINISHED:
        return None
    assert isinstance(values, dict)
    return TrialConfig.from_dict(values)


def complete(searcher: StudySearcher, trial_id: str, config: TrialConfig) -> None:
    result = TrialResult(trial_id, config, "ok", metrics={"tokens_per_s": 1.0})
    searcher.on_trial_complete(trial_id, {"result": json.dumps(result.to_dict()), "done": True})


def test_ends_when_the_trials_are_used_up() -> None:
    searcher = make(trials=3)
    assert [suggested(searcher, str(i)) is None for i in range(5)] == [False, False, False, True, True]


def test_ends_when_the_space_is_used_up() -> None:
    searcher = make(trials=100)
    configs = [suggested(searcher, str(i)) for i in range(len(POINTS) + 1)]
    assert set(configs[:-1]) == set(POINTS)
    assert configs[-1] is None


def test_ends_when_the_wall_time_is_used_up() -> None:
    searcher = make(wall_time_s=0.2)
    assert suggested(searcher, "a") is not None
    time.sleep(0.25)
    assert suggested(searcher, "b") is None


def test_ends_when_the_gpu_hours_are_used_up() -> None:
    """A trial of 0.1 s on two GPUs is 0.2 GPU-seconds."""
    for hours, goes_on in ((0.15 / 3600, False), (10 / 3600, True)):
        searcher = make(gpu_hours=hours)
        config = suggested(searcher, "a")
        assert config is not None
        time.sleep(0.1)
        complete(searcher, "a", config)
        assert searcher.gpu_seconds == pytest.approx(0.2, abs=0.1)
        assert (suggested(searcher, "b") is not None) == goes_on


def test_ends_when_it_is_stopped() -> None:
    searcher = make()
    assert suggested(searcher, "a") is not None
    searcher.stopped = True
    assert suggested(searcher, "b") is None


@pytest.mark.parametrize("reported", [None, {}, {"training_iteration": 0}])
def test_a_trial_that_reported_nothing_has_crashed(reported: dict[str, Any] | None) -> None:
    searcher = make()
    config, other = suggested(searcher, "a"), suggested(searcher, "b")
    assert config is not None
    assert other is not None
    searcher.on_trial_complete("a", reported, error=True)
    complete(searcher, "b", other)
    crashed, fine = searcher.study.study.get_trials()
    assert crashed.constraints["ran"] > 0
    assert fine.constraints["ran"] <= 0

    result = outcome_of("a", config, reported)
    assert (result.trial_id, result.config, result.status) == ("a", config, "crash")
    assert result.cause
    assert "\n" not in result.cause


def test_an_outcome_comes_through_unchanged() -> None:
    result = TrialResult("a", POINTS[0], "oom", "out of memory on rank 1")
    assert outcome_of("a", POINTS[0], {"result": json.dumps(result.to_dict())}) == result
