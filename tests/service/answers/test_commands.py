"""Scripts that start a program of the user's by torchrun: what it finds is what it found in a trial."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from search_spaces.layout import Layout
from service.answers import start
from service.answers.commands import CommandLaunch, script
from service.errors import InputError
from service.spec import load_spec
from service.trials.command import command_of
from tests.service.answers.test_start import started
from trainables.command import TRIAL_DIR, Command, LogPatterns

EXAMPLES = Path(__file__).parents[3] / "examples"
ODD = "two words; $HOME `x` 'quoted'"
COMMAND = Command(
    arguments=("python", "-m", "train", ODD, f"--config={TRIAL_DIR}/run.toml", ""),
    environment=(("MINE", f"{TRIAL_DIR}/cache of {ODD}"),),
    files=(("run.toml", f'out = "{TRIAL_DIR}/out"\nodd = "$HOME & `x`"\n'), ("b.json", "{}\n")),
    directory=None,
    tokens_per_step=256,
    steps=LogPatterns("step (?P<step>1)"),
)
LAUNCH = CommandLaunch(Layout("mine", 4, 8), COMMAND, 8)
TITLE = "search mine-1 (mine)"


def folder(launch: CommandLaunch, out: Path, target: str = "torchrun") -> Path:
    start.write(start.folder(target, launch, TITLE).files, out)
    return out


def test_words_environment_and_files_reach_the_program_as_in_a_trial(tmp_path: Path) -> None:
    out = folder(LAUNCH, tmp_path / "a & folder")
    words = started(out)
    program = ["python", "-m", "train", ODD, f"--config={out}/run.toml", ""]
    assert words == ["--standalone", "--nproc-per-node=4", "--no-python", *program]
    assert f"MINE={out}/cache of {ODD}" in (out / "environment").read_text().splitlines()
    assert (out / "run.toml").read_text() == f'out = "{out}/out"\nodd = "$HOME & `x`"\n'
    assert (out / "b.json").read_text() == "{}\n"
    assert f"PWD={out}" in (out / "environment").read_text().splitlines()
    assert not (out / "wattune_steps.py").exists()  # it tells of its steps in its log


@pytest.mark.parametrize("target", ["torchrun", "slurm"])
def test_scripts_for_nodes_are_shell(target: str, tmp_path: Path) -> None:
    launch = replace(LAUNCH, layout=replace(LAUNCH.layout, num_gpus=16), command=replace(COMMAND, steps=None))
    out = folder(launch, tmp_path / "out", target)
    scripts = [path for path in out.iterdir() if path.suffix in (".sh", ".sbatch")]
    assert len(scripts) == {"torchrun": 1, "slurm": 2}[target]
    for one in scripts:
        subprocess.run(["bash", "-n", one.name], cwd=out, check=True)
        if shellcheck := shutil.which("shellcheck"):
            subprocess.run([shellcheck, one.name], cwd=out, check=True)
    ended = subprocess.run(["bash", "start.sh"], cwd=out, capture_output=True, text=True, check=False)
    assert "MASTER_ADDR: set it to the address of the first node" in ended.stderr
    assert started(out, MASTER_ADDR="first", NODE_RANK="1")[:3] == [
        "--nnodes=2",
        "--node-rank=1",
        "--master-addr=first",
    ]
    for name in ("wattune_steps.py", "wattune_huggingface.py", "wattune_lightning.py"):
        assert (out / name).exists()


def test_what_is_left_to_a_person_is_listed_and_other_formats_are_refused() -> None:
    launch = replace(LAUNCH, layout=replace(LAUNCH.layout, rank_order=(1, 0, 3, 2)))
    assert list(launch.not_expressible) == ["steps", "rank_order"]
    assert "\n# rank_order: the order of the hosts" in script(launch, TITLE)
    for target in ("megatron-lm", "deepspeed"):
        with pytest.raises(InputError, match=f"{target} cannot express layouts of the trainer mine, only torchrun can"):
            start.folder(target, LAUNCH, TITLE)
    with pytest.raises(InputError, match="num_gpus 4: torchrun starts as many processes on each node"):
        script(replace(LAUNCH, gpus_per_node=3), TITLE)


@pytest.mark.slow
def test_the_example_trains_by_its_script(tmp_path: Path) -> None:
    problem = load_spec(EXAMPLES / "plain_pytorch.yaml")
    assert problem.trainer is not None
    layout = next(one for one in problem.legal.layouts if one.num_gpus == 2)
    command = command_of(layout, problem.trainer, problem)
    command = replace(command, arguments=(*command.arguments, "--steps=3"))
    out = folder(CommandLaunch(layout, command, 2), tmp_path / "run")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path}
    subprocess.run([out / "start.sh"], cwd=tmp_path, env=environment, check=True)
