"""The study asks for legal points only, each once, learns from what it is told and keeps it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState

from search_spaces.hardware import ACCELERATORS
from search_spaces.layout import AXES, Layout
from search_spaces.memory import MemoryModel
from search_spaces.models import PRESETS
from search_spaces.space import enumerate_space
from search_spaces.workload import Workload
from service.errors import InputError
from service.goals import Goals, parse_constraint
from service.metrics import DIRECTIONS
from service.result import TrialResult
from service.sampling import study as study_module
from service.sampling.study import STARTUP_TRIALS, SearchStudy, SnappingSampler
from service.sampling.surrogate import SurrogateSampler
from trainables.status import Status

SAMPLERS = ["auto", "tpe", "gp", "nsga2", "random"]
# A suggestion of `gp` takes long: what this module's own code does with any sampler is tried with the others.
QUICK = ["auto", "tpe", pytest.param("gp", marks=pytest.mark.slow), "nsga2", "random"]
GOALS = Goals({name: DIRECTIONS[name] for name in ("tokens_per_s", "joules_per_token", "throttle_ratio")})


def space(**axes: list[Any]) -> tuple[Layout, ...]:
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
    return enumerate_space(fixed | axes, Workload(shape, 128, 64)).layouts


POINTS = space(
    engine=["megatron", "deepspeed"],
    tensor_parallel_size=[1, 2, 4],
    zero_stage=[0, 3],
    micro_batch_size=[1, 2],
    recompute=["none", "full"],
)
FEW = space(engine=["megatron", "deepspeed"], tensor_parallel_size=[1, 2, 4], zero_stage=[0, 3])


def figures(layout: Layout) -> dict[str, float | None]:
    """A smooth table of outcomes: more parallelism costs speed, larger microbatches gain it, power follows speed."""
    tp, pp = layout.tensor_parallel_size, layout.pipeline_parallel_size
    bubble = 0.4 * (pp - 1) / layout.gradient_accumulation_steps
    lost = 0.15 * math.log2(tp) + bubble + 0.02 * layout.zero_stage + 0.05 * (layout.engine == "deepspeed")
    efficiency = (1 - 0.3 / (layout.micro_batch_size + 1)) / (1 + lost)
    efficiency *= (1 - 0.25 * (layout.recompute == "full")) * (1 + 0.12 * layout.compile)
    rate = 1000 * layout.num_gpus**0.9 * efficiency
    power = 200 + layout.num_gpus * (300 + 400 * min(1.0, efficiency))
    return {"tokens_per_s": rate, "joules_per_token": power / rate, "throttle_ratio": 0.0, "peak_memory_gib": 60.0 / tp}


def outcome(layout: Layout, status: str = "ok", **changed: float | None) -> TrialResult:
    metrics = figures(layout) | changed if status == "ok" else {}
    return TrialResult("t", layout, Status(status), None if status == "ok" else "why", metrics)


def make(sampler: str, points: tuple[Layout, ...] = POINTS, seed: int = 0, **kwargs: Any) -> SearchStudy:
    limits = tuple(map(parse_constraint, kwargs.pop("constraints", ())))
    return SearchStudy("search", points, replace(GOALS, limits=limits), sampler, seed, **kwargs)


def layout_of(study: SearchStudy, trial: FrozenTrial) -> Layout:
    """The layout that a trial in the database is of."""
    values = {
        axis: choices[trial.params[axis]]
        if isinstance(study.distributions[axis], CategoricalDistribution)
        else choices[[AXES[axis].place(choice) for choice in choices].index(trial.params[axis])]
        for axis, choices in study.axes.items()
    }
    return replace(next(iter(study.trials)), **values)


def run(study: SearchStudy, trials: int) -> list[Layout]:
    asked = []
    for _ in range(trials):
        layout = study.ask()
        assert layout is not None
        study.tell(layout, outcome(layout))
        asked.append(layout)
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
    trials = STARTUP_TRIALS + 1  # beyond the random start
    first, again, other = (run(make(sampler, seed=seed), trials) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("sampler", QUICK[:-1])
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
    assert same >= (2 if sampler == "auto" else STARTUP_TRIALS)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_failures_break_nothing(sampler: str) -> None:
    """The first trials all fail, for all causes; later ones do now and then."""
    study = make(sampler, constraints=["peak_memory_gib<=40.0"])
    statuses = ["oom", "crash", "hang", "invalid"] * 3 + ["ok", "ok", "oom", "ok", "crash", "ok"]
    for status in statuses:
        layout = study.ask()
        assert layout is not None
        study.tell(layout, outcome(layout, status))
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
    layouts = [study.ask() for _ in range(4)]
    for layout, rate, joules in zip(layouts, (30.0, 10.0, 20.0), (0.1, 0.3, 0.5), strict=False):
        assert layout is not None
        study.tell(layout, outcome(layout, tokens_per_s=rate, joules_per_token=joules))
    assert layouts[3] is not None
    study.tell(layouts[3], outcome(layouts[3], "oom"))
    assert study.study.get_trials()[3].values == [10.0, 0.5, 0.0]


@pytest.mark.parametrize("throttle", [0.0, None])
@pytest.mark.parametrize("sampler", QUICK)
def test_an_objective_that_is_constant_or_never_measured(sampler: str, throttle: float | None) -> None:
    study = make(sampler)
    for _ in range(STARTUP_TRIALS + 4):
        layout = study.ask()
        assert layout is not None
        study.tell(layout, outcome(layout, throttle_ratio=throttle))
    assert {trial.values[2] for trial in study.study.get_trials()} == {0.0}


def test_one_missing_value_is_not_the_best_one() -> None:
    """A window without energy, after a counter was reset, must not pass for a trial that took none."""
    study = make("random")
    for joules in (0.2, 0.4, None):
        layout = study.ask()
        assert layout is not None
        study.tell(layout, outcome(layout, joules_per_token=joules))
    assert [trial.values[1] for trial in study.study.get_trials()] == [0.2, 0.4, 0.4]


@pytest.mark.parametrize(
    ("constraint", "value", "excess"),
    [
        ("peak_memory_gib<=40.0", 60.0, 0.5),
        ("peak_memory_gib<=40.0", 30.0, -0.25),
        ("tokens_per_s>=200.0", 100.0, 0.5),
        ("tokens_per_s>=200.0", 300.0, -0.5),
        ("throttle_ratio<=0.0", 0.1, 0.1),
        ("peak_memory_gib<=40.0", None, 0.0),
    ],
)
def test_constraints_are_told(constraint: str, value: float | None, excess: float) -> None:
    study = make("tpe", constraints=[constraint])
    layout = study.ask()
    assert layout is not None
    study.tell(layout, outcome(layout, "ok", **{constraint.partition("=")[0][:-1]: value}))
    (trial,) = study.study.get_trials()
    assert trial.constraints[constraint] == pytest.approx(excess)
    assert bool(study.study.best_trials) == (excess <= 0)


def test_a_value_that_others_have_and_a_constraint_needs_is_missed() -> None:
    study = make("tpe", constraints=["peak_memory_gib<=40.0"])
    for gib, violated in ((None, False), (30.0, False), (None, True)):
        layout = study.ask()
        assert layout is not None
        study.tell(layout, outcome(layout, peak_memory_gib=gib))
        assert (study.study.get_trials()[-1].constraints["peak_memory_gib<=40.0"] > 0) == violated


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("gp", marks=pytest.mark.slow)])
def test_keeps_away_from_what_violates(sampler: str) -> None:
    """With a limit that tensor parallel 1 and 2 exceed, what is asked after the start is mostly tensor parallel 4."""
    points = space(
        tensor_parallel_size=[1, 2, 4], zero_stage=[0, 2, 3], micro_batch_size=[1, 2, 4], compile=[True, False]
    )
    asked = run(make(sampler, points, constraints=["peak_memory_gib<=20.0"]), 18)
    within = [layout.tensor_parallel_size == 4 for layout in asked]
    assert sum(within[STARTUP_TRIALS:]) / len(within[STARTUP_TRIALS:]) > len(
        [p for p in points if p.tensor_parallel_size == 4]
    ) / len(points)


def test_storage_keeps_the_trials(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/optuna.db"
    study = make("tpe", constraints=["peak_memory_gib<=40.0"], storage=storage)
    asked = run(study, 3)
    oom = study.ask()
    assert oom is not None
    study.tell(oom, outcome(oom, "oom"))

    kept = optuna.load_study(study_name="search", storage=storage).get_trials()
    assert [trial.state for trial in kept] == [TrialState.COMPLETE] * 4
    assert [trial.values[0] for trial in kept[:3]] == [figures(layout)["tokens_per_s"] for layout in asked]
    assert all(set(trial.constraints) == {"ran", "memory", "peak_memory_gib<=40.0"} for trial in kept)
    assert kept[3].constraints["memory"] > 0
    assert [layout_of(study, trial) for trial in kept] == [*asked, oom]


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


def test_a_database_that_is_none_is_refused_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "optuna.db").write_text("this is no database, but text")
    storage = f"sqlite:///{tmp_path}/optuna.db"
    with pytest.raises(InputError, match=r"^.*/optuna\.db: cannot be read: [^\n]*not a database[^\n]*$"):
        SearchStudy("s", POINTS, GOALS, "random", 0, storage)
    with pytest.raises(InputError, match=r"^.*/optuna\.db: cannot be read: "):
        study_module.study_exists("s", storage)


@pytest.mark.parametrize("sampler", QUICK)
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
    assert [layout_of(study, trial) for trial in kept] == asked


def test_lists_and_words_have_no_order() -> None:
    """The nearest to an illegal suggestion must not depend on which list happens to sort next to which."""
    study = make("tpe", LISTS)
    for axis, distribution in study.distributions.items():
        unordered = axis in ("engine", "stage_layers", "rank_order", "pipeline_schedule")
        assert isinstance(distribution, CategoricalDistribution if unordered else FloatDistribution), axis
    assert study.axes["stage_layers"][0] is None
    assert study.axes["bucket_size"] == [10_000_000, 500_000_000]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_space_of_one_point(sampler: str) -> None:
    (point,) = space()
    study = make(sampler, (point,))
    assert run(study, 1) == [point]
    assert study.ask() is None


@pytest.mark.parametrize("sampler", ["auto", "tpe"])
def test_trials_side_by_side(sampler: str) -> None:
    """Gangs ask before the others' trials are told; no point is handed out twice."""
    study = make(sampler, FEW)
    asked: list[Layout] = []
    while (layout := study.ask()) is not None:
        asked.append(layout)
        if len(asked) % 3 == 0:
            for waiting in asked[-3:]:
                study.tell(waiting, outcome(waiting))
    assert sorted(asked, key=repr) == sorted(FEW, key=repr)


