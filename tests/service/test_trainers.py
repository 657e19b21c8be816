"""Trainers in specs: what is read, refused and recorded of them, and which of them a cluster runs."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import tomllib
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.coefficients import data_sheet
from search_spaces.layout import AXES, Layout
from search_spaces.trainer import Trainer
from service import jobs
from service.answers.why import why
from service.checks import check
from service.cli import main
from service.errors import InputError
from service.plan import make_plan, text
from service.problem import Problem
from service.record import store
from service.result import Purpose
from service.sampling.study import SearchStudy
from service.sampling.warmup import open_study
from service.spec import dump_spec, load_spec, make_problem, parse_spec
from service.trainers import check_allowed, is_ready, load, ready_trainers
from service.trials import toml
from service.trials.evaluate import make_request, program_of
from trainables.command import Command, LogPatterns
from trainables.logs import LOGS

ROOT = Path(__file__).parents[2]
TRAINER: dict[str, Any] = {
    "name": "mine",
    "command": [
        "python",
        "train.py",
        "--micro-batch={micro_batch_size}",
        "--seed",
        "{seed}",
        "--config={trial_dir}/run.toml",
        {"when": "compile", "args": ["--compile"]},
    ],
    "environment": {"NCCL_ALGO": "{nccl_algo}", "OMP_NUM_THREADS": 1},
    "files": {"run.toml": {"batch": "{global_batch_size // (micro_batch_size * data_parallel_size)}", "a": {"b": "x"}}},
    "axes": {"micro_batch_size": [1, 2], "compile": "any", "zero_stage": "any", "nccl_algo": ["Ring", "Tree"]},
    "rules": ["nccl_algo == 'Ring' or micro_batch_size == 2"],
    "out_of_memory": ["no room for"],
    "predicted_as": "megatron-lm",
}
PLAIN: dict[str, Any] = {"command": ["x"], "environment": {}, "files": {}, "axes": {}, "rules": []}
SPEC: dict[str, Any] = {
    "name": "own",
    "trainer": TRAINER,
    "sequence_length": 32,
    "global_batch_size": 8,
    "cluster": {"gpus_per_node": 2, "accelerator": "cpu"},
}


def spec(trainer: dict[str, Any] | None = None, /, **changes: Any) -> Problem:
    return make_problem({**deepcopy(SPEC), "trainer": {**deepcopy(TRAINER), **(trainer or {})}, **changes})


def test_a_trainer_s_layouts() -> None:
    problem = spec()
    assert [layout.label for layout in problem.legal.layouts] == [
        "mine 2gpu dp2 zero0 mbs1 nccl_algo=Ring",
        "mine 2gpu dp2 zero0 mbs2 nccl_algo=Ring",
        "mine 2gpu dp2 zero0 mbs2 nccl_algo=Tree",
    ]
    narrowed = spec(space={"nccl_algo": "Tree", "compile": [True, False], "num_gpus": [1, 2]})
    assert {layout.setting("nccl_algo") for layout in narrowed.legal.layouts} == {"Tree"}
    assert {layout.compile for layout in narrowed.legal.layouts} == {True, False}
    assert narrowed.axes["precision"] == [AXES["precision"].idle]
    assert narrowed.gang_size == 2


@pytest.mark.parametrize(
    "problem",
    [
        spec(),
        spec(model="tiny-llama", data="synthetic", space={"nccl_algo": ["Tree"], "zero_stage": [0, 3]}),
        spec(PLAIN | {"steps": "nemo", "axes": {"share": [0.5, 1], "buckets": [1, 8], "fused": [True, False]}}),
        spec(PLAIN | {"steps": {"step": "step (?P<step>.)"}}),
    ],
)
def test_what_is_recorded_is_read_back(problem: Problem) -> None:
    assert parse_spec(dump_spec(problem)) == problem
    assert pickle.loads(pickle.dumps(problem)) == problem
    for layout in problem.legal.layouts:
        params = {name: store.to_param(value) for name, value in layout.to_dict().items()}
        assert Layout.from_dict({name: store.from_param(text) for name, text in params.items()}) == layout
    assert json.loads(json.dumps(problem.facts()))["trainer"] == "mine"


def test_numbers_of_one_axis_are_of_one_kind() -> None:
    assert spec(PLAIN | {"axes": {"share": [0.5, 1]}}).axes["share"] == [0.5, 1.0]


FAULTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"name": "megatron"}, {}, "trainer.name: megatron is one of Wattune's own engines"),
    ({"name": "../mine"}, {}, "trainer.name: must be letters, digits"),
    ({"command": []}, {}, "trainer.command: must not be empty"),
    ({"command": "python train.py"}, {}, "trainer.command: must be a valid list"),
    ({"command": ["python", None]}, {}, "trainer.command: must be a valid string"),
    (
        {"command": ["python", {"if": "compile", "args": []}]},
        {},
        "trainer.command.if: unknown field; allowed: when, args",
    ),
    ({"commnd": ["python"]}, {}, "trainer.commnd: unknown field; allowed: name, command"),
    ({"command": ["python", "{micro_batch}"]}, {}, "trainer.command[1]: '{micro_batch}': unknown name 'micro_batch'"),
    ({"command": ["python", "{hidden}"]}, {}, "trainer.command[1]: '{hidden}': unknown name 'hidden'"),
    ({"command": ["python", "a{"]}, {}, "trainer.command[1]: 'a{': '{' stands alone"),
    ({"command": ["python", "{open('/etc/passwd')}"]}, {}, "is not let in; there are numbers"),
    (
        {"command": [{"when": "zero_stage", "args": ["x"]}]},
        {},
        "command[0].when: 'zero_stage': it is 0, not true or false",
    ),
    ({"environment": {"A B": "x"}}, {}, "trainer.environment"),
    ({"environment": {"A": "{nccl_algo * 2}"}}, {}, "trainer.environment.A: '{nccl_algo * 2}': 'Ring' is a text"),
    ({"files": {"../../run.json": {}}}, {}, "trainer.files"),
    ({"files": {"run.ini": {}}}, {}, "trainer.files"),
    ({"files": {"run.json": {"a": "{x}"}}}, {}, "trainer.files.run.json: '{x}': unknown name 'x'"),
    ({"files": {"run.json": {"a": float("nan")}}}, {}, "trainer.files: run.json: takes texts, numbers"),
    ({"axes": {"num_gpus": [1]}}, {}, "trainer.axes: num_gpus is no matter of the program"),
    ({"axes": {"engine": ["x"]}}, {}, "trainer.axes: engine is of Wattune's own engines alone"),
    ({"axes": {"stage_layers": "any"}}, {}, "trainer.axes: stage_layers is of Wattune's own engines alone"),
    ({"axes": {"zero_stage": [4]}}, {}, "trainer.axes: zero_stage: must be less than or equal to 3; any for all"),
    ({"axes": {"recompute": ["half"]}}, {}, "trainer.axes: recompute: must be 'none', 'selective' or 'full'; any"),
    ({"axes": {"Nccl": ["Ring"]}}, {}, "trainer.axes: 'Nccl': the name of an axis is of small letters"),
    ({"axes": {"lambda": ["a"]}}, {}, "trainer.axes: 'lambda': the name of an axis"),
    ({"axes": {"hidden": [1]}}, {}, "trainer.axes: hidden means something else already"),
    ({"axes": {"data_parallel_size": [1]}}, {}, "trainer.axes: data_parallel_size means something else already"),
    ({"axes": {"kind": [1, "a"]}}, {}, "trainer.axes: kind: values are a list of words, of numbers, or of true"),
    ({"axes": {"kind": [1, True]}}, {}, "trainer.axes: kind: values are"),
    ({"axes": {"kind": []}}, {}, "trainer.axes: kind: values are"),
    ({"axes": {"kind": None}}, {}, "trainer.axes: kind: values are"),
    ({"axes": {"kind": ["a b"]}}, {}, "trainer.axes: kind: 'a b': a word is of letters"),
    ({"axes": {"kind": ["null"]}}, {}, "trainer.axes: kind: 'null': a word is of letters"),
    ({"axes": {"kind": [10**30]}}, {}, "trainer.axes: kind: 1000000000000000000000000000000: numbers are at most"),
    ({"rules": ["heads % 2 == 0"]}, {}, "trainer.rules[0]: 'heads % 2 == 0': unknown name 'heads'"),
    ({"rules": ["2 ** 9 ** 9 > 1"]}, {}, "trainer.rules[0]: '2 ** 9 ** 9 > 1': '2 ** 9 ** 9' is not let in"),
    ({"rules": ["micro_batch_size"]}, {}, "trainer.rules[0]: 'micro_batch_size': it is 1, not true or false"),
    ({"rules": ["nccl_algo == 'Tree' and nccl_algo == 'Ring'"]}, {}, "space: no legal layout among 4"),
    ({"steps": "guess"}, {}, "trainer.steps: must be hook, megatron-lm"),
    ({"steps": {"step": "step"}}, {}, "trainer.steps.step: 'step' has no group (?P<step>...)"),
    ({"steps": {"step": "("}}, {}, "trainer.steps.step: '(' is no regular expression"),
    ({"steps": {"stp": "x"}}, {}, "trainer.steps.stp: unknown field; allowed: step, memory"),
    ({"out_of_memory": ["("]}, {}, "trainer.out_of_memory: '(' is no regular expression"),
    ({"predicted_as": "nemo"}, {}, "trainer.predicted_as: 'nemo': must be one of megatron-earlier, megatron-lm"),
    ({}, {"measurement": {"short_trials": True}}, "measurement.short_trials: a trainer's program"),
    ({}, {"depth_proxy": [1, 2], "model": "tiny-llama"}, "depth_proxy: a trainer's program has the layers"),
    ({}, {"borderline": "probe"}, "borderline: what a trainer's program needs"),
    ({}, {"space": {"engine": "megatron"}}, "space.engine: the trainer mine stands for it"),
    (
        {},
        {"space": {"recompute": "full"}},
        "space.recompute: the trainer mine has no such axis; it has micro_batch_size",
    ),
    ({}, {"space": {"nccl_alg": "Ring"}}, "space.nccl_alg: the trainer mine has no such axis"),
    ({}, {"space": {"nccl_algo": "Mesh"}}, 'space.nccl_algo: the trainer mine has not "Mesh"; it has "Ring", "Tree"'),
    ({}, {"space": {"micro_batch_size": [4]}}, "space.micro_batch_size: the trainer mine has not 4; it has 1, 2"),
    ({}, {"space": {"num_gpus": [3]}}, "space.num_gpus: 3 is more than the cluster's 2"),
    ({}, {"baseline": {"nccl_algo": "Mesh"}}, "baseline: none of the 3 legal layouts is like that"),
    ({}, {"trainer": "nobody"}, "trainer: there is no trainer 'nobody'; ready ones:"),
    ({}, {"trainer": "../nobody"}, "trainer: there is no trainer '../nobody'"),
    ({}, {"trainer": "nobody.yaml"}, "trainer: nobody.yaml: cannot be read: No such file"),
    ({}, {"trainer": None}, "model: this field is required"),
]


@pytest.mark.parametrize(("trainer", "changes", "fault"), FAULTS)
def test_what_is_wrong_is_one_line_that_names_the_place(
    trainer: dict[str, Any], changes: dict[str, Any], fault: str
) -> None:
    with pytest.raises(InputError) as refused:
        spec(trainer, **changes)
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)


def test_own_axes_are_refused_without_a_trainer() -> None:
    with pytest.raises(InputError, match=r"space\.nccl_algo: unknown field; allowed: engine"):
        spec(trainer=None, model="tiny-llama", data="synthetic", space={"nccl_algo": "Ring"})


SLICES: dict[str, Any] = {"measurement": {"explore": "slices"}}


@pytest.mark.parametrize(
    ("trainer", "fault"),
    [
        (
            {"axes": {"pipeline_parallel_size": [1, 2]}},
            "space.pipeline_parallel_size: slices of the trainer mine take 1 alone: a program does not tell what each",
        ),
        (
            {"axes": {"expert_parallel_size": [2]}},
            "space.expert_parallel_size: slices of the trainer mine take 1 alone",
        ),
        ({"steps": "megatron-lm"}, "slices run the first rank, and megatron-lm logs its steps on the last"),
    ],
)
def test_slices_of_programs_whose_ranks_differ_are_refused(trainer: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError, match=re.escape(fault)):
        check(spec({**PLAIN, **trainer}, space={}, **SLICES), "spec")


def test_a_program_whose_ranks_are_alike_may_run_by_slices() -> None:
    assert check(spec(**SLICES), "spec").measurement.sliced


ONE = "one GPU explores a layout by 1 kind of its ranks"
ALONE = "beside mine's start, if its ranks meet in torch.distributed alone (measurement.explore: slices)"
STAGES = "slices of the trainer mine take 1 alone: a program does not tell what each of its stages does, and when"


@pytest.mark.parametrize(
    ("trainer", "changes", "said"),
    [
        ({}, {"model": "tiny-llama"}, f"{ONE}, in about N s, {ALONE}"),
        ({}, {}, f"{ONE}, {ALONE}"),
        (
            {"axes": {"pipeline_parallel_size": [1, 2]}},
            {},
            f"not of this trainer's program: space.pipeline_parallel_size: {STAGES}",
        ),
        ({}, {"cluster": {"gpus_per_node": 1, "accelerator": "h100"}}, None),
    ],
)
def test_a_plan_says_what_slices_add_or_why_there_are_none(
    trainer: dict[str, Any], changes: dict[str, Any], said: str | None
) -> None:
    cluster = {"gpus_per_node": 2, "accelerator": "h100"}
    plan = make_plan(spec({**PLAIN, **trainer}, space={}, **{"cluster": cluster} | changes), data_sheet("h100"))
    lines = [re.sub(r"about \d+ s", "about N s", line) for line in text(plan).splitlines() if line.startswith("slices")]
    assert lines == ([] if said is None else [f"slices: {said}"])
    assert bool(plan.to_dict()["unsliced"]) == (said is not None and said.startswith("not"))


def test_what_of_the_goals_no_trial_will_have() -> None:
    with pytest.raises(InputError, match=r"objectives\.mfu: no trial will have it: it takes a model"):
        check(spec(objectives={"mfu": "maximize"}), "spec")


def test_the_command_that_a_gang_gets() -> None:
    problem = spec({"steps": "torchtitan"}, seed=7)
    layout = problem.legal.layouts[-1]
    request = make_request("t1", layout, problem)
    program = request.program
    assert isinstance(program, Command)
    assert program == Command(
        arguments=("python", "train.py", "--micro-batch=2", "--seed", "7", "--config={trial_dir}/run.toml"),
        environment=(("NCCL_ALGO", "Tree"), ("OMP_NUM_THREADS", "1")),
        files=(("run.toml", 'batch = 2\n[a]\nb = "x"\n'),),
        directory=".",
        tokens_per_step=256,
        steps=LOGS["torchtitan"],
        out_of_memory=("no room for",),
    )
    assert request.batches == make_request("t1", layout, problem, Purpose.FINALIST).batches == ()
    hooked = program_of(layout, spec())
    assert isinstance(hooked, Command)
    assert hooked.steps is None
    told = program_of(layout, spec({"steps": {"step": "(?P<step>.)", "memory": "x"}}))
    assert isinstance(told, Command)
    assert told.steps == LogPatterns("(?P<step>.)", "x")


def test_configuration_files_in_each_format() -> None:
    data = {"n": "{micro_batch_size}", "name": "{nccl_algo}", "off": "{None}", "list": ["{compile}", {"a": 1}]}
    problem = spec({"files": {f"c.{ending}": data for ending in ("json", "toml", "yaml")}})
    program = program_of(problem.legal.layouts[0], problem)
    assert isinstance(program, Command)
    written = dict(program.files)
    whole = {"n": 1, "name": "Ring", "off": None, "list": [False, {"a": 1}]}
    assert json.loads(written["c.json"]) == yaml.safe_load(written["c.yaml"]) == whole
    assert tomllib.loads(written["c.toml"]) == {key: value for key, value in whole.items() if key != "off"}


words = st.text(max_size=8)
plain = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | words
nested = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))


@given(st.dictionaries(words, nested, max_size=4))
def test_what_is_written_as_toml_is_read_back(data: dict[str, Any]) -> None:
    assert tomllib.loads(toml.written(data)) == data


def test_own_axes_are_learnt_and_explained() -> None:
    problem = spec(model="tiny-llama", cluster={"gpus_per_node": 2, "accelerator": "h100"})
    study = open_study(problem, "own", "sqlite://", data_sheet("h100"))
    assert set(study.distributions) == {"micro_batch_size", "nccl_algo"}
    asked = [study.ask() for _ in problem.legal.layouts]
    assert set(asked) == set(problem.legal.layouts)
    fates = why(problem, {"nccl_algo": "Tree"}).fates
    assert [(fate.outcome, fate.layout and fate.layout.setting("nccl_algo")) for fate in fates] == [
        ("legal", "Tree"),
        ("refused", None),
    ]
    assert "nccl_algo == 'Ring' or micro_batch_size == 2" in (fates[1].reason or "")
    with pytest.raises(InputError, match="nccl_algo: the trainer has not Mesh; it has Ring, Tree"):
        why(problem, {"nccl_algo": ["Mesh"]})
    with pytest.raises(InputError, match=r"attention is no axis; axes: engine, .*, nccl_algo"):
        why(problem, {"attention": "flash"})


def test_a_plan_predicts_where_the_model_is_known() -> None:
    cluster = {"gpus_per_node": 2, "accelerator": "h100"}
    known = make_plan(spec(model="tiny-llama", cluster=cluster), data_sheet("h100"))
    assert {bool(one.metrics) and one.share is not None for one in known.forecasts} == {True}
    unknown = make_plan(spec(cluster=cluster), data_sheet("h100"))
    assert {(one.share, one.band, len(one.metrics)) for one in unknown.forecasts} == {(None, None, 0)}
    assert unknown.source is None
    study = open_study(spec(cluster=cluster), "own", "sqlite://", data_sheet("h100"))
    assert isinstance(study, SearchStudy)
    assert study.ask() in unknown.problem.legal.layouts


# Files, names, and what a cluster runs


@pytest.fixture
def operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of trainers, one of them whole."""
    folder = tmp_path / "trainers"
    folder.mkdir()
    monkeypatch.setenv("WATTUNE_TRAINERS", str(folder))
    (folder / "theirs.yaml").write_text(yaml.safe_dump(TRAINER | {"name": "theirs"}, sort_keys=False))
    (folder / "broken.yaml").write_text("command: [python, '{']\naxes: {Kind: [a]}\n")
    return folder


