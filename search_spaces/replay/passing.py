"""What a rank of any engine's pipeline has in common: tensors of passes, several of which may be under way."""

from __future__ import annotations

from collections import defaultdict

from search_spaces.models import ModelShape
from search_spaces.replay.allocator import Piece
from search_spaces.replay.training import Training


class Passing(Training):
    """Each microbatch's pass through a stage has tensors of its own, beside those of blocks and the rank's states."""

    hands_on_logits = True

    states: tuple[str, ...]
    """How the names begin of what is there once, whatever pass is under way."""

    def __init__(self, model: ModelShape, tokens: int, rounds: int, compiled: bool, recompute: str) -> None:
        self.own: dict[str, Piece] = {}
        self.passes: defaultdict[str, dict[str, Piece]] = defaultdict(dict)
        super().__init__(model, tokens, rounds, compiled, recompute)

    def among(self, name: str) -> dict[str, Piece]:
        if name[0].isdigit():
            return self.block
        return self.live if name.startswith(self.states) else self.own

    def enter_pass(self, name: str) -> None:
        self.under_way, self.own = name, self.passes[name]