def dominated_area(found: list[Layout]) -> float:
    """Area under the front of speed against energy, from 0 tokens/s and 2 J/token on."""
    area, energy = 0.0, 2.0
    for rate, joules in sorted(((f["tokens_per_s"], f["joules_per_token"]) for f in map(figures, found)), reverse=True):
        assert rate is not None
        assert joules is not None
        if joules < energy:
            area, energy = area + rate * (energy - joules), joules
    return area


@pytest.mark.parametrize(("sampler", "trials"), [("auto", 18), ("tpe", 36)])
def test_finds_the_front_sooner_than_chance(sampler: str, trials: int) -> None:
    """Over some seeds, in a space of over a thousand points; figures are exact for a seed, so this does not flicker."""
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
    seeds, whole = range(6), dominated_area(list(points))
    found, chance = (
        sum(dominated_area(run(make(name, points, seed), trials)) for seed in seeds) / (len(seeds) * whole)
        for name in (sampler, "random")
    )
    assert found > chance + 0.05


def test_exhaustive_goes_through_all_in_their_order() -> None:
    assert run(make("exhaustive", FEW), len(FEW)) == list(FEW)
    assert run(make("exhaustive", FEW, first=[FEW[2]]), 4) == [FEW[2], FEW[0], FEW[1], FEW[3]]


