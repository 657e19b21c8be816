"""What ranks take in company, of recorded lines, and of two workers of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.measure.blind import Row, layout_of, read, row_of
from benchmarks.measure.company import ALONE, BESIDE, GANG, KERNELS, STATE, longer, main, of_gang, table
from search_spaces.layout import Layout
from service.result import TrialResult
from service.spec import load_spec
from trainables.status import Status

LAYOUT = Layout("megatron", 2, 8, tensor_parallel_size=2, sequence_parallel=True)

SPEC = {
    "model": {"family": "llama", "layers": 2, "hidden": 64, "heads": 8, "ffn_hidden": 176, "vocab": 512},
    "data": "synthetic",
    "sequence_length": 32,
    "global_batch_size": 8,
    "cluster": {"nodes": 1, "gpus_per_node": 2, "accelerator": "cpu", "cpus_per_worker": 0.4},
    "space": {"engine": "megatron", "num_gpus": 2, "tensor_parallel_size": 2, "precision": "fp32"},
    "measurement": {"window_s": 0.5, "window_min_steps": 2, "steady_steps": 2, "warmup_max_s": 1, "deadline_s": 90},
}


def line(way: str, device: str, products_s: float, clock: float | None = 1500.0) -> Row:
    kernels = dict.fromkeys(KERNELS, 0.1) | {"matmul_s": products_s, "attention_s": 0.0}
    state = dict.fromkeys(STATE, 100.0) | {STATE[0]: clock}
    return row_of("specs/tiny.yaml", LAYOUT) | {"way": way, "device": device, "step_s": 2.0} | kernels | state


def test_products_are_held_against_those_of_the_same_gpu() -> None:
    rows = [
        line(ALONE, "GPU-first", 0.9),
        line(BESIDE, "GPU-first", 1.1),
        line(BESIDE, "GPU-second", 1.25, None),
        line(GANG, "GPU-first", 1.02),
        line(GANG, "GPU-second", 1.3),
        line(GANG, "GPU-third", 1.3),
    ]
    found = longer(rows)
    spec = rows[0]["spec"]
    assert found == pytest.approx({(spec, LAYOUT.label, "GPU-first"): 0.02, (spec, LAYOUT.label, "GPU-second"): 0.04})
    assert longer([rows[0], rows[3] | {"spec": "specs/other.yaml"}]) == {}, "the same label is another layout there"
    told = table(rows).splitlines()[2:]
    assert [cells.split()[-9] for cells in told[:3]] == ["2", "2", "2"]
    assert "1500" not in told[3], "a clock that nobody read is left out"


def test_a_trial_that_did_not_end_well_is_told() -> None:
    with pytest.raises(SystemExit, match="oom: no room"):
        list(of_gang(LAYOUT, TrialResult("t", LAYOUT, Status.OOM, "no room")))


def test_a_pipeline_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, layout = tmp_path / "layouts.jsonl", Layout("megatron", 2, 8, pipeline_parallel_size=2)
    file.write_text(json.dumps(row_of("specs/tiny.yaml", layout)) + "\n")
    with pytest.raises(SystemExit, match="2"):
        main([str(file), "--out", str(tmp_path / "out.jsonl")])
    assert f"ranks of a pipeline differ: leave out {layout.label}" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_alone_and_a_gang_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, file, out = tmp_path / "tiny.yaml", tmp_path / "layouts.jsonl", tmp_path / "company.jsonl"
    spec.write_text(yaml.safe_dump({"name": "tiny"} | SPEC))
    (layout,) = load_spec(spec).located().legal.layouts
    file.write_text(json.dumps(row_of(str(spec), layout)) + "\n")
    main([str(file), "--out", str(out)])
    rows = read(out)
    assert [row["way"] for row in rows] == [ALONE, BESIDE, BESIDE, GANG, GANG, ALONE, BESIDE, BESIDE]
    for row in rows:
        assert layout_of(row) == layout
        assert row["matmul_s"] > 0
    assert "products and attention take" in capsys.readouterr().out
