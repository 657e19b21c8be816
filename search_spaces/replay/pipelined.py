"""What one rank of a pipeline of the `megatron` engine allocates in ways of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from search_spaces.layout import ONE_STAGE_SCHEDULES, Layout
from search_spaces.models import ModelShape
from search_spaces.replay.allocator import Piece
from search_spaces.replay.groups import block_of
from search_spaces.replay.passing import Passing
from search_spaces.replay.sharded import Sharded
from search_spaces.schedules import Action, Pass, order

ENDED = (
    *("d n2 of ", "d n1 of w", "d activated", "d silu", "d attended"),
    *("d weighted", "d rows", "d copies", "workspace of attention"),
    *("d all keys", "d keys", "d queries", "d of ranks", "d own keys"),
)
"""Gradients that no product's weights need, in a backward pass that is split, and what kernels work in."""


class Pipelined(Passing, Sharded):
    """One rank: its stages alone, whose passes come in the order of the schedule.

    A tied table is there twice. What a stage hands on stays until its backward pass. Where that is split, as torch
    does it (`torch.distributed.pipelining`, Qi et al. 2023), all that the forward pass kept and the gradients of what
    products made stay until the weights' turn; the first stage has its whole backward pass then.
    """

    states = (
        *("whole ", "shard ", "cast", "block ", "embedding ", "head ", "experts "),
        *("gradient ", "sum ", "sent", "late ", "first ", "second ", "workspace"),
    )

    def __init__(self, model: ModelShape, tokens: int, layout: Layout, rank: int) -> None:
        self.order = order(layout, rank)
        self.layers = layout.layers_by_stage(model.layers)
        self.last = layout.pipeline_stages - 1
        self.stages = layout.stages_of(rank)
        self.is_split = False
        self.keeps_output = layout.pipeline_schedule in ONE_STAGE_SCHEDULES
        """Others run their passes as calls of a function, whose variables are gone with it (`_perform_action` of
        `_PipelineScheduleRuntime` in `torch/distributed/pipelining/schedules.py`)."""
        self.kept: dict[str, list[Piece]] = {}
        self.output: Piece | None = None
        self.is_past = False
        super().__init__(replace(model, tie_embeddings=False), tokens, 1, layout.compile, layout.recompute)

    def start(self) -> None:
        mine = [group for stage in self.stages for group in self._groups_of(stage)]
        self.groups = {group: parameters for group, parameters in self.groups.items() if group in mine}
        super().start()

    @property
    def keeps_gradients(self) -> bool:
        return self.is_split or super().keeps_gradients

    @property
    def makes_weights_first(self) -> bool:
        return not self.is_split and super().makes_weights_first

    # A pass's own tensors

    def give_back(self, *names: str) -> None:
        if not self.is_split:
            super().give_back(*names)
            return
        summed = any(" d n2 of " in name for name in names)
        for name in names:
            if self._is_ended(name) or (summed and name.endswith(" d n2")):
                super().give_back(name)
            elif name != "log-softmax":  # which stays as all that the loss needed
                self.kept[self.under_way].append(self.among(name).pop(name))

    def _is_ended(self, name: str) -> bool:
        own = name.lstrip("0123456789 ")
        return name.startswith(self.states) or own.startswith(ENDED) or own in ("d x2", "dn", "of chosen", "of copy")

    def _done(self, layer: int, *names: str) -> None:
        if self.is_split:
            self.give_back(*[f"{layer} {name}" for name in names])
        else:
            super()._done(layer, *names)

    def _drop(self) -> None:
        for name, piece in self.block.items():
            if self.is_split and name.endswith((" d x2", " d n1 of wq")):
                self.kept[self.under_way].append(piece)
            else:
                self.allocator.give_back(piece)
        self.block.clear()

    @contextmanager
    def _letting_go(self) -> Iterator[bool]:
        """Keep nothing until the weights' turn meanwhile; it is told whether anything is kept otherwise."""
        split, self.is_split = self.is_split, False
        yield split
        self.is_split = split

    def _forward(self, layer: int, again: bool = False) -> None:
        with self._letting_go():
            super()._forward(layer, again)

    def _rotate_back(self, layer: int, name: str, width: int) -> None:
        with self._letting_go():
            super()._rotate_back(layer, name, width)

    # Gradients

    def gradient(self, group: str, name: str) -> None:
        if not self.is_split and not self.holds(f"gradient {group} {name}"):
            super().gradient(group, name)

    def _table_product(self) -> None:
        if not self.is_split:
            super()._table_product()

    def sum_up(self, group: str, is_last: bool) -> None:
        """Of what is there yet: in a backward pass that is split it is that of an earlier microbatch."""
        new = [f"gradient {group} {name}" for name in self.groups[group]]
        if not all(map(self.holds, new)):
            return
        if group not in self.summed:
            self.summed.add(group)
            for name in self.groups[group]:
                self.take(f"sum {group} {name}", self.made(group, name), 4)
                self.give_back(f"gradient {group} {name}")
        else:
            self.give_back(*new)

    # A step

    def _passes(self) -> None:
        left = Counter(action.stage for action in self.order)
        for action in self.order:
            self.enter_pass(f"{action.stage}.{action.microbatch}")
            self._act(action)
            left[action.stage] -= 1
            if not left[action.stage]:
                for group in reversed(self._groups_of(action.stage)):
                    self.sum_up(group, False)
                    self.reduce(group, [f"sum {group} {name}" for name in self.groups[group]])
        self._replace_output(None)

    def _groups_of(self, stage: int) -> list[str]:
        groups = [group for layer in self.layers[stage] for group in (block_of(layer), f"experts {layer}")]
        ends = (["embedding"] if stage == 0 else [], ["head"] if stage == self.last else [])
        return [group for group in (*ends[0], *groups, *ends[1]) if group in self.groups]

    def _act(self, action: Action) -> None:
        stage = action.stage
        match action.step:
            case Pass.FORWARD:
                self._stage_forward(stage)
            case Pass.BACKWARD:
                self._stage_backward(stage)
            case Pass.INPUT if stage:
                self.is_split = True
                self.kept[self.under_way] = []
                self._stage_backward(stage)
                self.is_split = False
            case Pass.WEIGHT if stage:
                for group in self._groups_of(stage):
                    for name in self.groups[group]:
                        self.gradient(group, name)
                for piece in self.kept.pop(self.under_way):
                    self.allocator.give_back(piece)
            case Pass.WEIGHT:
                self._stage_backward(stage)

    def _stage_forward(self, stage: int) -> None:
        layers = self.layers[stage]
        if stage == 0:
            self._embed("embedding")
        else:
            self.take_own(f"x{layers[0]}")
        self._blocks_forward(layers)
        if stage == self.last:
            self.gather("head")
            self._logits()
        if self.keeps_output:
            self._replace_output(self.own[self._output(stage)])
        if stage == self.last:
            self._loss_forward()

    def _output(self, stage: int) -> str:
        return "logits" if stage == self.last else f"x{self.layers[stage][-1] + 1}"

    def _replace_output(self, output: Piece | None) -> None:
        """The schedule has the last output in a variable, until the next takes its place."""
        if self.is_past and self.output is not None:
            self.allocator.give_back(self.output)
        self.output, self.is_past = output, False

    def _stage_backward(self, stage: int) -> None:
        layers = self.layers[stage]
        self._work_backward()
        if stage == self.last:
            self._loss_backward()
            self._head_backward("head", layers[-1] + 1)
            self.sum_up("head", False)
        else:
            self.take_own("dx")
        self._blocks_backward(layers, False)
        if stage == 0:
            if self.is_gpt:
                self.gradient("embedding", "positions")
            self._table_gradient()
            self.sum_up("embedding", False)
        with self._letting_go() as is_split:
            self.give_back("dx")
            if is_split and stage == self.last:
                self.give_back("log-softmax")
            output = self.own.pop(self._output(stage))
            if output is self.output:
                self.is_past = True
            else:
                self.allocator.give_back(output)
