"""What one rank of a pipeline of the `megatron` engine allocates in ways of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from search_spaces.layout import ONE_STAGE_SCHEDULES, Layout
from search_spaces.models import ModelShape
from search_spaces.replay.allocator import Piece
from search_spaces.replay.groups import block_of
from search_spaces.replay.passing import Passing
from search_spaces.replay.receiving import Kind, doings
from search_spaces.replay.sharded import Sharded
from search_spaces.schedules import Action, Pass

ENDED = (
    *("d n2 of ", "d n1 of w", "d activated", "d silu", "d attended", "d x1"),
    *("d weighted", "d rows", "d copies", "workspace of attention"),
    *("d all keys", "d keys", "d queries", "d of ranks", "d own keys"),
)
"""Gradients that no product's weights need, in a backward pass that is split, and what kernels work in."""

AGAIN = (
    *("n1", "v", "q", "k", "rotated q", "rotated k", "attended", "sums", "x2", "n2"),
    *("gate", "up", "silu", "activated"),
)
"""What autograd has of a dense block."""

AROUND = {
    "wq": ("d q", ""),
    "wk": ("d k", ""),
    "wv": ("d v", "n1"),
    "wo": ("d x2", ""),
    "ffn norm 0": ("d n2", "x2"),
    "gate": ("d gate", ""),
    "up": ("d up", "n2"),
}
"""Of a block's products and norms: the gradient of what each came to, and what was given to it last of all."""


def _around(group: str, name: str) -> tuple[str, str]:
    """The names of both, of any group's; none of a second parameter of the same product or norm."""
    kind, _, layer = group.partition(" ")
    if kind == "head":
        return {"output": ("dlogits", "n"), "norm 0": ("dn", "")}.get(name, ("", ""))
    match name:
        case "attention norm 0":
            return f"{layer} d n1", f"x{layer}"
        case "down":
            return (f"{layer} d of experts" if kind == "experts" else "dx"), f"{layer} activated"
    made, given = AROUND.get(name, ("", ""))
    return made and f"{layer} {made}", given and f"{layer} {given}"


