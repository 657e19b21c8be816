"""Parts follow one another whatever becomes of each, keep to their limits, and go on where they ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import ROOT
from benchmarks.measure import parts as module
from benchmarks.measure.node import FAMILIES, main, parts_of
from benchmarks.measure.parts import Ended, Part, Program, ended, environment_of, run_parts
from service.spec import load_spec
from tests.trainables.test_child import is_gone, wait_until


def says(name: str, code: str = "pass", again: bool = False, tells: bool = False) -> Program:
    return Program(name, ("-c", f"print('{name}', flush=True); {code}"), again=again, tells=tells)


SLEEPS = "import time; time.sleep(600)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "out"


def outcomes(done: list[Ended]) -> list[tuple[str, str, int | None]]:
    return [(one.part, one.program, None if one.cut else one.code) for one in done]


def test_a_part_that_fails_ends_alone_and_what_tells_of_it_is_run(folder: Path) -> None:
    parts = [
        Part("one", 60, (says("first", "raise SystemExit(3)"), says("second"), says("report", tells=True))),
        Part("two", 60, (says("third"),)),
    ]
    done = run_parts(parts, folder, 600, dict(os.environ))
    assert outcomes(done) == [("one", "first", 3), ("one", "report", 0), ("two", "third", 0)]
    assert ended(folder) == done
    assert (folder / "two" / "third.txt").read_text() == "third\n"


def test_what_ended_well_is_not_run_again_but_what_goes_on_is(folder: Path) -> None:
    failing = "import os; raise SystemExit(0 if os.path.exists('mended') else 1)"
    part = Part("one", 60, (says("first"), says("goes on", again=True), says("second", failing)))
    telling = Part("two", 60, (says("third"), says("report", tells=True)))
    run_parts([part, telling], folder, 600, dict(os.environ))
    (folder / "mended").touch()
    done = run_parts([part, telling], folder, 600, dict(os.environ))
    assert outcomes(done) == [("one", "goes on", 0), ("one", "second", 0)]
    assert (folder / "one" / "goes on.txt").read_text() == 2 * "goes on\n", "what was printed before stays"


def test_each_part_has_its_limit_and_all_have_one_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "LEAST_S", 2.0)
    parts = [
        Part("long", 1, (says("sleeps", SLEEPS), says("after"), says("report", tells=True))),
        Part("longer", 500, (says("sleeps", SLEEPS),)),
        Part("late", 500, (says("never"),)),
    ]
    began = time.monotonic()
    done = run_parts(parts, folder, module.GRACE_S + 5, dict(os.environ))
    assert outcomes(done) == [("long", "sleeps", None), ("long", "report", 0), ("longer", "sleeps", None)]
    assert 4 <= time.monotonic() - began <= 120
    assert "late: not begun" in capsys.readouterr().out


def test_a_program_is_told_of_its_limit(folder: Path) -> None:
    shows = Program("shows", ("-c", "import sys; print(sys.argv[1:])"), soft_s=30)
    run_parts([Part("one", 100, (shows,))], folder, 600, dict(os.environ))
    assert (folder / "one" / "shows.txt").read_text() == "['--seconds', '70']\n"


def test_a_signal_ends_what_runs_with_all_that_it_started_and_what_there_is_is_kept(tmp_path: Path) -> None:
    """In a process of its own, whose child has a child in another session that ignores SIGTERM."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    parent = (
        "import subprocess, sys, time; "
        f"one = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); "
        "print(one.pid, flush=True); time.sleep(600)"
    )
    code = (
        "import os; from pathlib import Path; from benchmarks.measure.parts import *\n"
        f"parts = [Part('one', 500, (Program('starts', ('-c', {parent!r})),)), Part('two', 9, ())]\n"
        "run_parts(parts, Path('out'), 900, dict(os.environ), Path('out.tar.gz'))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    running = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    output = tmp_path / "out" / "one" / "starts.txt"
    wait_until(lambda: output.exists() and output.read_text().count("\n") == 2)
    started = psutil.Process(int(output.read_text().split()[0]))
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 128 + signal.SIGTERM
    wait_until(lambda: is_gone(started))  # what is killed takes a while to end where others compute
    (one,) = ended(tmp_path / "out")
    assert (one.program, one.cut) == ("starts", True)
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert "one/starts.txt" in archive.getnames()


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "sizes"), [(8, [8, 4]), (4, [4]), (2, [2])])
def test_specs_are_of_the_machine(folder: Path, gpus: int, sizes: list[int]) -> None:
    names = [part.name for part in parts_of(folder, gpus, "h200")]
    assert names.index("models") < names.index("search")
    assert names.index("slices") < names.index("full")
    assert (names[-5:-3] == ["lacking", "missing"]) == (gpus >= 4)
    specs = {path.stem: load_spec(path) for path in (folder / "specs").iterdir()}
    assert {spec.cluster.size for spec in specs.values()} == {gpus}
    for size in sizes:
        for family in FAMILIES:
            assert {layout.num_gpus for layout in specs[f"blind_{family}_{size}"].legal.layouts} == {size}
    assert {layout.num_gpus for layout in specs["mixed"].legal.layouts} == {n for n in (1, 2, 4, 8) if n <= gpus}
    assert {layout.precision for layout in specs["best"].legal.layouts} == {"bf16", "fp8"}
    assert specs["search"].model == "llama3-8b"


