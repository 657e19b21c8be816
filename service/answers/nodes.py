"""The nodes that a layout takes, and how torchrun starts a program on them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from service.answers.exports import Variable
from service.errors import InputError
from trainables.launch import Launch


def torchrun(launch: Launch, words: Sequence[str | Variable]) -> str:
    """The command that starts a program on the GPUs of one node, `NODE_RANK` of them, in a shell."""
    nodes, processes = nodes_of(launch)
    rendezvous = ["--standalone"]
    if nodes > 1:
        rendezvous = [
            f"--nnodes={nodes}",
            '--node-rank="${NODE_RANK}"',
            '--master-addr="${MASTER_ADDR}"',
            '--master-port="${MASTER_PORT:-29500}"',
        ]
    start = " ".join(["torchrun", *rendezvous, f"--nproc-per-node={processes}"])
    lines: list[list[str]] = [[]]
    for word in words:
        if isinstance(word, str) and word.startswith("--"):
            lines.append([])
        lines[-1].append(f'"${{{word.name}}}"' if isinstance(word, Variable) else shlex.quote(word))
    return " \\\n  ".join([start, *(" ".join(line) for line in lines if line)])


def nodes_of(launch: Launch) -> tuple[int, int]:
    """How many nodes a layout takes, and how many GPUs of each. Raises `InputError` for a node in part."""
    gpus, node = launch.layout.num_gpus, launch.gpus_per_node
    if gpus <= node:
        return 1, gpus
    if gpus % node:
        raise InputError(f"num_gpus {gpus}: torchrun starts as many processes on each node, which has {node} GPUs here")
    return gpus // node, node
