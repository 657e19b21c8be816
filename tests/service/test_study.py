"""The study asks for legal points only, each once, learns from what it is told and keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from search_spaces.config import TrialConfig
from search_spaces.models import PRESETS
from search_spaces.rules import Workload
from search_spaces.space import enumerate_space
from service.study import STARTUP_TRIALS, SearchStudy, SnappingSampler
from trainables.result import TrialResult

SAMPLERS = ["tpe", "gp", "nsga2", "random"]
OBJECTIVES = {"tokens_per_s": "maximize", "joules_per_token": "minimize", "throttle_ratio": "minimize"}


def space(**axes: list[Any]) -> tuple[TrialConfig, ...]:
    fixed: dict[str, list[Any]] = {
        "engine": ["megatron"],
        "num_gpus": [8],
        "tensor_parallel_size": [1],
        "pipeline_parallel_size": [1],
        "zero_stage": [0],
        "micro_batch_size": [1],
        "recompute": ["none"],
        "sequence_parallel": [True],
        "compile": [False],
        "precision": ["bf16"],
    }
    shape = replace(PRESETS["tiny-llama"], heads=8, kv_heads=8)
    return enumerate_space(fixed | axes, Workload(shape, 128, 64)).points


POINTS = space(
    engine=["megatron", "deepspeed"],
    tensor_parallel_size=[1, 2, 4],
    zero_stage=[0, 3],
    micro_batch_size=[1, 2],
    recompute=["none", "full"],
)
FEW = space(engine=["megatron", "deepspeed"], tensor_parallel_size=[1, 2, 4], zero_stage=[0, 3])


def figures(config: TrialConfig) -> dict[str, float | None]:
    """A smooth table of outcomes: more parallelism costs speed, larger microbatches gain it, power follows speed."""
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    bubble = 0.4 * (pp - 1) / config.gradient_accumulation_steps
    lost = 0.15 * math.log2(tp) + bubble + 0.02 * config.zero_stage + 0.05 * (config.engine == "deepspeed")
    efficiency = (1 - 0.3 / (config.micro_batch_size + 1)) / (1 + lost)
    efficiency *= (1 - 0.25 * (config.recompute == "full")) * (1 + 0.12 * config.compile)
    rate = 1000 * config.num_gpus**0.9 * efficiency
    power = 200 + config.num_gpus * (300 + 400 * min(1.0, efficiency))
    return {"tokens_per_s": rate, "joules_per_token": power / rate, "throttle_ratio": 0.0, "peak_memory_gib": 60.0 / tp}


def outcome(config: TrialConfig, status: str = "ok", **changed: float | None) -> TrialResult:
    metrics = figures(config) | changed if status == "ok" else {}
    return TrialResult("t", config, status, None if status == "ok" else "why", metrics)


def make(sampler: str, points: tuple[TrialConfig, ...] = POINTS, seed: int = 0, **kwargs: Any) -> SearchStudy:
    return SearchStudy("search", points, OBJECTIVES, kwargs.pop("limits", []), sampler, seed, **kwargs)


def run(study: SearchStudy, trials: int) -> list[TrialConfig]:
    asked = []
    for _ in range(trials):
        config = study.ask()
        assert config is not None
        study.tell(config, outcome(config))
        asked.append(config)
    return asked


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_asks_each_legal_point_once_until_none_is_left(sampler: str) -> None:
    study = make(sampler, FEW)
    asked = run(study, len(FEW))
    assert len(FEW) > STARTUP_TRIALS
    assert sorted(asked, key=repr) == sorted(FEW, key=repr)
    assert study.ask() is None


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_seed_decides(sampler: str) -> None:
    trials = STARTUP_TRIALS + 2  # beyond the random start
    first, again, other = (run(make(sampler, seed=seed), trials) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("sampler", ["tpe", "gp", "nsga2"])
def test_learns(sampler: str) -> None:
    """What the sampler asks after its start depends on what it was told."""
    told, opposite = make(sampler), make(sampler)
    same = 0
    while (one := told.ask()) == opposite.ask():
        assert one is not None, "asked every point in the same order, whatever it was told"
        rate = figures(one)["tokens_per_s"]
        assert rate is not None
        told.tell(one, outcome(one))
        opposite.tell(one, outcome(one, tokens_per_s=1 / rate, joules_per_token=rate))
        same += 1
    assert same >= STARTUP_TRIALS


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_failures_break_nothing(sampler: str) -> None:
    """The first trials all fail, for all causes; later ones do now and then."""
    study = make(sampler, limits=[("peak_memory_gib", "<=", 40.0)])
    statuses = ["oom", "crash", "hang", "invalid"] * 3 + ["ok", "ok", "oom", "ok", "crash", "ok"]
    for status in statuses:
        config = study.ask()
        assert config is not None
        study.tell(config, outcome(config, status))
    trials = study.study.get_trials()
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * len(statuses)
    # A failure is told as no better than the worst success by then.
    for trial, status in zip(trials, statuses, strict=True):
        violated = {name for name, value in trial.constraints.items() if value > 0 and name != "peak_memory_gib<=40.0"}
        assert violated == ({"ok": set(), "oom": {"memory"}}.get(status, {"ran"}))
        if status != "ok":
            rates = [t.values[0] for t, s in zip(trials, statuses, strict=True) if s == "ok"]
            assert trial.values[0] in rates
    assert trials[0].values[0] == trials[12].values[0]  # put off until the first success


def test_a_failure_carries_the_worst_values_so_far() -> None:
    study = make("random")
    configs = [study.ask() for _ in range(4)]
    for config, rate, joules in zip(configs, (30.0, 10.0, 20.0), (0.1, 0.3, 0.5), strict=False):
        assert config is not None
        study.tell(config, outcome(config, tokens_per_s=rate, joules_per_token=joules))
    assert configs[3] is not None
    study.tell(configs[3], outcome(configs[3], "oom"))
    assert study.study.get_trials()[3].values == [10.0, 0.5, 0.0]


@pytest.mark.parametrize("throttle", [0.0, None])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_objective_that_is_constant_or_never_measured(sampler: str, throttle: float | None) -> None:
    study = make(sampler)
    for _ in range(STARTUP_TRIALS + 4):
        config = study.ask()
        assert config is not None
        study.tell(config, outcome(config, throttle_ratio=throttle))
    assert {trial.values[2] for trial in study.study.get_trials()} == {0.0}


def test_one_missing_value_is_not_the_best_one() -> None:
    """A window without energy, after a counter was reset, must not pass for a trial that took none."""
    study = make("random")
    for joules in (0.2, 0.4, None):
        config = study.ask()
        assert config is not None
        study.tell(config, outcome(config, joules_per_token=joules))
    assert [trial.values[1] for trial in study.study.get_trials()] == [0.2, 0.4, 0.4]


@pytest.mark.parametrize(
    ("limit", "value", "excess"),
    [
        (("peak_memory_gib", "<=", 40.0), 60.0, 0.5),
        (("peak_memory_gib", "<=", 40.0), 30.0, -0.25),
        (("tokens_per_s", ">=", 200.0), 100.0, 0.5),
        (("tokens_per_s", ">=", 200.0), 300.0, -0.5),
        (("throttle_ratio", "<=", 0.0), 0.1, 0.1),
        (("peak_memory_gib", "<=", 40.0), None, 0.0),
    ],
)
def test_limits_become_constraints(limit: tuple[str, str, float], value: float | None, excess: float) -> None:
    study = make("tpe", limits=[limit])
    config = study.ask()
    assert config is not None
    study.tell(config, outcome(config, "ok", **{limit[0]: value}))
    (trial,) = study.study.get_trials()
    assert trial.constraints[f"{limit[0]}{limit[1]}{limit[2]}"] == pytest.approx(excess)
    assert bool(study.study.best_trials) == (excess <= 0)


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_keeps_away_from_what_violates(sampler: str) -> None:
    """With a limit that tensor parallel 1 and 2 exceed, what is asked after the start is mostly tensor parallel 4."""
    points = space(
        tensor_parallel_size=[1, 2, 4], zero_stage=[0, 2, 3], micro_batch_size=[1, 2, 4], compile=[True, False]
    )
    asked = run(make(sampler, points, limits=[("peak_memory_gib", "<=", 20.0)]), 18)
    within = [config.tensor_parallel_size == 4 for config in asked]
    assert sum(within[STARTUP_TRIALS:]) / len(within[STARTUP_TRIALS:]) > len(
        [p for p in points if p.tensor_parallel_size == 4]
    ) / len(points)


def test_storage_keeps_the_trials(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/optuna.db"
    study = make("tpe", limits=[("peak_memory_gib", "<=", 40.0)], storage=storage)
    asked = run(study, 3)
    oom = study.ask()
    assert oom is not None
    study.tell(oom, outcome(oom, "oom"))

    kept = optuna.load_study(study_name="search", storage=storage).get_trials()
    assert [trial.state for trial in kept] == [TrialState.COMPLETE] * 4
    assert [trial.values[0] for trial in kept[:3]] == [figures(config)["tokens_per_s"] for config in asked]
    assert all(set(trial.constraints) == {"ran", "memory", "peak_memory_gib<=40.0"} for trial in kept)
    assert kept[3].constraints["memory"] > 0
    assert [study.axes["micro_batch_size"][trial.params["micro_batch_size"]] for trial in kept] == [
        config.micro_batch_size for config in [*asked, oom]
    ]


LISTS = space(
    pipeline_parallel_size=[1, 2],
    pipeline_schedule=["gpipe", "1f1b", "interleaved_1f1b"],
    virtual_pipeline_stages=[1, 2],
    stage_layers=[None, (1, 3), (3, 1), (1, 1, 1, 1)],
    zero_stage=[0, 1],
    bucket_size=[500_000_000, 10_000_000],
    rank_order=[None, (7, 6, 5, 4, 3, 2, 1, 0), (0, 2, 1, 3, 4, 5, 6, 7)],
    engine=["megatron", "deepspeed"],
    offload_optimizer=[False, True],
)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_axes_of_lists_words_and_switches_are_kept_in_a_database(sampler: str, tmp_path: Path) -> None:
    """What the database says of each trial leads back to the layout that was tried."""
    axes = ("stage_layers", "rank_order", "pipeline_schedule", "offload_optimizer", "bucket_size")
    assert all(len({getattr(point, axis) for point in LISTS}) > 1 for axis in axes)
    storage = f"sqlite:///{tmp_path}/optuna.db"
    study = make(sampler, LISTS, storage=storage)
    asked = run(study, STARTUP_TRIALS + 4)
    assert len(set(asked)) == len(asked)
    assert set(asked) <= set(LISTS)
    kept = optuna.load_study(study_name="search", storage=storage).get_trials()
    for config, trial in zip(asked, kept, strict=True):
        assert {axis: study.axes[axis][place] for axis, place in trial.params.items()} == {
            axis: getattr(config, axis) for axis in study.axes
        }


def test_lists_and_words_have_no_order() -> None:
    """The nearest to an illegal suggestion must not depend on which list happens to sort next to which."""
    study = make("tpe", LISTS)
    for axis, distribution in study.distributions.items():
        unordered = axis in ("engine", "stage_layers", "rank_order", "pipeline_schedule")
        assert isinstance(distribution, CategoricalDistribution if unordered else IntDistribution), axis
    assert study.axes["stage_layers"][0] is None
    assert study.axes["bucket_size"] == [10_000_000, 500_000_000]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_space_of_one_point(sampler: str) -> None:
    (point,) = space()
    study = make(sampler, (point,))
    assert run(study, 1) == [point]
    assert study.ask() is None


def test_trials_side_by_side() -> None:
    """Gangs ask before the others' trials are told; no point is handed out twice."""
    study = make("tpe", FEW)
    asked: list[TrialConfig] = []
    while (config := study.ask()) is not None:
        asked.append(config)
        if len(asked) % 3 == 0:
            for waiting in asked[-3:]:
                study.tell(waiting, outcome(waiting))
    assert sorted(asked, key=repr) == sorted(FEW, key=repr)