@pytest.mark.slow
def test_specs_fit_the_memory_of_smaller_gpus(folder: Path) -> None:
    parts_of(folder, 4, "h100")
    specs = {path.stem: load_spec(path) for path in (folder / "specs").iterdir()}
    assert {layout.precision for layout in specs["best"].legal.layouts} == {"bf16", "fp8"}
    assert len(specs["search"].legal.layouts) > 20


def test_programs_have_nccl_without_multicast_and_a_state_directory_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    chosen = environment_of(folder)
    assert chosen["NCCL_NVLS_ENABLE"] == "0"
    assert chosen["WATTUNE_HOME"] == str(folder / "home")
    assert "RAY_ADDRESS" not in chosen


def test_a_part_that_is_not_there_is_refused_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(folder), "--accelerator", "cpu", "--parts", "serach"])
    assert "no part serach here; there are tokens, doctor, " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_parts_run_on_two_workers_also_after_a_signal_and_beside_one_that_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.measure.node", "--accelerator", "cpu", "--out", "out"]
    command += ["--archive", "out.tar.gz"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    folder = tmp_path / "out"
    (folder / "lacking").mkdir(parents=True)
    (folder / "lacking" / "foretold.jsonl").write_text("no JSON\n")

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=tmp_path, env=environment)

    running = begin()
    until = time.monotonic() + 300
    while not (folder / "search" / "search.txt").exists() or "ok " not in (folder / "search/search.txt").read_text():
        assert time.monotonic() < until
        assert running.poll() is None
        time.sleep(0.5)
    running.send_signal(signal.SIGTERM)
    assert running.wait(120) == 128 + signal.SIGTERM
    assert begin().wait(900) == 0
    last = {(one.part, one.program): one for one in ended(folder)}
    assert [last.pop(one).code for one in (("lacking", "predict"), ("missing", "measure"))] == [1, 1]
    last.pop(("doctor", "doctor"))  # which finds what it finds
    assert [str(one) for one in last.values() if not one.well] == []
    assert " of them done" in (folder / "search" / "search.txt").read_text(), "the search was gone on with"
    foretold = (folder / "slices" / "foretold.jsonl").read_text().splitlines()
    measured = (folder / "full" / "measured.jsonl").read_text().splitlines()
    assert [json.loads(line)["config"] for line in measured] == [json.loads(line)["config"] for line in foretold]
    for name, count in (("mixed", 1), ("shared", 2)):
        figures = json.loads((folder / name / "figures.json").read_text())
        assert set(figures["wrong"]) <= {"no trial ended as oom"}, "which takes that a library says so"
        assert len(figures["searches"]) == count
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert {"search/search.tar.xz", "telemetry/pacing.json", "best/layouts.jsonl"} <= set(archive.getnames())
