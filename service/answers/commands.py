"""How torchrun starts a program of the user's for a layout, without Wattune and without Ray: a shell script."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import trainables.hook
from search_spaces.layout import Layout
from service.answers.exports import RANK_ORDER, power_limit
from service.answers.nodes import needed, rendezvous
from service.errors import InputError
from trainables.command import TRIAL_DIR, Command

FORMAT = "torchrun"
"""The one format that layouts of any program have."""

END = "END_OF_FILE"


@dataclass(frozen=True)
class CommandLaunch:
    """A layout, the command that trains it, and the GPUs of each node."""

    layout: Layout
    command: Command
    gpus_per_node: int

    def check(self, format: str) -> None:
        """Raise `InputError` for a format that says nothing of programs that others wrote."""
        if format != FORMAT:
            raise InputError(f"{format} cannot express layouts of the trainer {self.layout.engine}, only {FORMAT} can")

    @property
    def not_expressible(self) -> dict[str, str]:
        """What the script leaves to a person, by field."""
        unsaid = {"steps": "how long it trains is for the command to say: in trials it was ended"}
        if self.command.steps is None:
            unsaid["hook"] = "wattune_steps.py must be beside the script; `wattune export` puts it there"
        ordered = {} if self.layout.rank_order is None else {"rank_order": RANK_ORDER}
        return unsaid | ordered | power_limit(self.layout)


def hook_files() -> dict[str, str]:
    """What programs import that tell of their steps: name -> text."""
    folder = Path(trainables.hook.__path__[0])
    return {path.name: path.read_text() for path in sorted(folder.glob("wattune_*.py"))}


def script(launch: CommandLaunch, title: str) -> str:
    """Starts the program on the GPUs of one node, as a trial did; `title` is told in its first lines.

    Its own folder is the program's `TRIAL_DIR`, into which it writes the configuration files.
    """
    command, unsaid = launch.command, launch.not_expressible
    lines = ["#!/usr/bin/env bash", f"# {title}: {launch.layout.label}"]
    lines += [f"# {name}: {how}" for name, how in unsaid.items()]
    lines += ["set -euo pipefail", *needed(launch)]
    lines.append('folder="$(cd "$(dirname "${BASH_SOURCE[0]:-.}")" && pwd)"')
    for name, text in command.files:
        lines += [f"cat > {_placed(f'{TRIAL_DIR}/{name}')} <<'{END}'", text.rstrip("\n"), END]
        if TRIAL_DIR in text:
            lines.append(_with_folder(name))
    if command.steps is None:
        lines.append('export PYTHONPATH="${folder}${PYTHONPATH:+:${PYTHONPATH}}"')
    lines += [f"export {name}={_placed(value)}" for name, value in command.environment]
    lines.append(f"cd {_placed(command.directory or TRIAL_DIR)}")
    words = [*rendezvous(launch), "--no-python", *map(_placed, command.arguments)]
    return "\n".join([*lines, "exec " + " \\\n  ".join(words)]) + "\n"


def _placed(text: str) -> str:
    """One word of the shell, with the script's folder in place of the trial's own."""
    return '"${folder}"'.join(shlex.quote(piece) if piece else "" for piece in text.split(TRIAL_DIR)) or "''"


def _with_folder(name: str) -> str:
    """Put the script's folder in place of the trial's own in a file."""
    path = _placed(f"{TRIAL_DIR}/{name}")
    return f'text="$(< {path})" && printf \'%s\\n\' "${{text//\'{TRIAL_DIR}\'/"${{folder}}"}}" > {path}'