def test_begins_with_what_it_is_told_to(tmp_path: Path) -> None:
    storage, first = f"sqlite:///{tmp_path}/optuna.db", FEW[3:7]
    elsewhere = replace(FEW[0], engine="another")
    study = make("tpe", FEW, storage=storage, first=[first[0], *first])
    asked = run(study, 2)
    study = make("tpe", FEW, storage=storage, first=first)
    study.recall([outcome(layout) for layout in asked])
    assert [*asked, *run(study, 2)] == list(first)
    assert sorted([*first, *run(study, len(FEW) - 4)], key=repr) == sorted(FEW, key=repr)
    assert elsewhere not in FEW
    assert run(make("tpe", FEW, first=[elsewhere]), 1)[0] in FEW


def test_what_is_given_back_is_handed_out_again_first() -> None:
    study = make("auto", FEW)
    layout = study.ask()
    assert layout is not None
    study.give_back(layout)
    assert study.ask() == layout
    study.tell(layout, outcome(layout))
    assert len(study.study.get_trials()) == 1


@pytest.mark.parametrize("sampler", QUICK)
def test_trials_that_were_stopped_early_are_not_told_as_complete(sampler: str) -> None:
    study = make(sampler, FEW)
    statuses = (["pruned", "ok", "cancelled", "ok"] * len(FEW))[: len(FEW)]
    asked = []
    for status in statuses:
        layout = study.ask()
        assert layout is not None
        asked.append(layout)
        study.tell(layout, outcome(layout, status))
    states = {"pruned": TrialState.PRUNED, "cancelled": TrialState.PRUNED, "ok": TrialState.COMPLETE}
    assert [trial.state for trial in study.study.get_trials()] == [states[status] for status in statuses]
    assert len(set(asked)) == len(asked)


