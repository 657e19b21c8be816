"""Which layouts are foretold blindly, and what is told of them; that both halves run is a test of its own."""

from __future__ import annotations

import argparse
import json
import lzma
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import SPECS
from benchmarks.measure.blind import draw, failures, left, main, points, read, table
from benchmarks.measure.slices import part
from search_spaces.layout import SCHEDULES, Layout
from service.result import TrialResult
from service.spec import load_spec
from trainables.status import Status

SIZE = "peak_memory_gib"
ONE, OTHER = Layout("megatron", 2, 8), Layout("deepspeed", 2, 8)


@pytest.mark.parametrize("name", ["llama", "gpt", "moe"])
def test_what_is_drawn_is_spread_over_all_axes(name: str) -> None:
    spec = load_spec(SPECS / f"blind_{name}.yaml")
    layouts = [layout for layout in spec.legal.layouts if layout.num_gpus == 2]
    drawn = draw(layouts, 12, seed=1)
    assert len(set(drawn)) == 12
    assert drawn == draw(layouts, 12, seed=1) != draw(layouts, 12, seed=2)
    for axis in (
        "engine",
        "compile",
        "data_parallel_size",
        "tensor_parallel_size",
        "context_parallel_size",
        "pipeline_parallel_size",
    ):
        assert {getattr(layout, axis) for layout in drawn} == {getattr(layout, axis) for layout in layouts}
    schedules = {layout.pipeline_schedule for layout in drawn if layout.pipeline_parallel_size > 1}
    assert len(schedules) >= len(SCHEDULES) - 1
    assert (name == "moe") == any(layout.expert_parallel_size > 1 for layout in drawn)
    assert len(draw(layouts, 10_000, seed=0)) == len(layouts)


def result(layout: Layout, step_s: float | None, **more: float) -> dict[str, Any]:
    status = Status.OOM if step_s is None else Status.OK
    metrics: dict[str, float | None] = {"step_time_s": step_s, **more}
    return TrialResult("t", layout, status, "no room" if step_s is None else None, metrics).to_dict()


def row(layout: Layout, **more: Any) -> dict[str, Any]:
    return {"spec": "specs/small.yaml", "layout": layout.label, "config": layout.to_dict()} | more


FORETOLD = [
    row(ONE, slices=result(ONE, 0.98, joules_per_token=2.2), seconds=9.0, foretold={"step_time_s": 0.5}),
    row(OTHER, slices=result(OTHER, 1.5), seconds=9.0, foretold={}),
]
MEASURED = [
    row(ONE, full=result(ONE, 1.0, joules_per_token=2.0)),
    row(OTHER, full=result(OTHER, 2.0, breakdown_span_s=2.0, breakdown_idle_s=0.5)),
]


def test_points_of_operators_have_what_was_foretold_with_and_without() -> None:
    foretold = [row(ONE, foretold={"step_time_s": 1.05}, before={"step_time_s": 1.3})]
    found = points(foretold, MEASURED)
    assert found[0]["error"] == pytest.approx({"step_time_s": 0.05})
    assert found[0]["beside"]["s/step without operators"] == pytest.approx({"step_time_s": 0.3})
    text = table(found)
    assert "s/step without operators" in text
    assert ("+5.00%" in text, "+30.00%" in text) == (True, True)
    assert list(failures(foretold, MEASURED)) == []


def test_points_of_a_calibrated_model_have_what_was_foretold_by_operators_alone_and_before() -> None:
    calibrated = {"foretold": {"step_time_s": 1.02}, "by_operators": {"step_time_s": 1.05}}
    found = points([row(ONE, **calibrated, before={"step_time_s": 1.3})], MEASURED)
    header, *lines = table(found).splitlines()
    assert header.index("s/step by operators alone") < header.index("before calibration")
    told = next(line for line in lines if ONE.label in line)
    assert told.index("+2.00%") < told.index("+5.00%") < told.index("+30.00%")


def test_models_foretell_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WATTUNE_HOME", str(tmp_path / "home"))
    out, spec = tmp_path / "foretold.jsonl", str(SPECS / "zero_gpt_2gpu.yaml")
    for _ in range(2):  # the second time all is there
        main(["foretell", spec, "--layouts", "3", "--seed", "1", "--out", str(out)])
    rows = read(out)
    assert len(rows) == 3
    assert {one["config"]["zero_stage"] for one in rows} == {1, 2, 3}
    measured = []
    for one in rows:
        metrics = one["foretold"]
        full = result(Layout.from_dict(one["config"]), 1.25 * metrics["step_time_s"], **{SIZE: 0.8 * metrics[SIZE]})
        measured.append({**one, "full": full})
    for point in points(rows, measured):
        assert point["error"]["step_time_s"] == pytest.approx(-0.2)
        assert point["error"][SIZE] == pytest.approx(0.25)
    assert "GiB" in capsys.readouterr().out


def test_of_several_specs_one_layout_each_comes_in_turn(tmp_path: Path) -> None:
    rows = [row(ONE), row(OTHER), row(ONE) | {"spec": "specs/other.yaml"}]
    out = tmp_path / "out.jsonl"
    assert left(rows, out) == [rows[0], rows[2], rows[1]]
    out.write_text(json.dumps(rows[0]) + "\n")
    assert left(rows, out) == [rows[1], rows[2]]


