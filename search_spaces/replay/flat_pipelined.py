"""What one rank of a pipeline of the `deepspeed` engine allocates in ways of its own, by `pipe/engine.py` and
`bf16_optimizer.py` of DeepSpeed 0.19."""

from __future__ import annotations

from dataclasses import replace

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.replay.allocator import Piece
from search_spaces.replay.flat import Flat
from search_spaces.replay.groups import block_of
from search_spaces.replay.passing import Passing
from search_spaces.schedules import Action, Pass, order


class FlatPipelined(Passing, Flat):
    """One rank: its stage alone, whose passes come in the order of 1F1B. Its states are flat, of which replicas have
    shares, but for weights and the sums of gradients.

    A tied table is there twice. What is received comes by way of a buffer, which is also that of gradients, and is
    copied once more before its forward pass; the first copy stays until its gradient is sent, before the next pass.
    What a stage comes to stays until its backward pass, and the last one's logits until another microbatch takes their
    place, and with them, by autograd's graph, the gradient that it sent. A gradient that was sent is there until the
    step's end even then: the allocator may have it once NCCL's stream is past what it waits for, and the host is ahead
    of that.
    """

    states: tuple[str, ...] = (
        *("weights", "master weights", "sums of gradients", "first moments", "second moments"),
        *("gradient ", "copy in fp32", "workspace", "cache", "buffer", "place "),
    )

    def __init__(self, model: ModelShape, tokens: int, layout: Layout, rank: int) -> None:
        self.order = order(layout, rank)
        self.stage, self.last = rank, layout.pipeline_stages - 1
        self.layers = layout.layers_by_stage(model.layers)[rank]
        self.replicas = layout.shard_ranks
        rounds = layout.gradient_accumulation_steps
        self.places = max(2, min(layout.pipeline_stages - rank, rounds))
        self.passed: list[Piece] = []
        self.sent: dict[str, Piece] = {}
        self.leaving: list[Piece] = []
        super().__init__(replace(model, tie_embeddings=False), tokens, rounds, layout.compile, layout.recompute)

    def start(self) -> None:
        ends = {"embedding": self.stage == 0, "head": self.stage == self.last}
        mine = {block_of(layer) for layer in self.layers}
        self.groups = {name: group for name, group in self.groups.items() if ends.get(name, name in mine)}
        super().start()
        if self.stage:
            self.take_all("buffer")

    def _passes(self) -> None:
        for action in self.order:
            self._let_go(self.passed)
            self.enter_pass(f"{action.microbatch}")
            if action.step is Pass.FORWARD:
                self._stage_forward(action)
            else:
                self._stage_backward()
        self._let_go(self.passed)

    def end(self) -> None:
        super().end()
        self._let_go(self.leaving)

    def _stage_forward(self, action: Action) -> None:
        if self.stage:
            self.take_all("input")
            self.take_all(f"x{self.layers[0]}")
        else:
            self._embed("embedding")
        self._blocks_forward(self.layers)
        if self.stage == self.last:
            self._logits()
            place = self._place()
            if self.holds(place):
                self.leaving.append(self.sent.pop(place))
                self.give_back(place)
            self.rename("logits", place)
            self._loss_forward()

    def _stage_backward(self) -> None:
        after = self.layers[-1] + 1
        self._work_backward()
        if self.stage == self.last:
            self._loss_backward()
            self._head_backward("head", after)
            self.sum_up("head", False)
        else:
            if not self.holds("buffer"):
                self.take_all("buffer")
            self.take("dx", 1)  # it is in the buffer
        self._blocks_backward(self.layers, False)
        if self.stage:
            self.passed.append(self.own.pop("input"))
            sent = self.own.pop("dx")
            if self.stage == self.last:
                self.sent[self._place()] = sent
            else:
                self.leaving.append(sent)
        else:
            if self.is_gpt:
                self.gradient("embedding", "positions")
            self._table_gradient()
            self.sum_up("embedding", False)
            self.give_back("dx")
        if self.stage != self.last:
            self.give_back(f"x{after}")

    def _place(self) -> str:
        """Where the logits of the microbatch under way are."""
        return f"place {int(self.under_way) % self.places}"

    def _let_go(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self.allocator.give_back(piece)
        pieces.clear()