def test_auto_goes_over_to_tpe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_module, "SURROGATE_TRIALS", 10)
    study = make("auto")
    run(study, 10)
    assert isinstance(study.sampler.inner, SurrogateSampler)
    run(study, 1)
    assert isinstance(study.sampler.inner, TPESampler)


def test_sizes_lie_apart_by_their_ratio() -> None:
    """Of 1, 2, 3 and 8, 3 is nearer to 2 than to 8, and in the middle between both ends is 3, not 2."""
    points = space(micro_batch_size=[1, 2, 8], tensor_parallel_size=[1, 2]) + tuple(
        replace(point, micro_batch_size=3) for point in space(tensor_parallel_size=[1, 2])
    )
    study = make("random", points)
    goal = {"tensor_parallel_size": 1.0, "micro_batch_size": 1.7}
    assert study.axes == {
        "micro_batch_size": [1, 2, 3, 8],
        "tensor_parallel_size": [1, 2],
        "sequence_parallel": [False, True],
    }
    nearest = study._nearest(goal | {"sequence_parallel": 1.0})
    assert nearest["micro_batch_size"] == pytest.approx(math.log2(3))


WORK = Workload(PRESETS["llama3-8b"], 8192, 16, ACCELERATORS["h200"])


def tight() -> tuple[list[Layout], MemoryModel]:
    """Layouts of which some exceed the memory of an H200, a few of them just so."""
    layouts = [
        Layout("megatron", 4, 16, zero_stage=zero, micro_batch_size=micro, recompute=recompute, compile=compiled)
        for zero in (1, 2, 3)
        for micro in (1, 2, 4)
        for recompute in ("none", "full")
        for compiled in (False, True)
    ]
    return layouts, MemoryModel(WORK)


