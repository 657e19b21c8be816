"""The command line as a person or a program meets it: what it prints, and how it refuses."""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result

import service
from search_spaces.layout import Layout
from service import Wattune, cli
from service.cli import EXIT_CODES, main
from service.errors import InputError, NoAnswerError, SearchError
from service.home import Home
from service.record.tracking import Tracker
from service.result import Purpose, TrialResult
from service.spec import make_problem
from tests.service.answers.test_whatif import PIPELINE, PROBLEM, REPLICAS, sliced
from trainables.status import Status

ROOMS = ("service", "trainables", "search_spaces", "telemetry")
TINY: dict[str, Any] = {
    "name": "tiny",
    "model": "tiny-llama",
    "data": "synthetic",
    "sequence_length": 64,
    "global_batch_size": 8,
    "cluster": {"nodes": 1, "gpus_per_node": 2, "accelerator": "cpu"},
    "space": {"engine": ["megatron"], "tensor_parallel_size": [1, 2], "precision": "fp32"},
}


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with no store named in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("WATTUNE_HOME", "MLFLOW_TRACKING_URI", "RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def spec_file(folder: Path, **changes: Any) -> str:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(TINY | changes))
    return str(path)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def assert_refused(result: Result, *words: str) -> None:
    """One clear line on standard error, nothing on standard output, exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    line = result.stderr.rstrip("\n")
    assert line.startswith("wattune: ")
    assert "\n" not in line
    for word in words:
        assert word in line


BAD_SPECS = {
    "unknown field": ({"colour": 1}, ("colour", "sequence_length")),
    "tensor parallel size that does not divide heads": (
        {"space": {"tensor_parallel_size": [3]}},
        ("space.tensor_parallel_size", "3", "4 heads", "1, 2"),
    ),
    "global batch that no layout divides": (
        {"global_batch_size": 7, "space": {"micro_batch_size": [2, 4]}},
        ("global_batch_size", "7"),
    ),
    "empty space": ({"space": {"engine": []}}, ("space.engine",)),
    "space without a legal layout": (
        {
            "space": {"zero_stage": [2, 3], "pipeline_parallel_size": 2},
            "cluster": {"nodes": 1, "gpus_per_node": 4, "accelerator": "cpu"},
        },
        ("space", "zero_with_pipeline"),
    ),
    "unknown model": ({"model": "llama9"}, ("model", "llama9", "llama3-8b")),
}


@pytest.mark.parametrize("command", ["plan", "run", "submit"])
@pytest.mark.parametrize(("changes", "words"), BAD_SPECS.values(), ids=list(BAD_SPECS))
def test_bad_spec_is_refused_by_every_command(
    command: str, changes: dict[str, Any], words: tuple[str, ...], empty: Path
) -> None:
    address = ["--address", "http://127.0.0.1:1"] if command == "submit" else []
    assert_refused(call(command, spec_file(empty, **changes), *address), *words)
    assert [path.name for path in empty.iterdir()] == ["spec.yaml"]


@pytest.mark.parametrize("command", ["plan", "run"])
def test_spec_that_cannot_be_read_is_refused(command: str, empty: Path) -> None:
    assert_refused(call(command, "nowhere.yaml"), "nowhere.yaml")
    (empty / "broken.yaml").write_text("name: [tiny\nmodel: x")
    assert_refused(call(command, "broken.yaml"), "broken.yaml", "line 2")


def test_data_that_are_not_tokens_are_refused_before_anything_starts(empty: Path) -> None:
    assert_refused(call("run", spec_file(empty, data="nothing/here")), "data", "nothing/here")
    (empty / "notes.npy").write_text("these are no tokens")
    assert_refused(call("run", spec_file(empty, data="notes.npy")), "data", "notes.npy")
    assert not (empty / ".wattune").exists()


USAGES = {
    "an unknown option": (["best", "x", "--foo"], "best: no such option", "--foo"),
    "an option that is nearly one": (["best", "x", "--wher", "a"], "no such option", "--wher", "--where"),
    "an argument that is missing": (["plan"], "plan: missing argument 'SPEC'", "`wattune plan --help`"),
    "an argument too many": (["status", "a", "b"], "status: got unexpected extra argument (b)"),
    "a value that is none": (["best", "x", "--format", "xml"], "best: ", "'xml' is not one of"),
    "a port that is none": (["ui", "--port", "abc"], "ui: invalid value for '--port'", "'abc'"),
    "an option without its value": (["data", "a", "--out"], "'--out' requires an argument"),
    "an option that is missing": (["stop", "x"], "stop: missing option '--address'"),
    "an unknown command": (["foo"], "no such command 'foo'", "`wattune --help`"),
    "an option of no command": (["--foo"], "no such option", "'--foo'"),
}


@pytest.mark.parametrize(("arguments", "words"), [(usage[0], usage[1:]) for usage in USAGES.values()], ids=list(USAGES))
def test_a_wrong_usage_is_refused_with_one_line(arguments: list[str], words: tuple[str, ...], empty: Path) -> None:
    assert_refused(call(*arguments), *words)


def test_help_lists_the_exit_codes_and_needs_no_command() -> None:
    helped = call()
    assert (helped.exit_code, helped.stderr) == (0, "")
    assert helped.stdout == call("--help").stdout
    assert " ".join(EXIT_CODES.split()) in " ".join(helped.stdout.split())


def test_every_command_that_prints_data_prints_json() -> None:
    commands = {**main.commands, **{f"trainer {name}": one for name, one in cli.trainer.commands.items()}}
    without = {
        name
        for name, command in commands.items()
        if not any("--json" in option.opts for option in command.params) and not isinstance(command, click.Group)
    }
    assert without == {"best", "logs", "stop", "ui"}, "`best` has --format json; the others hand on or start something"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands_and_options(empty: Path, shell: str) -> None:
    """By what docs/answers.md says, in a process as the shell would start it."""
    page = (Path(__file__).parents[2] / "docs" / "answers.md").read_text()
    assert f"_WATTUNE_COMPLETE={shell}_source wattune" in page
    wattune = [sys.executable, "-c", "from service.cli import main; main(prog_name='wattune')"]

    def asked(instruction: str, **variables: str) -> str:
        environment = os.environ | {"_WATTUNE_COMPLETE": f"{shell}_{instruction}"} | variables
        return subprocess.run(wattune, env=environment, capture_output=True, text=True, check=True).stdout

    assert "_WATTUNE_COMPLETE" in asked("source")
    words = {"COMP_WORDS": "wattune compa", "COMP_CWORD": "compa" if shell == "fish" else "1"}
    assert "compare" in asked("complete", **words)
    words = {"COMP_WORDS": "wattune trials --js", "COMP_CWORD": "--js" if shell == "fish" else "2"}
    assert "--json" in asked("complete", **words)


def test_exit_codes_are_documented_as_errors_have_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "answers.md").read_text()
    codes = {int(code): kind for code, kind in re.findall(r"^\| `(\d)` \| .*?(?:`service\.(\w+)`)? \|$", text, re.M)}
    assert codes == {0: "", **{error.exit_code: error.__name__ for error in (NoAnswerError, InputError, SearchError)}}


def test_a_search_without_the_gpus_is_refused_before_ray_is_imported(empty: Path) -> None:
    spec = spec_file(empty, cluster={"nodes": 1000, "gpus_per_node": 8, "accelerator": "h200"}, global_batch_size=8000)
    code = (
        "import sys; from service.cli import main\n"
        f"try: main(['run', {spec!r}])\n"
        "finally: print([name for name in ('ray', 'torch', 'mlflow') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(service.__file__).parents[1]), "TMPDIR": str(empty)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "[]\n")
    assert re.fullmatch(
        r"wattune: cluster: 1000 x 8 h200 workers need 8000 GPU, NVML and AMD SMI show \d+ here; .*\n", ran.stderr
    )
    assert [path.name for path in empty.iterdir()] == ["spec.yaml"]


@pytest.mark.slow
def test_a_ray_that_does_not_start_is_one_line_and_an_exit_code_of_its_own(empty: Path) -> None:
    long = empty / ("so-long-a-name-" * 8)  # longer than the path of a socket may be
    long.mkdir()
    command = [sys.executable, "-m", "service.cli", "run", spec_file(empty)]
    environment = {**os.environ, "PYTHONPATH": str(Path(service.__file__).parents[1]), "TMPDIR": str(long)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (3, "")
    assert re.fullmatch(r"wattune: Ray does not start on this machine: .+\n", ran.stderr)
    assert not (empty / ".wattune" / "mlflow.db").exists()


def test_a_home_that_cannot_be_used_is_refused(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_file(empty)
    (empty / "file").touch()
    monkeypatch.setenv("WATTUNE_HOME", str(empty / "file"))
    assert_refused(call("run", spec), "WATTUNE_HOME", "it is a file")
    monkeypatch.setenv("WATTUNE_HOME", str(empty / "home"))
    (empty / "home").mkdir()
    (empty / "home" / "optuna.db").write_text("this is no database, but text")
    assert_refused(call("run", spec), "optuna.db", "file is not a database")
    (empty / "home" / "mlflow.db").write_text("this is no database, but text")
    for command in (["run", spec], ["list"], ["status", "x"]):
        assert_refused(call(*command), "mlflow.db", "file is not a database")


def test_unreachable_addresses_are_refused(empty: Path) -> None:
    spec = spec_file(empty)
    nobody = "http://127.0.0.1:1"
    assert_refused(call("submit", spec, "--address", nobody, "--tracking-uri", nobody), nobody)
    assert_refused(call("logs", "some-search", "--address", nobody), nobody)
    assert_refused(call("stop", "some-search", "--address", nobody), nobody)
    assert_refused(call("run", spec, "--tracking-uri", nobody), nobody)
    assert_refused(call("best", "some-search", "--tracking-uri", nobody), nobody)


@pytest.mark.parametrize("address", [pytest.param("nonsense", marks=pytest.mark.slow), "127.0.0.1:1"])
def test_ray_address_that_does_not_answer_is_refused(address: str, empty: Path) -> None:
    # In a process of its own: in this one a Ray that other tests started would be joined.
    command = [sys.executable, "-m", "service.cli", "run", spec_file(empty)]
    environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(Path(service.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("wattune: RAY_ADDRESS: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["status", "pareto", "best", "report", "why", "trials", "whatif --slow-gpu 5%"])
def test_unknown_search_is_refused(command: str, empty: Path) -> None:
    assert_refused(call(*command.split(), "no-such-search"), "no-such-search")
    assert list(empty.iterdir()) == []


@pytest.fixture
def searched(home: Home) -> str:
    """The id of a search of `TINY` in which one layout ran and one ran out of memory."""
    tracker = Tracker(home.tracking_uri, home)
    problem = make_problem(TINY | {"objectives": {"tokens_per_s": "maximize"}})
    tracker.start_search("tiny-1", problem, {})
    fast, big = problem.legal.layouts
    for result in (
        TrialResult("t0", fast, Status.OK, None, {"tokens_per_s": 20.0}),
        TrialResult("t1", big, Status.OOM, "rank 0: out of memory"),
    ):
        tracker.start_trial(result.trial_id, result.layout)
        tracker.finish_trial(result)
    tracker.finish_search("finished", {})
    return "tiny-1"


def test_report_and_why_explain_a_search(searched: str) -> None:
    shown = call("report", searched).stdout
    assert "search: 1 ok, 1 oom" in shown
    assert "rank 0: out of memory" in shown
    told = json.loads(call("report", searched, "--json").stdout)
    assert told["trials"] == {"search": {"ok": 1, "oom": 1}}
    assert [step["hypervolume"] for step in told["advances"]] == [1.0]
    fates = json.loads(call("why", searched, "--json").stdout)["fates"]
    assert [fate["outcome"] for fate in fates] == ["on the front", "oom"]
    assert call("why", searched, "tensor_parallel_size=2").stdout.splitlines()[1].strip() == "rank 0: out of memory"


def test_whatif_tells_what_a_slow_gpu_makes_of_layouts_explored_by_slices(home: Home) -> None:
    tracker = Tracker(home.tracking_uri, home)
    tracker.start_search("tiny-1", PROBLEM, {})
    for name, layout in (("t0", REPLICAS), ("t1", PIPELINE)):
        tracker.start_trial(name, layout)
        tracker.finish_trial(sliced(name, layout))
    tracker.finish_search("finished", {})
    told = json.loads(call("whatif", "tiny-1", "--slow-gpu", "10%", "--link", "-20%", "--json").stdout)
    assert (told["slow_gpu"], told["link"]) == (0.1, -0.2)
    assert [one["slow_rank"] for one in told["layouts"]] == [0, 2]
    for one in told["layouts"]:
        assert one["after"]["step_time_s"] > 1.1 * one["before"]["step_time_s"]
    assert call("whatif", "tiny-1", "--link", "-20%").stdout.startswith("layout ")
    assert_refused(call("whatif", "tiny-1"), "--slow-gpu")
    assert_refused(call("whatif", "tiny-1", "--link", "20"), "link", "'20'")


def test_whatif_has_no_answer_where_nothing_was_explored_by_slices(searched: str) -> None:
    result = call("whatif", searched, "--slow-gpu", "5%")
    assert (result.exit_code, result.stderr) == (1, "wattune: search tiny-1: no layout was explored by slices\n")


def test_status_lists_what_failed(searched: str) -> None:
    told = json.loads(call("status", searched, "--json").stdout)
    assert told["trials"] == {"ok": 1, "oom": 1}
    assert [(failure["trial_id"], failure["cause"]) for failure in told["failures"]] == [
        ("t1", "rank 0: out of memory")
    ]
    assert "oom: megatron 2gpu dp1 tp2" in call("status", searched).stdout


def test_all_who_name_the_best_name_one_and_say_what_is_undecided(home: Home) -> None:
    """One layout was the faster once; measured again, it is the slower."""
    tracker = Tracker(home.tracking_uri, home)
    problem = make_problem(TINY | {"objectives": {"tokens_per_s": "maximize"}})
    tracker.start_search("tiny-1", problem, {})
    once, again = problem.legal.layouts
    search, finalist = Purpose.SEARCH, Purpose.FINALIST
    runs = [(once, 20.0, search), (again, 21.0, search), (again, 18.0, finalist), (again, 19.0, finalist)]
    for i, (layout, speed, purpose) in enumerate(runs):
        tracker.start_trial(f"t{i}", layout, purpose)
        tracker.finish_trial(TrialResult(f"t{i}", layout, Status.OK, None, {"tokens_per_s": speed}, purpose=purpose))
    tracker.finish_search("finished", {})
    told = f"note: undecided on tokens_per_s: between {once.label} (measured once) and {again.label} (2 times)\n"
    assert json.loads(call("best", "tiny", "--format", "json").stdout)["config"] == once.to_dict()
    assert call("best", "tiny").stderr.endswith(told)
    assert call("status", "tiny").stdout.endswith(told)
    assert told in call("report", "tiny").stdout + "\n"
    front = call("pareto", "tiny").stdout
    assert f"Best on each objective:\n  20 tokens/s: {once.label}\n" in front
    assert again.label not in front.partition("note:")[0]
    assert front.endswith(told)
    assert json.loads(call("list", "--json").stdout)[0]["best"] == {"tokens_per_s": 20.0}


def test_best_takes_conditions_and_prints_notes_apart(searched: str) -> None:
    answered = call("best", searched, "--within", "tokens_per_s 2%", "--format", "json")
    assert json.loads(answered.stdout)["trial_id"] == "t0"
    bent = call("best", searched, "--knee")
    assert yaml.safe_load(bent.stdout)["purpose"] == "search"
    assert bent.stderr == "note: the front has no bend: it holds 1 of the layouts\n"
    assert_refused(call("best", searched, "--within", "tokens_per_s"), "'METRIC NUMBER%'")
    assert_refused(call("best", searched, "--maximize", "token_per_s"), "did you mean tokens_per_s?")
    nothing = call("best", searched, "--where", "tokens_per_s>=1e9")
    assert (nothing.exit_code, nothing.stdout) == (1, "")
    assert nothing.stderr == (
        "wattune: search tiny-1: no trial to choose from with tokens_per_s>=1e9; its trials: 1 ok, 1 oom\n"
    )
    assert_refused(call("best", searched, "--knee", "--maximize", "mfu"), "knee")


def test_best_speaks_as_a_framework_and_tells_apart_what_it_does_not_say(searched: str) -> None:
    answered = call("best", searched, "--format", "megatron-lm")
    assert "--tensor-model-parallel-size 1\n" in answered.stdout
    assert "--hidden-size 64\n" in answered.stdout
    assert answered.stderr == ""
    titan = call("best", searched, "--format", "torchtitan")
    unsaid = "data: torchtitan reads data sets of its own with a tokenizer: name them by DATASET and HF_ASSETS"
    assert titan.stdout.startswith(f"# {unsaid}\n")
    assert titan.stderr == f"note: {unsaid}\n"
    assert_refused(call("best", searched, "--format", "deepspeed"), "cannot express layouts of the engine megatron")


def test_export_makes_a_folder_that_starts_the_run(searched: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    made = call("export", searched, "--for", "slurm", "--out", str(out))
    assert made.stdout.splitlines() == [str(out / name) for name in ("run.yaml", "start.sh", "job.sbatch")]
    assert yaml.safe_load((out / "run.yaml").read_text())["layout"]["engine"] == "megatron"
    assert "search tiny-1 (tiny)" in (out / "start.sh").read_text()
    told = json.loads(call("export", searched, "--for", "slurm", "--out", str(tmp_path / "other"), "--json").stdout)
    assert told["files"] == [str(tmp_path / "other" / name) for name in ("run.yaml", "start.sh", "job.sbatch")]
    assert_refused(call("export", searched, "--for", "torchrun", "--out", str(out)), "is not an empty folder")
    assert_refused(call("export", searched, "--for", "abacus", "--out", str(tmp_path / "a")), "no folder for 'abacus'")
    assert not (tmp_path / "a").exists()


def test_trials_are_listed_with_all_that_is_known(searched: str) -> None:
    assert [line.split()[0] for line in call("trials", searched).stdout.splitlines()[2:]] == ["megatron"] * 2
    assert [trial["status"] for trial in json.loads(call("trials", searched, "--json").stdout)] == ["ok", "oom"]
    fast, big = csv.DictReader(call("trials", searched, "--csv").stdout.splitlines())
    assert (fast["trial_id"], fast["status"], fast["tokens_per_s"], fast["cause"]) == ("t0", "ok", "20.0", "")
    assert (big["tensor_parallel_size"], big["tokens_per_s"], big["cause"]) == ("2", "", "rank 0: out of memory")


def test_why_of_a_spec_says_what_is_legal(empty: Path) -> None:
    spec = spec_file(empty)
    assert call("why", spec, "tensor_parallel_size=2").stdout.startswith("legal  megatron 2gpu dp1 tp2")
    assert call("why", spec, "micro_batch_size=3").stdout.startswith(
        "note: micro_batch_size 3 is not in the spec\nrefused"
    )
    assert_refused(call("why", spec, "colour=1"), "colour", "tensor_parallel_size")
    assert_refused(call("why", spec, "num_gpus="), "num_gpus", "give a value")
    assert_refused(call("why", spec, "zero_stage=1", "zero_stage=2"), "zero_stage", "twice")
    assert_refused(call("why", "no-such-search"), "no-such-search")
    assert sorted(path.name for path in empty.iterdir()) == ["spec.yaml"]


def test_plan_refuses_what_nobody_can_mean_and_tells_what_is_missing(empty: Path) -> None:
    assert_refused(call("plan", spec_file(empty, objectives={"step_time_s": "maximize"})), "spec.yaml: objectives.step")
    spec = spec_file(empty, data="nothing/here", objectives={"tokens_per_s": "maximize", "mfu": "maximize"})
    told = json.loads(call("plan", spec, "--json").stdout)["notices"]
    assert [notice.partition(":")[0] for notice in told] == ["data", "objectives.mfu"]
    assert call("plan", spec).stdout.endswith("".join(f"note: {notice}\n" for notice in told))
    (empty / "notes.npy").write_text("these are no tokens")
    assert_refused(call("plan", spec_file(empty, data="notes.npy")), "data", "notes.npy")
    assert not (empty / ".wattune").exists()


def test_plan_tells_of_depth_proxies(empty: Path) -> None:
    spec = spec_file(empty, depth_proxy=[1, 2])
    assert "each trial is run with 2 and with 1 layers, and its figures are extrapolated to 4" in (
        call("plan", spec).stdout
    )
    assert json.loads(call("plan", spec, "--json").stdout)["depth_proxy"] == [1, 2]
    assert "extrapolated" not in call("plan", spec_file(empty)).stdout


def test_plan_counts_and_explains(empty: Path) -> None:
    space = {"engine": ["megatron", "deepspeed"], "tensor_parallel_size": [1, 2], "pipeline_parallel_size": [1, 2]}
    spec = spec_file(empty, space=space)
    told = json.loads(call("plan", spec, "--json").stdout)
    assert told["combinations"] == 8
    assert told["distinct"] == len(told["points"]) + sum(told["refused"].values())
    assert set(told["refused"]) == set(told["reasons"]) == {"gpus_divide"}
    shown = call("plan", spec).stdout
    assert "8 combinations" in shown
    assert "gpus_divide" in shown
    assert all(Layout.from_dict(point).label in shown for point in told["points"])


def test_data_prepares_tokens_that_plan_and_run_accept(empty: Path) -> None:
    (empty / "book.txt").write_text("It was the best of times. " * 50)
    assert call("data", "book.txt", "--out", "tokens").exit_code == 0
    told = json.loads(call("data", "book.txt", "--out", "tokens", "--json").stdout)
    assert (told["prefix"], told["documents"]) == ("tokens", 1)
    assert sorted(path.name for path in empty.iterdir()) == ["book.txt", "tokens.bin", "tokens.idx"]
    assert_refused(call("data", "missing.txt", "--out", "other"), "missing.txt")


def test_list_of_an_empty_home_says_so(empty: Path) -> None:
    assert "no searches" in call("list").stdout
    assert json.loads(call("list", "--json").stdout) == []


def test_list_of_a_database_whose_folder_is_not_there_is_refused(empty: Path) -> None:
    there, missing = (f"sqlite:///{empty}/{folder}mlflow.db" for folder in ("", "gone/"))
    assert "no searches" in call("list", "--tracking-uri", there).stdout
    assert_refused(call("list", "--tracking-uri", missing), f"there is no directory {empty}/gone")
    assert list(empty.iterdir()) == []


def test_the_command_line_asks_the_client_alone_and_prints() -> None:
    """It imports the client, what prints answers, and what parses arguments."""
    imported = {
        alias.name
        for node in ast.walk(ast.parse(Path(cli.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ROOMS
        for alias in node.names
    }
    printing = {"text", "figures", "searches_table", "trials_table", "trials_csv", "show", "names", "search_ids"}
    assert imported == {"Wattune", "InputError", "NoAnswerError", "SearchError", "parse_choices"} | printing


def test_every_command_is_documented_as_a_method_of_the_client() -> None:
    documented = {}
    for line in (Path(__file__).parents[2] / "docs" / "answers.md").read_text().splitlines():
        if row := re.match(r"\| `(\w+)` \| (`[^|]*) \|", line):
            documented[row[1]] = re.findall(r"`(\w+)\(", row[2])
    assert set(main.commands) <= set(documented)
    assert all(callable(getattr(Wattune, method)) for name in main.commands for method in documented[name])
