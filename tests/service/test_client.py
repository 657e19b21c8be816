from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import service
from search_spaces.layout import Layout
from service import InputError, Wattune, load_spec, parse_spec
from service.home import Home
from service.record.tracking import Tracker
from service.result import TrialResult
from trainables.launch import read
from trainables.status import Status

PLAIN = Layout("megatron", 2, 16, micro_batch_size=4, precision="fp32", sequence_parallel=False)
FAST = replace(PLAIN, tensor_parallel_size=2)
FRUGAL = replace(PLAIN, zero_stage=3)

UNTRIED = PLAIN
SPEC = """
name: tiny
model: tiny-llama
data: synthetic
sequence_length: 64
global_batch_size: 16
cluster: {nodes: 1, gpus_per_node: 2, accelerator: cpu}
space:
  {engine: megatron, tensor_parallel_size: [1, 2], zero_stage: [0, 3], micro_batch_size: [4, 5], precision: fp32,
   sequence_parallel: false}
objectives: {tokens_per_s: maximize, joules_per_token: minimize}
"""


@pytest.fixture
def wattune(home: Home) -> Wattune:
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("tiny-1", parse_spec(SPEC), {})
    for trial_id, layout, speed, energy in (("t0", FAST, 20.0, 3.0), ("t1", FRUGAL, 10.0, 1.0)):
        tracker.start_trial(trial_id, layout)
        metrics: dict[str, float | None] = {"tokens_per_s": speed, "joules_per_token": energy}
        tracker.finish_trial(TrialResult(trial_id, layout, Status.OK, None, metrics))
    return Wattune()


def test_the_client_answers_from_the_store_that_the_environment_names(wattune: Wattune) -> None:
    assert [info.id for info in wattune.searches()] == ["tiny-1"]
    assert wattune.status("tiny").status == "running"
    assert wattune.status("tiny").trials == {"ok": 2}
    assert [trial.trial_id for trial in wattune.trials("tiny")] == ["t0", "t1"]
    assert [trial.trial_id for trial in wattune.pareto("tiny").candidates] == ["t0", "t1"]
    assert wattune.best("tiny").candidate.layout == FAST
    assert wattune.best("tiny", minimize="joules_per_token").candidate.trial_id == "t1"
    assert wattune.best("tiny", maximize="tokens_per_s", where=["joules_per_token<=2"]).candidate.trial_id == "t1"
    assert wattune.best("tiny", minimize="joules_per_token", within=["tokens_per_s 50%"]).candidate.trial_id == "t1"
    assert wattune.best("tiny", minimize="joules_per_token", within=["tokens_per_s 49%"]).candidate.trial_id == "t0"
    assert wattune.best("tiny", where="tokens_per_s<=15", within="joules_per_token 0%").candidate.trial_id == "t1"
    with pytest.raises(InputError, match="where: 5 is no text"):
        wattune.best("tiny", where=5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="within: None is no text"):
        wattune.best("tiny", within=["tokens_per_s 2%", None])  # type: ignore[list-item]
    assert wattune.best("tiny", knee=True).candidate.trial_id == "t0"


def test_the_client_explains_a_search_and_a_spec(wattune: Wattune, tmp_path: Path) -> None:
    told = wattune.report("tiny")
    assert [step.trials for step in told.advances] == [1, 2]
    assert told.refusals
    assert told.refusals[0].rule == "batch_divides"
    fates = {fate.label: fate.outcome for fate in wattune.why("tiny", {"micro_batch_size": 4}).fates}
    assert fates == {FAST.label: "on the front", FRUGAL.label: "on the front", UNTRIED.label: "not tried"}
    (tmp_path / "spec.yaml").write_text(SPEC)
    legal = wattune.why(tmp_path / "spec.yaml", {"micro_batch_size": 4})
    assert [fate.outcome for fate in legal.fates] == ["legal"] * 3
    assert wattune.why(load_spec(tmp_path / "spec.yaml"), {"micro_batch_size": 4}) == legal


def test_answers_carry_their_notices_and_what_it_takes_to_launch(wattune: Wattune) -> None:
    front, choice = wattune.pareto("tiny"), wattune.best("tiny", knee=True)
    assert {metric: one.trial_id for metric, one in front.best.items()} == {
        "tokens_per_s": "t0",
        "joules_per_token": "t1",
    }
    assert [layout["trial_id"] for layout in front.to_dict()["pareto"]] == ["t0", "t1"]
    assert choice.notices == ("the front has no bend: it holds 2 of the layouts",)
    assert choice.to_dict() == wattune.export("tiny", choice.candidate) == front.to_dict()["pareto"][0]
    assert choice.to_dict()["config"] == FAST.to_dict()