def test_a_trainer_by_its_path_and_by_its_name(operators: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({k: v for k, v in TRAINER.items() if k != "name"}, sort_keys=False)
    )
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC | {"trainer": "mine.yaml"}))
    assert load_spec(tmp_path / "spec.yaml").trainer == replace(trainer_of(spec()), directory=str(tmp_path))
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC | {"trainer": TRAINER | {"directory": "programs"}}))
    assert trainer_of(load_spec(tmp_path / "spec.yaml")).directory == str(tmp_path / "programs")
    named = spec(trainer="theirs")
    assert trainer_of(named).directory == str(operators)
    assert load("theirs") == named.trainer
    assert is_ready(trainer_of(named))
    assert parse_spec(dump_spec(named)) == parse_spec(dump_spec(named, named=True)) == named
    assert yaml.safe_load(dump_spec(named, named=True))["trainer"] == "theirs"


def trainer_of(problem: Problem) -> Trainer:
    assert problem.trainer is not None
    return problem.trainer


def test_the_list_tells_what_is_wrong_with_a_file(operators: Path) -> None:
    known = {one.name: one for one in ready_trainers()}
    assert known["theirs"].trainer == load("theirs")
    assert "trainer.axes: 'Kind'" in (known["broken"].fault or "")
    listed = CliRunner().invoke(main, ["trainers"])
    assert listed.exit_code == 0
    assert "theirs" in listed.output
    assert "nccl_algo" in listed.output
    told = json.loads(CliRunner().invoke(main, ["trainers", "--json"]).output)
    assert {one["name"]: one["fault"] is None for one in told}.items() >= {"theirs": True, "broken": False}.items()


