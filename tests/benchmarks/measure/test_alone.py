"""What trials by slices cost, as it is printed of recorded ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.measure.alone import costs, main, off
from benchmarks.measure.blind import Row, read

ROOT = Path(__file__).parents[3] / "benchmarks"
RECORDED = ROOT / "data" / "alone_1xh200.jsonl.xz"


def row(layout: str, seconds: float, short_s: float, whole_s: float) -> Row:
    def result(step_s: float, **metrics: float) -> Row:
        return {"status": "ok", "metrics": {"step_time_s": step_s, "mean_power_w": 600.0} | metrics}

    short = result(short_s, warmup_time_s=4.0, window_time_s=7.6)
    return {
        "spec": "specs/tiny.yaml",
        "layout": layout,
        "kinds": 2,
        "seconds": seconds,
        "short": short,
        "whole": result(whole_s),
    }


def test_the_dearest_comes_first_and_what_is_farthest_off() -> None:
    rows = [row("cheap", 10.0, 2.2, 2.0), row("dear", 30.0, 0.99, 1.0), row("between", 14.0, 1.0, 1.0)]
    dearest = costs(rows).splitlines()
    assert [line.split()[1] for line in dearest[2:5]] == ["dear", "between", "cheap"]
    assert dearest[2].split()[2:] == ["2", "30.0", "nan", "nan", "4.0", "7.6", "nan"]
    assert dearest[-1] == "14.0 s in the median, 30.0 s at most"
    worst = off(rows).splitlines()
    assert [line.split()[:3] for line in worst[2:5]] == [
        ["tiny", "cheap", "+10.00%"],
        ["tiny", "dear", "-1.00%"],
        ["tiny", "between", "+0.00%"],
    ]
    assert [line.split()[:2] for line in worst[5:]] == [["mean", "3.67%"], ["largest", "10.00%"]]


def test_results_are_those_of_the_recorded_trials(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(ROOT / "specs" / "alone_gpt.yaml"), "--layouts", "0", "--out", str(RECORDED)])
    printed = capsys.readouterr().out.strip()
    assert printed
    assert printed in (ROOT / "results" / "alone_1xh200.txt").read_text()


def test_what_ran_out_of_memory_is_named_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = read(RECORDED)[0]
    failed["short"] |= {"status": "oom", "cause": "rank 0: warmup: OutOfMemoryError"}
    out = tmp_path / "alone.jsonl"
    out.write_text(json.dumps(failed) + "\n")
    main([str(ROOT / "specs" / "alone_gpt.yaml"), "--layouts", "0", "--out", str(out)])
    assert capsys.readouterr().out.strip() == f"{failed['layout']}, short: oom: rank 0: warmup: OutOfMemoryError"
