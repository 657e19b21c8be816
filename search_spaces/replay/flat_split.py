"""What the `deepspeed` engine allocates where products are split over ranks, by DeepSpeed's own layers (AutoTP)."""

from __future__ import annotations

from dataclasses import replace

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from search_spaces.replay.flat import Flat


def share_of(model: ModelShape, ranks: int) -> ModelShape:
    """What a rank has of a model whose products are split over so many."""
    return replace(
        model, heads=model.heads // ranks, kv_heads=model.kv_heads // ranks, ffn_hidden=model.ffn_hidden // ranks
    )


class FlatSplit(Flat):
    """One rank: it has its heads and inner values of each block, all tables, and all of what is between products.

    What is summed over ranks is summed in place. The compiler does not sum again what it computes again: of a compiled
    block it keeps what attention's last product came to.
    """

    keeps_sums = True

    def __init__(self, model: ModelShape, tokens: int, rounds: int, layout: Layout) -> None:
        super().__init__(share_of(model, layout.tensor_parallel_size), tokens, rounds, layout.compile, layout.recompute)

    def _forward(self, layer: int, again: bool = False) -> None:
        super()._forward(layer, again)
        if self.compiled and not self.full:
            self._take_sum(layer)

    def _take_sum(self, layer: int) -> None:
        """The next hidden states are not made in place of what was summed over ranks."""
        self.take("sum", self.tokens * self.model.hidden)
        self.give_back(f"x{layer + 1}")
        self.rename("sum", f"x{layer + 1}")

    def _add_at_once(self, layer: int) -> None:
        self.rename(f"x{layer + 1}", f"summed of {layer}")
        self.take(f"x{layer + 1}", self.tokens * self.model.hidden)
        self._done(layer, "down")
