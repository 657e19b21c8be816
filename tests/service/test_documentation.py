"""Every command in the documentation: those that read are run as they stand, on a recorded search; of the others, which
other tests run, all words must be those of the command line."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from service.cli import main
from service.home import Home
from service.record.tracking import Tracker
from service.result import TrialResult
from tests.service.records import problem
from trainables.status import Status

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
"""But for docs/extending.md, whose commands `tests/test_extending.py` runs in a tree changed as it says."""

READ = {"list", "status", "pareto", "best", "report", "why", "export", "compare", "trials", "plan", "data", "trainers"}
"""Commands that start nothing and end by themselves, unless they ask a cluster."""

ALONE = {"list", "trainers", "doctor", "ui", "top"}
"""Commands that are whole without another word. The others are only spoken of where they have none."""

HERE = {
    "SPEC": "examples/tiny_cpu.yaml",
    "spec.yaml": "examples/tiny_cpu.yaml",
    "FORMAT": "deepspeed",
    "FILE": "page.html",
    "FILES...": "README.md",
    "URL": "http://127.0.0.1:8265",
    "NAME": "torchtitan",
    "SEARCH": "s1",
    "A": "s1",
    "B": "s2",
    "...": "",
}
"""What stands for something else in a command -> what is there for it."""

CHOICE = re.compile(r"[a-z-]+(?:\|[a-z-]+)+")


def code() -> Iterator[tuple[str, str]]:
    """(page, line) of all code: of blocks for a shell, and in lines of text."""
    for page in PAGES:
        if page.name == "extending.md":
            continue
        text = page.read_text()
        for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.M | re.S):
            yield from ((page.name, line.strip()) for line in block.replace("\\\n", " ").splitlines())
        for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
            yield page.name, " ".join(span.split())


def commands() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(page, words) of each of ours, once for each word of which it leaves the choice."""
    for page, line in code():
        if not line.startswith("wattune "):
            continue
        words = [HERE.get(word, word) for word in shlex.split(line, comments=True)[1:]]
        if words.count("s1") > 1:
            words[len(words) - 1 - words[::-1].index("s1")] = "s2"
        choices = [word.split("|") if CHOICE.fullmatch(word) else [word] for word in words if word]
        if len(words) > 1 or words[0] in ALONE:
            yield from ((page, chosen) for chosen in itertools.product(*choices))


COMMANDS = list(dict.fromkeys(commands()))


def runs(words: tuple[str, ...]) -> bool:
    return words[0] in READ and "--address" not in words


@pytest.fixture
def searched(home: Home) -> Home:
    """Two searches, s1 of one engine and s2 of the other."""
    for name, engine in (("s1", "megatron"), ("s2", "deepspeed")):
        space = {"engine": engine, "zero_stage": [1, 3], "micro_batch_size": 1, "precision": "bf16"}
        of = problem(space=space, cluster={"gpus_per_node": 2, "accelerator": "h100"})
        tracker = Tracker(home.tracking_uri, home)
        tracker.start_search(name, of, {})
        for number, layout in enumerate(of.legal.layouts):
            metrics: dict[str, float | None] = {"tokens_per_s": 10.0 - number, "tokens_per_s_per_gpu": 5.0 - number}
            metrics["joules_per_token"] = 2.0 - number
            tracker.start_trial(f"t{number}", layout)
            tracker.finish_trial(TrialResult(f"t{number}", layout, Status.OK, None, metrics))
        tracker.finish_search("finished", {})
    return home


def test_every_command_that_reads_runs_as_it_is_written(
    searched: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("examples", "benchmarks", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    wanted = dict.fromkeys(words for _, words in COMMANDS if runs(words))
    for number, words in enumerate(wanted):
        there = {"DIR": f"out{number}", "run": f"run{number}"}
        if "deepspeed" in words:
            there["s1"] = "s2"
        done = CliRunner().invoke(main, [there.get(word, word) for word in words])
        assert done.exit_code == 0, f"wattune {' '.join(words)}: {done.output}"
    assert {words[0] for words in wanted} == READ


def test_every_other_command_is_one_of_the_command_line() -> None:
    others = [(page, words) for page, words in COMMANDS if not runs(words)]
    assert {words[0] for _, words in others} >= {"run", "submit", "resume", "stop", "doctor", "calibrate", "top", "ui"}
    for page, words in others:
        command, rest = main.commands[words[0]], list(words[1:])
        while isinstance(command, click.Group):
            command = command.commands[rest.pop(0)]
        try:
            command.make_context(" ".join(words), rest)
        except click.UsageError as error:
            pytest.fail(f"{page}: wattune {' '.join(words)}: {error.format_message()}")


def test_modules_and_targets_that_are_named_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    modules, makes = set(), set()
    for _, line in code():
        modules |= set(re.findall(r"python -m ((?:benchmarks|service|telemetry|trainables)[\w.]*)", line))
        makes |= set(re.findall(r"^make ([a-z-]+)", line))
    assert len(modules) > 5
    assert makes >= {"demo", "test", "lint", "docs", "bench"}
    assert [name for name in sorted(modules) if find_spec(name.rstrip(".")) is None] == []
    assert makes <= targets


def test_every_test_that_the_page_of_faults_names_is_there() -> None:
    named = 0
    for row in re.findall(r"^\| .* \| (.*) \|$", (ROOT / "docs" / "faults.md").read_text(), re.M):
        names = list[str]()
        for word in re.findall(r"`([^`]+)`", row):
            if re.fullmatch(r"(?:\w+/)?test_\w+", word):
                texts = [path.read_text() for path in ROOT.glob(f"tests/**/{word}.py")]
                names = [name for text in texts for name in re.findall(r"def test_(\w+)", text)]
                assert names, f"no file {word}"
                named += 1
            elif names and "_" in word:
                assert any(word.strip(".") in name for name in names), f"no test {word}"
    assert named > 30