def test_every_point_is_told_worst_first_with_means_and_largest() -> None:
    found = points(FORETOLD, MEASURED)
    assert found[0]["error"] == pytest.approx({"step_time_s": -0.02, "joules_per_token": 0.1})
    assert found[0]["beside"]["cost model's s/step"] == pytest.approx({"step_time_s": -0.5})
    lines = [line.split() for line in table(found).splitlines()]
    text = table(found)
    assert text.index(OTHER.label) < text.index(ONE.label)
    assert "-25.00%" in text
    assert "waits for the CPU: 25% idle" in next(line for line in text.splitlines() if OTHER.label in line)
    means = [line for line in lines if "mean" in line]
    assert [line[line.index("mean") + 3] for line in means] == ["13.50%", "2.00%", "13.50%"]
    largest = [line for line in lines if "largest" in line]
    assert [line[line.index("largest") + 3] for line in largest] == ["25.00%", "2.00%", "25.00%"]


def test_a_collective_that_waits_for_the_other_ranks_cpu_counts_as_idle() -> None:
    """By what is exposed in full and not by slices, but for pipelines' messages, which wait for passes."""

    def exposed(seconds: float, sent: float) -> dict[str, float]:
        named = {"span": 2.0, "idle": 0.1, "exposed_communication": seconds, "exposed_send_recv": sent}
        return {f"breakdown_{name}_s": value for name, value in named.items()}

    foretold = [row(ONE, slices=result(ONE, 1.5, **exposed(0.2, 0.1)), seconds=9.0, foretold={})]
    for sent, idle in ((0.1, 0.3), (0.5, 0.1)):
        (point,) = points(foretold, [row(ONE, full=result(ONE, 2.0, **exposed(0.7, sent)))])
        assert point["idle"] == pytest.approx(idle)


def test_what_is_not_measured_yet_has_no_point_and_what_failed_is_named() -> None:
    assert [point["layout"] for point in points(FORETOLD, MEASURED[1:])] == [OTHER.label]
    failed = row(ONE, full=result(ONE, None))
    assert list(failures(FORETOLD, [failed])) == [f"specs/small.yaml: {ONE.label}: full: oom: no room"]


def test_what_is_there_is_told_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foretold, measured = tmp_path / "foretold.jsonl.xz", tmp_path / "measured.jsonl"
    foretold.write_bytes(lzma.compress("".join(json.dumps(row) + "\n" for row in FORETOLD).encode()))
    measured.write_text("".join(json.dumps(row) + "\n" for row in MEASURED[:1]))
    main(["tell", str(foretold), str(measured)])
    told = capsys.readouterr().out
    assert ONE.label in told
    assert OTHER.label not in told
    assert "mean of 1" in told


def test_models_are_held_against_slices_where_nothing_was_measured_in_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foretold, sliced = tmp_path / "foretold.jsonl", tmp_path / "slices.jsonl"
    foretold.write_text(json.dumps(row(ONE, foretold={"step_time_s": 1.2})) + "\n")
    rows = [row(ONE, slices=result(ONE, 1.6), seconds=9.0), row(OTHER, slices=result(OTHER, None), seconds=9.0)]
    sliced.write_text("".join(json.dumps(one) + "\n" for one in rows))
    main(["tell", str(foretold), str(sliced)])
    told = capsys.readouterr().out
    assert "-25.00%" in told
    assert f"specs/small.yaml: {OTHER.label}: slices: oom: no room" in told


@pytest.mark.parametrize(("text", "rows"), [("1/1", [0, 1, 2, 3, 4]), ("1/2", [0, 2, 4]), ("2/2", [1, 3])])
def test_a_part_is_every_nth_row(text: str, rows: list[int]) -> None:
    assert list(range(5))[part(text)] == rows


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no part"):
        part(text)


TINY = """
name: tiny
model: tiny-llama
data: synthetic
sequence_length: 64
global_batch_size: 16
cluster: {gpus_per_node: 2, accelerator: cpu, cpus_per_worker: 0.5}
space: {pipeline_parallel_size: [1, 2], zero_stage: [0, 1], precision: fp32}
measurement: {window_s: 0.1, window_min_steps: 3, steady_steps: 2, warmup_max_s: 1, deadline_s: 90}
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_halves_run_and_go_on_where_they_ended(
    ray_session: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, file = tmp_path / "tiny.yaml", tmp_path / "foretold.jsonl"
    spec.write_text(TINY)
    asked = ["predict", str(spec), "--layouts", "2", "--seed", "0", "--out", str(file)]
    main([*asked, "--seconds", "0"])
    assert read(file) == []
    main(asked)
    foretold = read(file)
    assert [row["slices"]["status"] for row in foretold] == ["ok", "ok"]
    main(asked)
    assert read(file) == foretold, "nothing is left"
    main(["measure", str(file)])
    measured = read(tmp_path / "foretold.measured.jsonl")
    assert [row["layout"] for row in measured] == [row["layout"] for row in foretold]
    assert "mean of 2" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_layouts_that_a_calibration_did_not_try_are_foretold_by_it(
    ray_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WATTUNE_HOME", str(tmp_path / "home"))
    spec, file = tmp_path / "tiny.yaml", tmp_path / "foretold.jsonl"
    one_gpu = "space: {micro_batch_size: [1, 2], recompute: [none, full], precision: fp32}\nbudget: {trials: 2}"
    text = TINY.replace("gpus_per_node: 2", "gpus_per_node: 1").replace("0.5", "1")
    spec.write_text(re.sub("space: .*", one_gpu, text))
    main(["calibrated", str(spec), "--layouts", "4", "--seed", "0", "--out", str(file)])
    foretold = read(file)
    assert len(foretold) == 2, "the other two it tried"
    for row in foretold:
        steps = {row[how]["step_time_s"] for how in ("foretold", "by_operators", "before")}
        assert len(steps) == 3
        assert row["foretold"]["peak_memory_gib"] > 0
    main(["measure", str(file)])
    assert "s/step by operators alone" in capsys.readouterr().out