def test_a_layout_is_formatted_and_written_as_the_search_trained_it(wattune: Wattune, tmp_path: Path) -> None:
    candidate = wattune.best("tiny", minimize="joules_per_token").candidate
    said = wattune.formatted("tiny", candidate, "megatron-lm")
    assert "--data-parallel-sharding-strategy optim_grads_params\n" in said.text
    written = wattune.write_folder("tiny", candidate, "torchrun", tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == set(written.files)
    launch = read(tmp_path / "run" / "run.yaml")
    assert (launch.layout, launch.accelerator, launch.gpus_per_node) == (FRUGAL, "cpu", 2)
    assert (launch.training.data, launch.training.sequence_length) == ("synthetic", 64)


def test_a_layout_of_a_trainer_is_written_as_what_torchrun_starts(home: Home, tmp_path: Path) -> None:
    problem = load_spec(Path(__file__).parents[2] / "examples/plain_pytorch.yaml")
    layout = problem.legal.layouts[0]
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("own-1", problem, {})
    tracker.start_trial("t0", layout)
    tracker.finish_trial(TrialResult("t0", layout, Status.OK, None, {"tokens_per_s": 20.0}))
    wattune = Wattune()
    candidate = wattune.best("own", maximize="tokens_per_s").candidate
    said = wattune.formatted("own", candidate, "torchrun")
    assert f"  --micro-batch-size={layout.micro_batch_size} \\\n" in said.text
    assert "wattune_steps.py" in said.not_expressible["hook"]
    written = wattune.write_folder("own", candidate, "torchrun", tmp_path / "run")
    assert written.files["start.sh"] == said.text
    assert (tmp_path / "run" / "wattune_steps.py").exists()
    with pytest.raises(InputError, match="megatron-lm cannot express layouts of the trainer plain-pytorch"):
        wattune.formatted("own", candidate, "megatron-lm")
    assert "torchrun" in wattune.export("own", candidate)["not_expressible"]["engine"]


def test_the_client_plans_and_prepares_data(home: Home, tmp_path: Path) -> None:
    problem = parse_spec(SPEC)
    assert [forecast.layout for forecast in Wattune().plan(problem).forecasts] == list(problem.legal.layouts)
    (tmp_path / "book.txt").write_text("It was the best of times. " * 50)
    assert Wattune.prepare_data([tmp_path / "book.txt"], tmp_path / "tokens").documents == 1
    with pytest.raises(InputError, match="missing"):
        Wattune.prepare_data([tmp_path / "missing.txt"], tmp_path / "other")


def test_what_is_of_the_wrong_type_is_refused_with_one_line(wattune: Wattune) -> None:
    wrong: Any = 3
    asks = (wattune.status, wattune.trials, wattune.pareto, wattune.best, wattune.report, wattune.logs, wattune.stop)
    for ask in (*asks, wattune.resume):
        with pytest.raises(InputError, match=r"^search: give its id, which is text, not 3$"):
            ask(wrong)
    wrong = {"name": "a"}
    for take in (wattune.plan, wattune.run, wattune.calibrate, Wattune(address="http://127.0.0.1:9").submit):
        with pytest.raises(InputError, match=r"^spec: give a file's path or what .* return, not a dict$"):
            take(wrong)
    with pytest.raises(InputError, match=r"^within: {'name': 'a'} is no text$"):
        wattune.best("tiny", within=[wrong])


def test_a_server_shows_the_record_itself(wattune: Wattune) -> None:
    assert wattune.pages_url("s1") is None


def test_what_needs_a_cluster_says_so(wattune: Wattune) -> None:
    with pytest.raises(InputError, match="address"):
        wattune.stop("tiny")
    with pytest.raises(InputError, match="address"):
        wattune.logs("tiny")


def test_a_missing_spec_is_refused_before_anything_starts(wattune: Wattune, tmp_path: Path) -> None:
    for start in (wattune.run, Wattune(address="http://127.0.0.1:9").submit):
        with pytest.raises(InputError, match=r"missing\.yaml"):
            start(tmp_path / "missing.yaml")


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = ("ray", "torch", "mlflow", "pydantic", "pyarrow")
    code = f"import sys; from service import Wattune; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_package_offers_what_it_names() -> None:
    assert all(hasattr(service, name) for name in service.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = service.Nothing
