"""A layout trained by torchrun, without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from trainables.data import SYNTHETIC
from trainables.launch import Launch, main, read
from trainables.training import Training

LAYOUT = Layout("megatron", 2, 8, micro_batch_size=2, zero_stage=2, precision="fp32", rank_order=(1, 0))
LAUNCH = Launch(LAYOUT, Training(PRESETS["tiny-llama"], SYNTHETIC, 64, 0), "cpu", 2)
ALONE = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def written(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.mark.parametrize("engine", ["megatron", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_torchrun_trains_a_layout(engine: str, tmp_path: Path) -> None:
    file = written(tmp_path, replace(LAUNCH, layout=replace(LAYOUT, engine=engine)).to_dict())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*command, "-m", "trainables.launch", str(file), "--steps=2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    *steps, losses, speed = ended.stdout.splitlines()
    assert [line.split(":")[0] for line in steps] == [
        "step 1 (warmup)",
        "step 2 (warmup)",
        "step 3 (warmup)",
        "step 4 (window)",
        "step 5 (window)",
    ]
    first, last = (float(loss) for loss in losses.split()[1::3])
    assert first == pytest.approx(np.log(LAUNCH.training.model.vocab), rel=0.02)
    assert last < first
    number, unit, *over = speed.split()
    assert float(number.replace(",", "")) > 0
    assert (unit, " ".join(over)) == ("tokens/s", "over 2 steps")


def test_a_launch_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read(written(tmp_path, LAUNCH.to_dict())) == LAUNCH


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layout": {}}, "missing 3 required positional arguments"),
        ({"accelerator": "abacus"}, "accelerator 'abacus' is unknown"),
        ({"training": LAUNCH.to_dict()["training"] | {"speed": 1}}, "unexpected keyword argument 'speed'"),
        ({"layout": LAUNCH.to_dict()["layout"] | {"num_gpus": 4}}, "one of 4 GPUs, and torchrun started 1 processes"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    changes: dict[str, Any],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    assert main([str(written(tmp_path, LAUNCH.to_dict() | changes))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_without_torchrun_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)
    assert main([str(written(tmp_path, LAUNCH.to_dict()))]) == 2
    assert main([str(tmp_path / "nothing.yaml")]) == 2
    assert main([str(written(tmp_path, LAUNCH.to_dict())), "--steps=0"]) == 2
    wrong = capsys.readouterr().err.splitlines()
    assert [line.split(": ", 1)[1] for line in wrong] == [
        "WORLD_SIZE is not set: start this by torchrun",
        f"{tmp_path / 'nothing.yaml'}: No such file or directory",
        "--steps 0: must be at least 1",
    ]