def dominated_area(found: list[TrialConfig]) -> float:
    """Area under the front of speed against energy, from 0 tokens/s and 2 J/token on."""
    area, energy = 0.0, 2.0
    for rate, joules in sorted(((f["tokens_per_s"], f["joules_per_token"]) for f in map(figures, found)), reverse=True):
        assert rate is not None
        assert joules is not None
        if joules < energy:
            area, energy = area + rate * (energy - joules), joules
    return area


def test_tpe_finds_the_front_sooner_than_chance() -> None:
    """Over ten seeds, in a space of over a thousand points; figures are exact for a seed, so this does not flicker."""
    points = space(
        engine=["megatron", "deepspeed"],
        num_gpus=[1, 2, 4, 8],
        tensor_parallel_size=[1, 2, 4, 8],
        pipeline_parallel_size=[1, 2, 4],
        zero_stage=[0, 1, 2, 3],
        micro_batch_size=[1, 2, 4, 8],
        recompute=["none", "full"],
        compile=[False, True],
    )
    assert len(points) > 1000
    whole = dominated_area(list(points))
    share = {
        sampler: sum(dominated_area(run(make(sampler, points, seed), 36)) for seed in range(10)) / (10 * whole)
        for sampler in ("tpe", "random")
    }
    assert share["tpe"] > share["random"] + 0.05


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_goes_on_where_it_was_broken_off(sampler: str, tmp_path: Path) -> None:
    """Results that were told, that were not, and none: each point gets one of them, and one trial in the end."""
    storage = f"sqlite:///{tmp_path}/optuna.db"
    broken = make(sampler, FEW, storage=storage)
    failed, untold, under_way = (broken.ask() for _ in range(3))
    assert failed is not None
    assert untold is not None
    assert under_way is not None
    broken.tell(failed, outcome(failed, "oom"))  # put off until there is a success
    told = run(broken, 2)
    later = broken.ask()
    assert later is not None
    broken.tell(later, outcome(later, "crash"))
    broken.study.ask({})  # broken off while it was asked for

    study = make(sampler, FEW, storage=storage)
    known = [outcome(failed, "oom"), outcome(untold), *map(outcome, told), outcome(later, "crash")]
    study.recall(known)
    assert study.worst["tokens_per_s"] == min(figures(config)["tokens_per_s"] or 0.0 for config in [untold, *told])
    assert study.ask() == under_way
    study.tell(under_way, outcome(under_way))
    rest = run(study, len(FEW) - len(known) - 1)
    assert sorted([*(result.config for result in known), under_way, *rest], key=repr) == sorted(FEW, key=repr)
    assert study.ask() is None
    trials = study.study.get_trials()
    assert len([trial for trial in trials if trial.state == TrialState.COMPLETE]) == len(FEW)
    assert [trial.state for trial in trials if trial.state != TrialState.COMPLETE] == [TrialState.FAIL]


