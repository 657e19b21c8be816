"""A folder that starts a run: files, and shell scripts for each node or for Slurm."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from service.answers import exports
from service.answers.commands import CommandLaunch, hook_files, script
from service.answers.exports import Export, Program, Variable
from service.answers.nodes import Placed, needed, nodes_of, torchrun
from service.errors import InputError
from trainables.launch import Launch

SLURM = "slurm"
START = "start.sh"
JOB = "job.sbatch"


@dataclass(frozen=True)
class Written:
    """`files` by name, and what of the layout they do not say: field of `Layout` -> what to do about it."""

    files: dict[str, str]
    not_expressible: dict[str, str]


def targets() -> list[str]:
    """What a folder can be for: the formats with a program, and Slurm, which starts Wattune's own trainer."""
    return [*(name for name in exports.names() if exports.named(name).program is not None), SLURM]


def folder(target: str, launch: Launch | CommandLaunch, title: str) -> Written:
    """The files that start a run; `title` is told in their first lines.

    Raises `InputError` for an unknown target, for a layout that it cannot express, and for one whose GPUs do not come
    in whole nodes.
    """
    if target not in targets():
        raise InputError(f"there is no folder for {target!r}; must be one of {', '.join(targets())}")
    if isinstance(launch, CommandLaunch):
        return _of_command(target, launch, title)
    export = exports.named("torchrun" if target == SLURM else target)
    export.check(launch)
    assert export.program is not None
    program = export.program(launch)
    said = {*program.expresses, *(["expandable_segments"] if export.environment(launch) else [])}
    unsaid = {name: how for name, how in export.not_expressible(launch).items() if name not in said}
    files = {**program.files, START: _script(export, launch, program, title, unsaid)}
    if target == SLURM:
        files[JOB] = _job(launch, title)
    return Written(files, unsaid)


def _of_command(target: str, launch: CommandLaunch, title: str) -> Written:
    """A program of the user's, whose files its script writes: they tell where they are."""
    launch.check("torchrun" if target == SLURM else target)
    files = {START: script(launch, title), **(hook_files() if launch.command.steps is None else {})}
    if target == SLURM:
        files[JOB] = _job(launch, title)
    return Written(files, {name: how for name, how in launch.not_expressible.items() if name != "hook"})


def write(files: dict[str, str], out: Path) -> None:
    """Make the folder. Raises `InputError` if something is there already, or nothing can be."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out}: exists and is not an empty folder")
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text)
            if name in (START, JOB):
                (out / name).chmod(0o755)
    except OSError as error:
        raise InputError(f"{out}: {error.strerror}") from None


def _script(export: Export, launch: Launch, program: Program, title: str, unsaid: dict[str, str]) -> str:
    nodes, _ = nodes_of(launch)
    variables = dict.fromkeys([word for word in program.words if isinstance(word, Variable)])
    variables |= dict.fromkeys(program.variables)
    lines = ["#!/usr/bin/env bash", f"# {title}: {launch.layout.label}"]
    if nodes > 1:
        lines.append(f"# On each of {nodes} nodes, with MASTER_ADDR the first of them and NODE_RANK from 0 on.")
    lines += [f"# {name}: {how}" for name, how in unsaid.items()]
    lines += ["set -euo pipefail", 'cd "$(dirname "${BASH_SOURCE[0]}")"']
    lines += needed(launch)
    for one in variables:
        if one.default is None:
            lines.append(f': "${{{one.name}:?set it to {one.meaning}}}"')
        else:
            lines.append(f"# {one.name}: {one.meaning}")
            lines.append(f"if [[ -z ${{{one.name}+set}} ]]; then {one.name}={shlex.quote(one.default)}; fi")
    if program.variables:
        lines.append(f"export {' '.join(one.name for one in program.variables)}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in export.environment(launch).items()]
    return "\n".join([*lines, f"exec {torchrun(launch, program.words)}"]) + "\n"


def _job(launch: Placed, title: str) -> str:
    nodes, processes = nodes_of(launch)
    return f"""#!/usr/bin/env bash
# {title}: {launch.layout.label}
# Give --partition, --account and --time to sbatch as your cluster asks for them.
#SBATCH --job-name=wattune
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={processes}
#SBATCH --exclusive
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:?submit this by sbatch from its folder}}"
read -r MASTER_ADDR < <(scontrol show hostnames "${{SLURM_JOB_NODELIST}}")
export MASTER_ADDR
# shellcheck disable=SC2016  # each task has a number of its own
exec srun bash -c 'NODE_RANK="${{SLURM_NODEID}}" exec bash {START}'
"""
