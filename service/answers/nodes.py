"""The nodes that a layout takes, and how torchrun starts a program on them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Protocol

from search_spaces.layout import Layout
from service.answers.exports import Variable
from service.errors import InputError


class Placed(Protocol):
    """A layout and the machines that it is for."""

    @property
    def layout(self) -> Layout: ...

    @property
    def gpus_per_node(self) -> int: ...


def torchrun(launch: Placed, words: Sequence[str | Variable]) -> str:
    """The command that starts a program on the GPUs of one node, `NODE_RANK` of them, in a shell."""
    lines: list[list[str]] = [[]]
    for word in words:
        if isinstance(word, str) and word.startswith("--"):
            lines.append([])
        lines[-1].append(f'"${{{word.name}}}"' if isinstance(word, Variable) else shlex.quote(word))
    start = " ".join(rendezvous(launch))
    return " \\\n  ".join([start, *(" ".join(line) for line in lines if line)])


def rendezvous(launch: Placed) -> list[str]:
    """torchrun's words before those of the program. Raises as `nodes_of` does."""
    nodes, processes = nodes_of(launch)
    meeting = ["--standalone"]
    if nodes > 1:
        meeting = [
            f"--nnodes={nodes}",
            '--node-rank="${NODE_RANK}"',
            '--master-addr="${MASTER_ADDR}"',
            '--master-port="${MASTER_PORT:-29500}"',
        ]
    return ["torchrun", *meeting, f"--nproc-per-node={processes}"]


def needed(launch: Placed) -> list[str]:
    """Lines of a script that ends where it is not told of several nodes. Raises as `nodes_of` does."""
    nodes, _ = nodes_of(launch)
    if nodes == 1:
        return []
    return [
        ': "${MASTER_ADDR:?set it to the address of the first node}"',
        f': "${{NODE_RANK:?set it to the number of this node, 0 to {nodes - 1}}}"',
    ]


def nodes_of(launch: Placed) -> tuple[int, int]:
    """How many nodes a layout takes, and how many GPUs of each. Raises `InputError` for a node in part."""
    gpus, node = launch.layout.num_gpus, launch.gpus_per_node
    if gpus <= node:
        return 1, gpus
    if gpus % node:
        raise InputError(f"num_gpus {gpus}: torchrun starts as many processes on each node, which has {node} GPUs here")
    return gpus // node, node