def test_failures_alone_wait_for_a_success_after_a_break_too(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/optuna.db"
    failed = make("random", FEW, storage=storage).ask()
    assert failed is not None
    study = make("random", FEW, storage=storage)
    study.recall([outcome(failed, "crash")])
    (good,) = run(study, 1)
    assert [trial.values[0] for trial in study.study.get_trials()] == [figures(good)["tokens_per_s"]] * 2


def test_a_sampler_does_not_start_anew_after_a_break(tmp_path: Path) -> None:
    """In a large space the same draws as before would be answered by the nearest to what was tried already."""
    storage = f"sqlite:///{tmp_path}/optuna.db"
    first = run(make("random", storage=storage), 4)
    study = make("random", storage=storage)
    study.recall([outcome(config) for config in first])
    assert wanted_by(study) != wanted_by(make("random"))


def wanted_by(study: SearchStudy) -> list[tuple[int, ...]]:
    """What the study's sampler suggests for the next four trials, legal or not."""
    sampler, wanted = study.study.sampler, []
    assert isinstance(sampler, SnappingSampler)
    nearest = sampler.snap

    def snap(goal: Mapping[str, Any]) -> dict[str, Any]:
        wanted.append(tuple(goal[axis] for axis in study.axes))
        return nearest(goal)

    sampler.snap = snap
    run(study, 4)
    return wanted
