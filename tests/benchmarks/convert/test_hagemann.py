"""Sheets in the form of Hagemann et al. 2023, with figures of nobody's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks.convert.hagemann import main
from benchmarks.judge import memory
from benchmarks.judge.search import Table

SHEET = "llama_30B_8k_seq_length_bfloat16_128_GPUs_all_runs"
HEADER = [
    "Trial ID",
    "World Size",
    "Average Step Time",
    "Average MFU",
    "activation_checkpointing_type",
    "kernel",
    "micro_batch_size",
    "model_parallel_size",
    "pipe_parallel_size",
]
ROWS = [
    [5, 128, "80.0", "0.3", "every_layer", "flash_attention2", 1, 4, 8],
    [2, 128, "OOM Error", "OOM Error", "disabled", "flash_attention2", 4, 4, 4],
    [3, 128, "Other Error", "Other Error", "disabled", "flash_attention2", 1, 4, 4],
    [4, 128, "64.0", "0.4", "disabled", "flash_attention2", 1, 4, 4],
    [8, 128, "90.0", "0.2", "disabled", "torch", 1, 4, 4],
    [1, 128, "Other Error", "Other Error", "disabled", "torch", 1, 4, 4],
    [7, 128, "70.0", "0.3", "disabled", "torch", 1, 4, 4],
    [6, 128, "Kernel not available", "Kernel not available", "disabled", "flash_attention2", 1, 2, 4],
]


def sheet(folder: Path, name: str = SHEET, more: dict[str, list[Any]] | None = None) -> Path:
    path = folder / f"{name}.xlsx"
    frame = pd.DataFrame(ROWS, columns=HEADER).assign(**(more or {}))
    title = pd.DataFrame([["Sheet", *[""] * (len(frame.columns) - 1)], list(frame.columns)])
    body = frame.set_axis(title.columns, axis=1)
    pd.concat([title, body]).to_excel(path, header=False, index=False)
    return path


def test_a_sheet_is_a_table_with_its_spec(tmp_path: Path) -> None:
    main([str(sheet(tmp_path)), "--out", str(tmp_path / "out")])
    table = Table(tmp_path / "out" / f"{SHEET}.csv")
    assert {layout.label: result.status for layout, result in table.results.items()} == {
        "megatron 128gpu dp8 tp4 pp4 zero1 mbs4 reduce-bf16": "oom",
        "megatron 128gpu dp8 tp4 pp4 zero1 mbs1 reduce-bf16": "ok",
        "megatron 128gpu dp4 tp4 pp8 zero1 mbs1 layers8x4-7x4 recompute reduce-bf16": "ok",
        "megatron 128gpu dp16 tp2 pp4 zero1 mbs1 reduce-bf16": "crash",
    }
    slower, faster = sorted(table.good, key=lambda layout: table.results[layout].metrics["tokens_per_s"] or 0)
    assert table.results[faster].metrics["tokens_per_s"] == pytest.approx(512 * 8192 / 64)
    assert table.results[slower].metrics["mfu"] == 0.3
    assert table.gpu_seconds[faster] == 10 * 64 * 128
    assert faster.global_batch_size == 512
    assert table.objectives == {"tokens_per_s": "maximize"}
    assert table.spec is not None
    assert set(table.good) < set(table.spec.legal.layouts)
    assert table.spec.workload.shape.parameters == pytest.approx(33.5e9, rel=0.01)
    assert set(table.predicted()) == set(table.results)


def test_without_measured_memory_the_model_is_judged_by_what_ran(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(sheet(tmp_path)), "--out", str(tmp_path)])
    capsys.readouterr()
    memory.main([str(tmp_path / f"{SHEET}.csv")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith(("fits", "too big"))] == [["2", "0"], ["0", "1"]]


def test_of_what_was_tried_twice_the_later_trial_counts(tmp_path: Path) -> None:
    name = "llama_13B_bfloat16_64_GPUs_sequence_parallelism"
    given = sheet(tmp_path, name, {"sequence_parallel": [False, False, False, False, True, False, False, False]})
    main([str(given), "--out", str(tmp_path), "--kernel", "torch"])
    table = Table(tmp_path / f"{name}.csv")
    assert {layout.label: result.metrics["step_time_s"] for layout, result in table.results.items()} == {
        "megatron 128gpu dp8 tp4 pp4 zero1 mbs1 sp reduce-bf16": 90.0,
        "megatron 128gpu dp8 tp4 pp4 zero1 mbs1 reduce-bf16": 70.0,
    }
    assert {layout.global_batch_size for layout in table.results} == {2048}


@pytest.mark.parametrize(
    ("name", "kernel", "reason"),
    [(SHEET, "fused", "no kernel fused, but flash_attention2, torch"), ("results", "torch", "LLaMA 13B, 30B, 65B")],
)
def test_another_sheet_is_refused(
    name: str, kernel: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(sheet(tmp_path, name)), "--out", str(tmp_path), "--kernel", kernel])
    assert reason in capsys.readouterr().err
