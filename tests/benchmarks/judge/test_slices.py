from __future__ import annotations

import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import DATA
from benchmarks.judge.search import Launch, Table, by_gang, effort, of_any_batch
from benchmarks.judge.slices import Sliced, by_slices, main, read
from search_spaces.layout import Layout
from service.metrics import Method
from service.result import TrialResult
from trainables.status import Status

SWEEP = """num_gpus,micro_batch_size,status,gpu_seconds,tokens_per_s,joules_per_token
8,1,ok,80,100,1.0
8,2,ok,80,80,0.5
8,4,ok,80,60,0.9
8,8,ok,80,50,0.8
"""


def table(folder: Path, among: list[Layout] | None = None) -> Table:
    path = folder / "table.csv"
    path.write_text(SWEEP)
    return Table(path, among=among)


def told(table: Table, factor: float = 1.1) -> dict[Layout, Sliced]:
    """By slices that overrate all speeds alike, in five seconds each."""
    found = {}
    for layout, result in table.results.items():
        metrics = result.metrics | {"tokens_per_s": factor * (result.metrics["tokens_per_s"] or 0.0)}
        methods = dict.fromkeys(("tokens_per_s", "joules_per_token"), Method.SLICE)
        found[of_any_batch(layout)] = Sliced(replace(result, metrics=metrics, methods=methods), 5.0)
    return found


def test_only_what_leads_by_slices_is_run_in_full(tmp_path: Path) -> None:
    sweep = table(tmp_path)
    launches = list(by_slices(sweep, told(sweep), few=4, seed=0))
    assert [(launch.full, launch.gpu_seconds) for launch in launches[:4]] == [(False, 5.0)] * 4
    first, second, *_ = sweep.results
    assert {launch.layout for launch in launches[4:6]} == {first, second}
    assert all(launch.full for launch in launches[4:])
    assert len(launches) == 8, "in the end all are run in full"
    found = effort(sweep, iter(launches))
    assert (found.trials[-1], found.gpu_seconds[-1]) == (2, 4 * 5 + 2 * 80)


def test_what_slices_alone_have_seen_is_not_reached(tmp_path: Path) -> None:
    sweep = table(tmp_path)
    found = effort(sweep, (Launch(layout, 5.0, full=False) for layout in sweep.results))
    assert (found.trials, found.gpu_seconds) == ([0, 0, 0], [20.0] * 3)
    assert effort(sweep, by_gang(sweep, "auto", 0)).trials[-1] >= 2


def test_failed_slices_are_not_run_in_full(tmp_path: Path) -> None:
    sweep = table(tmp_path)
    sliced = told(sweep)
    failing = next(iter(sweep.results))
    sliced[of_any_batch(failing)] = Sliced(TrialResult("a", failing, Status.OOM), 3.0)
    launches = list(by_slices(sweep, sliced, few=2, seed=0))
    assert [launch.full for launch in launches if launch.layout == failing] == [False]


def test_layouts_without_slices_are_left_out(tmp_path: Path) -> None:
    some = [of_any_batch(layout) for layout in table(tmp_path).results][1:3]
    assert [of_any_batch(layout) for layout in table(tmp_path, among=some).results] == some


@pytest.mark.parametrize("blind", [[], ["--blind"]])
def test_committed_slices_are_judged(blind: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([str(DATA / "llama3_12l_4xh200.csv"), str(DATA / "slices_1xh200.jsonl.xz"), "--seeds", "1", *blind])
    title, costs, _, gang, slices = capsys.readouterr().out.splitlines()
    assert title.startswith("llama3_12l_4xh200.csv: 22 layouts by slices and in full")
    assert costs.endswith("by slices on average")
    assert [line.split()[0] for line in (gang, slices)] == ["gang", "slices"]


def test_what_was_printed_beside_the_lines_is_left_out(tmp_path: Path) -> None:
    lines = lzma.decompress((DATA / "slices_2xh200.jsonl.xz").read_bytes()).decode().splitlines()
    path = tmp_path / "slices.txt"
    path.write_text("\n".join([*lines, "error of  s/step"]))
    assert len(read([path])) == len({json.loads(line)["layout"] for line in lines})


def test_a_file_without_slices_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table(tmp_path)
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "table.csv"), str(tmp_path / "none.jsonl")])
    assert ended.value.code == 2
    assert "no row of the table is among the layouts asked for" in capsys.readouterr().err
