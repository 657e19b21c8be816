"""What the `megatron` engine allocates where FSDP2 shards parameters over ranks (`torch.distributed.fsdp`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.replay.groups import block_of, ends_of, experts_of
from search_spaces.replay.sharded import REDUCING, Sharded
from search_spaces.replay.shards import GATHERING
from search_spaces.replay.training import MAIN


class FullySharded(Sharded):
    """One of the ranks that shard parameters, by ZeRO-1 to 3.

    A group of parameters comes in one piece, which they are copied out of; in a forward pass it stays until the next
    group has come. In a backward pass the group is sent for that had its forward pass before, by the order of all
    those of a step: at the beginning of the model that is its end, in the microbatch before, in vain.

    ZeRO-1 and 2 have parameters gathered from a step's first forward pass to its last backward pass, ZeRO-3 during each
    pass of a group. ZeRO-2 and 3 reduce the gradients of each microbatch.
    """

    def __init__(self, model: ModelShape, tokens: int, rounds: int, layout: Layout) -> None:
        self.zero, self.shards = layout.zero_stage, layout.shard_ranks
        self.gathering = GATHERING if layout.overlap_param_gather else MAIN
        self.reducing = REDUCING if layout.overlap_grad_reduce else MAIN
        self.latest = ""
        self.order: list[str] = []
        super().__init__(model, tokens, rounds, layout.compile, layout.recompute)

    # Parameters

    def gather(self, group: str) -> None:
        """In a forward pass."""
        if group in self.gathered:
            return
        self._send_for(group)
        self._copy_out(group)
        self._let_go_of_piece()
        self.latest = group

    def _gather_back(self, group: str) -> None:
        """In a backward pass, and send for the group before."""
        if group not in self.gathered:
            self._send_for(group)
            self._copy_out(group)
            self.give_back(f"piece {group}")
        turn = len(self.order) - 1 - self.order[::-1].index(group)
        if turn:
            self._send_for(self.order[turn - 1])

    def _send_for(self, group: str) -> None:
        """What the rank has of a group, in the width of products, goes into the piece."""
        if group in self.gathered or self.holds(f"piece {group}"):
            return
        whole = sum(self.groups[group].values())
        self.take("own part", whole / self.shards, stream=self.gathering)
        self.take(f"piece {group}", whole, stream=self.gathering)
        self.give_back("own part")

    def _copy_out(self, group: str) -> None:
        self.gathered.add(group)
        for name, count in self.groups[group].items():
            self.take(f"{group} {name}", count)

    def _let_go_of_piece(self) -> None:
        if self.latest:
            self.give_back(f"piece {self.latest}")
        self.latest = ""

    def _past_forward(self, group: str) -> None:
        self.order.append(group)
        if self.zero == 3:
            self.let_go(group)

    # Gradients

    def sum_up(self, group: str, is_last: bool) -> None:
        if self.zero == 1:
            super().sum_up(group, is_last)
            return
        if is_last or self.zero == 3:
            self.let_go(group)
        self.send(group, [f"gradient {group} {name}" for name in self.groups[group]])

    def take_late(self, group: str) -> None:
        """Those of later microbatches are added."""
        late = f"late {group}"
        there = self.holds(late)
        self.take("added" if there else late, sum(self.groups[group].values()) / self.shards, 4, self.reducing)
        if there:
            self.give_back("added")

    # Passes

    def _embed(self, group: str) -> None:
        super()._embed(group)
        if not self.model.tie_embeddings:
            self._past_forward(group)

    def _blocks_forward(self, layers: Iterable[int]) -> None:
        for layer in layers:
            super()._blocks_forward([layer])
            if self.has_mixture:
                self._past_forward(experts_of(layer))
            self._past_forward(block_of(layer))

    def _logits(self) -> None:
        super()._logits()
        self._past_forward(ends_of(self.model)[1])
        self._let_go_of_piece()

    def _head_backward(self, group: str, layer: int) -> None:
        self._gather_back(group)
        super()._head_backward(group, layer)

    def _blocks_backward(self, layers: Sequence[int], is_last: bool) -> None:
        for layer in reversed(layers):
            self._gather_back(block_of(layer))
            if self.has_mixture:
                self._gather_back(experts_of(layer))
            super()._blocks_backward([layer], is_last)
        if not self.model.tie_embeddings:
            self._gather_back("embedding")

    def end(self) -> None:
        self.order.clear()
        self.give_back(*[name for name in self.live if name.startswith("piece ")])
        super().end()
        if self.zero > 1 and self.rounds > 1:  # then they are there before the last backward pass
            self.late = 0.0
