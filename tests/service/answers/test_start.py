"""Folders that start a run: what is in them, and that the scripts are shell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_spaces.layout import Layout
from search_spaces.models import PRESETS
from service.answers import start
from service.errors import InputError
from trainables.launch import Launch, read
from trainables.training import Training

PLAIN = Layout("megatron", 16, 64, micro_batch_size=2, zero_stage=3)
LAUNCH = Launch(PLAIN, Training(PRESETS["llama3-8b"], "/data/a corpus", 4096, 0), "h100", 8)
DEEPSPEED = replace(LAUNCH, layout=replace(PLAIN, engine="deepspeed", recompute="full", expandable_segments=True))
TITLE = "search tiny-1"


def launch_for(target: str) -> Launch:
    return DEEPSPEED if target == "deepspeed" else LAUNCH


def made(target: str, launch: Launch, out: Path) -> Path:
    start.write(start.folder(target, launch, TITLE).files, out)
    return out


def test_there_is_a_folder_for_each_framework_that_has_a_program() -> None:
    assert start.targets() == ["deepspeed", "huggingface", "megatron-lm", "torchrun", "torchtitan", "slurm"]


@pytest.mark.parametrize("target", start.targets())
@pytest.mark.parametrize("gpus", [4, 16])
def test_scripts_are_shell_and_name_what_a_person_must_say(target: str, gpus: int, tmp_path: Path) -> None:
    launch = launch_for(target)
    out = made(target, replace(launch, layout=replace(launch.layout, num_gpus=gpus)), tmp_path / "out")
    scripts = [path for path in out.iterdir() if path.suffix in (".sh", ".sbatch")]
    assert {path.name for path in scripts} == {"start.sh"} | ({"job.sbatch"} if target == "slurm" else set())
    for script in scripts:
        subprocess.run(["bash", "-n", script.name], cwd=out, check=True)
        assert os.access(script, os.X_OK)
        if shellcheck := shutil.which("shellcheck"):
            subprocess.run([shellcheck, script.name], cwd=out, check=True)
    text = (out / "start.sh").read_text()
    if target not in ("torchrun", "slurm"):
        assert "LEARNING_RATE:?set it to the peak learning rate" in text
        assert "TRAIN_STEPS:?set it to the number of optimizer steps" in text
    if gpus > 8:
        ended = subprocess.run(["bash", "start.sh"], cwd=out, capture_output=True, text=True, check=False)
        assert ended.returncode != 0
        assert "MASTER_ADDR: set it to the address of the first node" in ended.stderr


def started(out: Path, **environment: str) -> list[str]:
    """The words that a folder's script hands to torchrun, by a torchrun that prints them."""
    (out / "bin").mkdir()
    (out / "bin" / "torchrun").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\nenv >&2\n')
    (out / "bin" / "torchrun").chmod(0o755)
    path = f"{out / 'bin'}:{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "start.sh"], cwd=out, env={"PATH": path} | environment, capture_output=True, text=True, check=True
    )
    (out / "environment").write_text(ended.stderr)
    return ended.stdout.splitlines()


def test_words_reach_the_program_as_they_are(tmp_path: Path) -> None:
    out = made("megatron-lm", LAUNCH, tmp_path / "out")
    words = started(
        out, MASTER_ADDR="a", NODE_RANK="1", PRETRAIN_GPT="/a b/pretrain_gpt.py", LEARNING_RATE="3e-4", TRAIN_STEPS="7"
    )
    assert words[:5] == ["--nnodes=2", "--node-rank=1", "--master-addr=a", "--master-port=29500", "--nproc-per-node=8"]
    assert words[5] == "/a b/pretrain_gpt.py"
    assert words[words.index("--data-path") + 1] == "/data/a corpus"
    assert words[words.index("--seq-length") + 1] == "4096"
    assert words[words.index("--lr") + 1 : words.index("--lr") + 4] == ["3e-4", "--train-iters", "7"]
    assert words[words.index("--vocab-size") + 1] == "128255"


@pytest.mark.parametrize(
    ("changes", "queues"),
    [
        ({}, None),
        ({"tensor_parallel_size": 2}, None),
        ({"tensor_parallel_size": 2, "zero_stage": 1}, "1"),
        ({"context_parallel_size": 2, "zero_stage": 0}, "1"),
        ({"pipeline_parallel_size": 2, "zero_stage": 0}, None),
    ],
)
def test_megatron_lm_has_a_single_queue_to_the_device_where_it_asks_for_one(
    changes: dict[str, Any], queues: str | None, tmp_path: Path
) -> None:
    """By its own `megatron/training/arguments.py`: with tensor or context parallelism, and never with its FSDP."""
    out = made("megatron-lm", replace(LAUNCH, layout=replace(PLAIN, **changes)), tmp_path / "out")
    started(out, MASTER_ADDR="a", NODE_RANK="0", PRETRAIN_GPT="p", LEARNING_RATE="1", TRAIN_STEPS="1")
    environment = dict(line.partition("=")[::2] for line in (out / "environment").read_text().splitlines())
    assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == queues