class Pipelined(Passing, Sharded):
    """One rank: its stages alone, whose passes come in the order of the schedule.

    A tied table is there twice. What a stage hands on stays until its backward pass. Where that is split, as torch
    does it (`torch.distributed.pipelining`, Qi et al. 2023), all that the forward pass kept and the gradients of what
    products made stay until the weights' turn; the first stage has its whole backward pass then.
    """

    states = (
        *("whole ", "shard ", "cast", "next cast", "block ", "embedding ", "head ", "experts "),
        *("gradient ", "sum ", "sent", "late ", "first ", "second ", "workspace"),
    )

    def __init__(self, model: ModelShape, tokens: int, layout: Layout, rank: int) -> None:
        self.doings = doings(layout, rank)
        self.layers = layout.layers_by_stage(model.layers)
        self.last = layout.pipeline_stages - 1
        self.stages = layout.stages_of(rank)
        self.is_split = self.holds_again = False
        self.splits, self.again = layout.splits_backward, list[str]()
        self.keeps_output = layout.pipeline_schedule in ONE_STAGE_SCHEDULES
        """Others run their passes as calls of a function, whose variables are gone with it (`_perform_action` of
        `_PipelineScheduleRuntime` in `torch/distributed/pipelining/schedules.py`)."""
        self.kept: defaultdict[str, defaultdict[str, list[Piece]]] = defaultdict(lambda: defaultdict(list))
        self.output: Piece | None = None
        super().__init__(replace(model, tie_embeddings=False), tokens, 1, layout.compile, layout.recompute)

    def start(self) -> None:
        mine = [group for stage in self.stages for group in self._groups_of(stage)]
        self.groups = {group: parameters for group, parameters in self.groups.items() if group in mine}
        super().start()

    @property
    def keeps_gradients(self) -> bool:
        return self.is_split or super().keeps_gradients

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
                self.kept[self.under_way][name].append(self.among(name).pop(name))

    def _is_ended(self, name: str) -> bool:
        own = name.lstrip("0123456789 ")
        return name.startswith(self.states) or own.startswith(ENDED) or own in ("d x2", "of chosen", "of copy")

    def _done(self, layer: int, *names: str) -> None:
        if self.is_split:
            self.give_back(*[f"{layer} {name}" for name in names])
            return
        held = [name for name in names if self.holds_again and name in AGAIN]
        self.again += held
        super()._done(layer, *[name for name in names if name not in held])

    def _drop(self) -> None:
        for name, piece in self.block.items():
            if self.is_split and name.endswith((" d x2", " d n1 of wq")):
                self.kept[self.under_way][name].append(piece)
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

    def _backward(self, layer: int, is_last: bool) -> None:
        """What a block computed again for all parts of its backward pass is held until it has been through them."""
        self.holds_again = self.full and self.splits and not self.is_split
        super()._backward(layer, is_last)
        self.holds_again = False

    def _keep(self, layer: int, name: str, values: float, width: int = 2) -> None:
        super()._keep(layer, name, values, width)
        if name == "d x1" and self.again:
            self.holds_again = False
            self._done(layer, *self.again)
            self.again.clear()

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

    def _prepare(self) -> None:
        """Before the first step, room for what each stage receives is made, and given back at once: `LeanStage`."""
        self.enter_pass("")
        for stages in (
            [stage for stage in self.stages if stage],
            [stage for stage in self.stages if stage < self.last],
        ):
            for _ in stages:
                self.take_own("received")
                self.give_back("received")

    def _passes(self) -> None:
        if not self.has_moments:
            self._prepare()
        for kind, action in self.doings:
            self.enter_pass(f"{action.stage}.{action.microbatch}")
            groups = self._groups_of(action.stage)
            match kind:
                case Kind.RECEIVE:
                    self._receive(action)
                case Kind.PASS:
                    if not self.keeps_output:
                        for group in groups:
                            self.gather(group)
                    self._act(action)
                    self._hand_on(action)
                case Kind.LET_GO:
                    for group in self.gathered.intersection(groups):
                        self.let_go(group)
                case Kind.REDUCE:
                    for group in groups:
                        self.sum_up(group, False)
                        self.reduce(group, [f"sum {group} {name}" for name in self.groups[group]])
                    self.give_back("sent")
                    self.is_sending = False
        self._replace_output(None)

    def _receive(self, action: Action) -> None:
        self.take_own(f"x{self.layers[action.stage][0]}" if action.step is Pass.FORWARD else "dx")

    def _hand_on(self, action: Action) -> None:
        """To the rank's own next stage, which has the very same tensor."""
        stage, step, microbatch = action
        if step is Pass.FORWARD and stage + 1 in self.stages:
            name = self._output(stage)
            self.passes[f"{stage + 1}.{microbatch}"][name] = self.allocator.share(self.own[name])

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
                self._stage_backward(stage)
                self.is_split = False
            case Pass.WEIGHT if stage:
                self._weights(stage)
            case Pass.WEIGHT:
                self._stage_backward(stage)

    def _weights(self, stage: int) -> None:
        """Parameter by parameter, each from a copy of the gradient of what its product or norm came to, which stays
        until there is the next one (`stage_backward_weight` in `torch/distributed/pipelining/_backward.py`). What a
        product was given ends with the last that needs it, unless a block holds all that it computed again. The rest
        stays to the end, as all that came before in the stage hangs on its last products."""
        kept = self.kept.pop(self.under_way)
        copies: list[Piece] = []
        last: list[Piece] = []
        added: list[Piece] = []
        for group in self._groups_of(stage):
            for name in self.groups[group]:
                made, given = _around(group, name)
                if made == "dn":
                    given = f"x{self.layers[stage][-1] + 1}"
                products = kept[made] if made else []
                if products:
                    copies.append(self.allocator.take(products[-1].size))
                    for copy in copies[:-1]:
                        self.allocator.give_back(copy)
                    del copies[:-1]
                    last, added = [*last, *added], []
                if self.holds(f"gradient {group} {name}"):  # to which the new one is added
                    added.append(self.allocator.take(2 * self.made(group, name)))
                    self.work_on_bias(name, self.made(group, name))
                else:
                    self.gradient(group, name)
                if products:
                    for old in last:
                        self.allocator.give_back(old)
                    last.clear()
                if kept[given] and given != f"x{self.layers[stage][0]}" and (group == "head" or not self.full):
                    self.allocator.give_back(kept[given].pop())
                if products:
                    self.allocator.give_back(products.pop(-2 if made == "dx" else -1))
        for pieces in kept.values():
            for piece in pieces:
                self.allocator.give_back(piece)
        for old in (*copies, *last, *added):
            self.allocator.give_back(old)

    def _stage_forward(self, stage: int) -> None:
        layers = self.layers[stage]
        if stage == 0:
            self._embed("embedding")
        self._blocks_forward(layers)
        if stage == self.last:
            self.gather("head")
            self._logits()
        if self.keeps_output:
            self._replace_output(self.allocator.share(self.own[self._output(stage)]))
        if stage == self.last:
            self._loss_forward()

    def _output(self, stage: int) -> str:
        return "logits" if stage == self.last else f"x{self.layers[stage][-1] + 1}"

    def _replace_output(self, output: Piece | None) -> None:
        """The schedule has the last output in a variable, until the next takes its place."""
        if self.output is not None:
            self.allocator.give_back(self.output)
        self.output = output

    def _stage_backward(self, stage: int) -> None:
        layers = self.layers[stage]
        if stage == self.last:
            self._loss_backward()
            self._head_backward("head", layers[-1] + 1)
            self.sum_up("head", False)
        else:
            self.own["received"] = self.allocator.share(self.own["dx"])
        self._blocks_backward(layers, False)
        if stage == 0:
            if self.is_gpt:
                self.gradient("embedding", "positions")
            self._table_gradient()
            self.sum_up("embedding", False)
        self._hand_back(stage)
        if stage != self.last:
            self.give_back("received", "dx", self._output(stage))
            return
        self.give_back("dx")
        with self._letting_go() as is_split:
            self.give_back(self._output(stage), *(["log-softmax"] if is_split else []))

    def _hand_back(self, stage: int) -> None:
        """To the rank's own stage before, likewise."""
        if stage and stage - 1 in self.stages:
            microbatch = self.under_way.split(".")[1]
            self.passes[f"{stage - 1}.{microbatch}"]["dx"] = self.allocator.share(self.own["dx"])
