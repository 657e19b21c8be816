"""Up or out: for each way to split a model, few nodes or few bigger GPUs against more of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from search_spaces.layout import AXES, Layout
from service.answers.candidates import Candidate
from service.answers.change import Change, comparable
from service.answers.compare.figures import FIGURES, SPEED, Figure, measured
from service.answers.compare.sides import Side

SPLIT = (
    "engine",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "zero_stage",
)
"""Axes that say how a model is split; what they leave of the GPUs are replicas."""

TOTAL = Figure(
    "tokens_per_s", "throughput", "tokens/s", ",.0f", lambda among, one, rates: measured(among, one, "tokens_per_s")
)
"""What scaling out is for."""

COMPARED = (TOTAL, *(figure for figure in FIGURES if figure.key != "mfu"))


@dataclass(frozen=True)
class Placed:
    """A layout of a search, on so many nodes."""

    side: Side
    candidate: Candidate
    nodes: int

    @property
    def machine(self) -> str:
        """Such as ``8 x h200 on 1 node``."""
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.candidate.layout.num_gpus} x {self.side.accelerator} on {nodes}"

    @property
    def size(self) -> tuple[int, int]:
        """By which up and out are told apart: nodes, then GPUs."""
        return self.nodes, self.candidate.layout.num_gpus


@dataclass(frozen=True)
class Scaling:
    """One way to split, on few nodes or GPUs (`up`) and on more (`out`), each by its fastest layout for a GPU.

    `changes` are by figure, from `up` to `out`.
    """

    split: str
    up: Placed
    out: Placed
    changes: dict[str, Change]

    @property
    def answer(self) -> str:
        """Which of them is ahead in what, in a sentence."""
        titles = {figure.key: figure.title for figure in COMPARED}
        told = {
            f"out ({self.out.machine}) is ahead in": [
                (k, c) for k, c in self.changes.items() if c.sure and c.share > 0
            ],
            f"up ({self.up.machine}) is ahead in": [(k, c) for k, c in self.changes.items() if c.sure and c.share < 0],
            "they cannot be told apart in": [(k, c) for k, c in self.changes.items() if not c.sure],
        }
        parts = [
            f"{words} {', '.join(f'{titles[key]} ({made} from up to out)' for key, made in some)}"
            for words, some in told.items()
            if some
        ]
        return f"{self.split}: {'; '.join(parts)}."

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "split": self.split,
            **{
                name: {
                    "search": placed.side.name,
                    "layout": placed.candidate.label,
                    "accelerator": placed.side.accelerator,
                    "gpus": placed.candidate.layout.num_gpus,
                    "nodes": placed.nodes,
                }
                for name, placed in (("up", self.up), ("out", self.out))
            },
            "changes": {key: asdict(made) for key, made in self.changes.items()},
            "answer": self.answer,
        }


def split_of(layout: Layout) -> str:
    """How a layout splits the model, such as ``megatron tp4 pp2 zero1``."""
    named = {name: getattr(layout, name) for name in SPLIT}
    return " ".join(
        AXES[name].label(value) for name, value in named.items() if name in ("engine", "zero_stage") or value > 1
    )


def scalings(sides: Sequence[Side]) -> list[Scaling]:
    """Each way to split that ran on few nodes or GPUs and on more, of the same work in batches of the same size.

    What is on more is held against the fewest of each kind of GPU; of two kinds, the bigger ones, by their peak and
    then their memory, against more of the others. GPUs of one kind on one node are no question of up or out. Searches
    that do not tell their accelerator or how many GPUs a node has take no part.
    """
    ways: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Placed]]] = {}
    for side in sides:
        per_node = side.search.params.get("gpus_per_node")
        if not isinstance(per_node, int) or side.accelerator is None:
            continue
        for one in side.comparison.admitted:
            placed = Placed(side, one, math.ceil(one.layout.num_gpus / per_node))
            way = (split_of(one.layout), side.work, one.layout.global_batch_size)
            ways.setdefault(way, {}).setdefault((side.accelerator, *placed.size), []).append(placed)
    figure = next(figure for figure in FIGURES if figure.key == SPEED)
    found = []
    for (split, *_), machines in ways.items():
        fastest = [each for some in machines.values() if (each := _fastest(some, figure)) is not None]
        ordered = sorted(fastest, key=lambda placed: placed.size)
        fewest = {placed.side.accelerator: placed for placed in reversed(ordered)}
        found += [_scaling(split, up, out) for out in ordered for up in fewest.values() if _scaled(up, out)]
    return [one for one in found if one.changes]


def _fastest(some: Sequence[Placed], figure: Figure) -> Placed | None:
    """Of layouts on alike machines the one with most of a figure."""
    valued = [(placed, placed.side.value(figure, placed.candidate)) for placed in some]
    known = [(placed, value) for placed, value in valued if value is not None]
    return max(known, key=lambda pair: pair[1].value)[0] if known else None


def _scaled(up: Placed, out: Placed) -> bool:
    """Whether one is the other on more nodes or, of GPUs that are not the bigger ones, on more of them."""
    if up.side.accelerator == out.side.accelerator:
        return out.nodes > up.nodes
    few, more = ((sheet.peak_flops, sheet.memory_gib) for sheet in (up.side.sheet, out.side.sheet))
    unknown = None in few + more
    return out.size > up.size and (unknown or more < few)


def _scaling(split: str, up: Placed, out: Placed) -> Scaling:
    changes = {
        figure.key: comparable(out.side.value(figure, out.candidate), up.side.value(figure, up.candidate))
        for figure in COMPARED
    }
    return Scaling(split, up, out, {key: made for key, made in changes.items() if made is not None})