def test_slurm_starts_wattunes_own_trainer_on_every_node(tmp_path: Path) -> None:
    out = made("slurm", LAUNCH, tmp_path / "out")
    job = (out / "job.sbatch").read_text()
    assert "#SBATCH --nodes=2\n" in job
    assert "#SBATCH --gpus-per-node=8\n" in job
    for name, text in (
        ("scontrol", "echo first; echo second"),
        ("srun", 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done'),
    ):
        (out / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (out / name).chmod(0o755)
    (out / "torchrun").write_text('#!/usr/bin/env bash\necho "$@"\n')
    (out / "torchrun").chmod(0o755)
    environment = {"PATH": f"{out}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(out), "SLURM_JOB_NODELIST": "n[1-2]"}
    ended = subprocess.run(["bash", "job.sbatch"], env=environment, cwd=out, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [
        f"--nnodes=2 --node-rank={node} --master-addr=first --master-port=29500 --nproc-per-node=8 "
        "-m trainables.launch run.yaml --steps 20"
        for node in (0, 1)
    ]
    assert read(out / "run.yaml") == LAUNCH


def test_what_the_files_say_is_not_told_to_be_missing() -> None:
    assert start.folder("deepspeed", DEEPSPEED, TITLE).not_expressible == {}
    assert set(start.folder("torchtitan", LAUNCH, TITLE).not_expressible) == {"data"}


def test_a_folder_is_refused_in_a_line(tmp_path: Path) -> None:
    odd = replace(LAUNCH, layout=replace(PLAIN, num_gpus=12))
    piped = replace(DEEPSPEED, layout=replace(DEEPSPEED.layout, pipeline_parallel_size=2, zero_stage=1))
    for target, launch, complaint in (
        ("abacus", LAUNCH, "there is no folder for 'abacus'; must be one of deepspeed"),
        ("megatron-bridge", LAUNCH, "there is no folder for 'megatron-bridge'"),
        ("deepspeed", LAUNCH, "deepspeed cannot express layouts of the engine megatron"),
        ("deepspeed", piped, "pipeline_parallel_size 2 is for your own model to say"),
        ("huggingface", piped, "the Trainer has no pipeline parallelism"),
        ("torchrun", odd, "num_gpus 12: torchrun starts as many processes on each node, which has 8 GPUs here"),
    ):
        with pytest.raises(InputError, match=complaint) as refused:
            start.folder(target, launch, TITLE)
        assert "\n" not in str(refused.value)
    (tmp_path / "there").write_text("")
    for out in (tmp_path, tmp_path / "there"):
        with pytest.raises(InputError, match="exists and is not an empty folder"):
            start.write({}, out)
    with pytest.raises(InputError, match="Not a directory"):
        start.write({}, tmp_path / "there" / "below")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["huggingface", "deepspeed"])
def test_the_programs_train(target: str, tmp_path: Path) -> None:
    """As they are started, on one CPU process, on tokens from a file."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    tokens = np.resize(np.arange(40, dtype=np.int64), 4000)
    np.save(tmp_path / "tokens.npy", tokens)
    layout = Layout("megatron", 1, 4, micro_batch_size=2, precision="fp32")
    if target == "deepspeed":
        layout = replace(layout, engine="deepspeed", recompute="full")
    training = Training(PRESETS["tiny-llama"], str(tmp_path / "tokens.npy"), 64, 0)
    out = made(target, Launch(layout, training, "cpu", 1), tmp_path / "out")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LEARNING_RATE": "1e-2",
        "TRAIN_STEPS": "6",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    (out / "bin").mkdir()
    (out / "bin" / "torchrun").write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (out / "bin" / "torchrun").chmod(0o755)
    environment["PATH"] = f"{out / 'bin'}:{environment['PATH']}"
    ended = subprocess.run(["bash", "start.sh"], cwd=out, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    losses = [float(number) for number in re.findall(r"(?:'loss': '?|loss )([0-9.]+)", ended.stdout)]
    assert len(losses) == 6
    assert losses[0] == pytest.approx(np.log(512), rel=0.05)
    assert losses[-1] < losses[0] - 0.5