def share(memory: MemoryModel, layout: Layout) -> float:
    found = memory.share(layout)
    assert found is not None
    return found


@pytest.mark.parametrize("sampler", ["auto", "tpe", "random"])
def test_what_does_not_fit_comes_last(sampler: str) -> None:
    points, memory = tight()
    exceeding = {point for point in points if share(memory, point) > 1}
    study = SearchStudy("search", points, GOALS, sampler, 0, memory=memory)
    asked = []
    while (layout := study.ask()) is not None:
        study.tell(layout, outcome(layout, peak_memory_gib=None))
        asked.append(layout)
    assert 2 <= len(exceeding) <= len(points) / 2
    assert set(asked[-len(exceeding) :]) == exceeding


def test_memory_is_as_well_known_after_a_break_as_before(tmp_path: Path) -> None:
    """One of the results had not been told."""
    points, memory = tight()
    fitting, storage = [point for point in points if share(memory, point) < 0.9], f"sqlite:///{tmp_path}/optuna.db"
    study = SearchStudy("search", points, GOALS, "auto", 0, storage, first=fitting[:3], memory=memory)
    told, untold, _ = (study.ask() for _ in range(3))
    assert told is not None
    assert untold is not None
    results = [outcome(layout, peak_memory_gib=share(memory, layout) * 150) for layout in (told, untold)]
    study.tell(told, results[0])
    again = SearchStudy("search", points, GOALS, "auto", 0, storage, memory=tight()[1])
    again.recall(results)
    memory.observe(untold, results[1].metrics["peak_memory_gib"], fits=True)
    assert again.memory is not None
    assert share(again.memory, fitting[-1]) == share(memory, fitting[-1]) > share(tight()[1], fitting[-1])


def test_out_of_memory_is_told_by_how_much_and_teaches_what_fits() -> None:
    points, memory = tight()
    fitting = [point for point in points if share(memory, point) <= 1]
    by_share = sorted(fitting, key=lambda point: share(memory, point))
    smallest, failing, largest = by_share[0], by_share[-2], by_share[-1]
    study = SearchStudy("search", fitting, GOALS, "auto", 0, first=[smallest, failing], memory=memory)
    for layout, status in ((smallest, "ok"), (failing, "oom")):
        assert study.ask() == layout
        study.tell(layout, outcome(layout, status, peak_memory_gib=None))
    ok, oom = (trial.constraints["memory"] for trial in study.study.get_trials())
    assert ok == pytest.approx(share(MemoryModel(WORK), smallest) - 1)
    assert oom == pytest.approx(max(share(memory, failing) - 1, 0.01))
    for _ in range(6):  # that all of its kind take more than predicted
        memory.observe(failing, 1.1 * 138, fits=True)
    assert share(memory, largest) > 1
    assert largest not in study._candidates()
    assert all(estimated is not None and estimated < 1 for estimated in study._candidates().values())
    needed = study._needed()[study._coordinates(failing)]
    assert needed.fits
    assert needed.after is not None
    assert needed.before < 1 < needed.after


@pytest.mark.parametrize("sampler", QUICK)
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
    assert study.worst["tokens_per_s"] == min(figures(layout)["tokens_per_s"] or 0.0 for layout in [untold, *told])
    assert study.ask() == under_way
    study.tell(under_way, outcome(under_way))
    rest = run(study, len(FEW) - len(known) - 1)
    assert sorted([*(result.layout for result in known), under_way, *rest], key=repr) == sorted(FEW, key=repr)
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
    study.recall([outcome(layout) for layout in first])
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


def test_random_draws_evenly() -> None:
    """Also of points with a gap between them, next to which a value drawn on its axis would fall more often."""
    points = [Layout("megatron", 8, 64, tensor_parallel_size=size) for size in (1, 4, 8)]
    first = Counter(SearchStudy("search", points, GOALS, "random", seed).ask() for seed in range(150))
    assert all(first[point] in range(30, 71) for point in points)