def test_a_directory_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTUNE_TRAINERS", "/nowhere")
    listed = CliRunner().invoke(main, ["trainers"])
    assert (listed.exit_code, listed.output) == (2, "wattune: WATTUNE_TRAINERS: there is no directory /nowhere\n")


def test_a_cluster_runs_ready_trainers_alone(operators: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, mine = load("theirs"), trainer_of(spec())
    check_allowed(mine, False)  # on one's own machine
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    check_allowed(None, False)
    check_allowed(theirs, False)
    check_allowed(mine, True)
    changed = replace(theirs, command=("rm", "-rf", "/"))
    for trainer in (mine, changed, replace(mine, name="../theirs")):
        with pytest.raises(InputError, match=r"a cluster runs its ready ones alone, of which .* is none"):
            check_allowed(trainer, False)


def test_a_spec_that_brings_a_trainer_is_not_submitted(
    operators: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, str]] = []

    def take(client: Any, job: str, search_id: str, command: str, uri: str, env: dict[str, Any]) -> None:
        sent.append((command, Path(env["working_dir"], "spec.yaml").read_text()))

    monkeypatch.setattr(jobs, "_check_store", lambda uri: None)
    monkeypatch.setattr(jobs, "_cluster", contextlib.nullcontext)
    monkeypatch.setattr(jobs, "_submit", take)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    submit = ["submit", str(tmp_path / "spec.yaml"), "--address", "http://head:8265"]
    refused = CliRunner().invoke(main, submit)
    assert refused.exit_code == 2
    assert refused.output.startswith("wattune: trainer: a cluster runs its ready ones alone, of which mine is none")
    assert len(refused.output.splitlines()) == 1
    assert not sent

    assert CliRunner().invoke(main, [*submit, "--allow-trainer"]).exit_code == 0
    command, text = sent.pop()
    assert command.endswith(" --allow-trainer")
    assert trainer_of(parse_spec(text)).directory == str(tmp_path)

    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC | {"trainer": "theirs"}))
    assert CliRunner().invoke(main, submit).exit_code == 0
    command, text = sent.pop()
    assert not command.endswith("--allow-trainer")
    assert yaml.safe_load(text)["trainer"] == "theirs"


def test_a_driver_on_a_cluster_refuses_a_spec_that_brings_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the spec came there: before anything starts."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("WATTUNE_HOME", str(tmp_path / "home"))
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    refused = CliRunner().invoke(main, ["run", str(tmp_path / "spec.yaml")])
    assert refused.exit_code == 2
    assert "trainer: a cluster runs its ready ones alone" in refused.output
    assert not (tmp_path / "home").exists()


def test_the_example_is_a_trainer_s() -> None:
    problem = load_spec(ROOT / "examples" / "plain_pytorch.yaml")
    program = program_of(problem.legal.layouts[0], problem)
    assert isinstance(program, Command)
    assert program.directory == str(ROOT / "examples")
    assert (ROOT / "examples" / program.arguments[1]).is_file()
