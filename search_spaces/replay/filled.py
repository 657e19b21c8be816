"""The experts of DeepSpeed: computed one after the other, all with room for as many tokens as the fullest needs."""

from __future__ import annotations

import math
from functools import cached_property
from random import Random

from search_spaces.replay.groups import block_of, experts_of
from search_spaces.replay.training import Training

UNEVEN, SPREAD = -0.32, 0.36
"""Tokens that come to the fullest of all experts, in those of an even share, beyond one, while routers are young: the
mean and the deviation of the logarithm, in the first block, of 4,096 tokens that 8 experts share."""

DEEPER, DEEPEST = 0.11, 6
"""By which the mean is more in each block, up to this one."""

EVENED, AMONG = 0.1, 0.3
"""By which it is less of twice as many tokens, and more among twice as many experts."""


class FilledExperts(Training):
    """A training whose experts, if there are any, have another room in each block and microbatch."""

    rank = 0
    """Of those that have routers, and tokens, of their own."""

    @cached_property
    def routers(self) -> Random:
        """They draw the rooms, the same ones each time."""
        return Random(self.rank)

    @property
    def varies(self) -> bool:
        return self.has_mixture

    @property
    def experts(self) -> int:
        """Of each block, those that a rank holds."""
        return self.model.num_experts // self.spread_over

    def _microbatch(self, is_last: bool) -> None:
        self.rooms = [self._room(layer) for layer in range(self.model.layers if self.has_mixture else 0)]
        super()._microbatch(is_last)

    def _room(self, layer: int) -> float:
        """Of each token in a block's experts: what the fullest needs, on any of the ranks that exchange tokens."""
        model, chosen = self.model, self.model.experts_per_token
        mean = UNEVEN + DEEPER * min(layer, DEEPEST)
        mean += AMONG * math.log2(model.num_experts / 8) - EVENED * math.log2(self.tokens / 4096)
        ranks = 1 if self.exchanges else self.spread_over  # those of one sequence are alike
        uneven = max(self.routers.lognormvariate(mean, SPREAD) for _ in range(ranks))
        return min(chosen * (1 + uneven), model.num_experts)

    @property
    def copies(self) -> bool:
        """Whether what an expert is given is in several pieces."""
        return self.spread_over > 1 and self.experts > 1

    def _send(self, layer: int, name: str) -> None:
        """What is to be computed elsewhere, for what is to be computed here, or back."""
        if self.spread_over > 1:
            self._keep(layer, "received", self.rooms[layer] * self.model.hidden)
            self._done(layer, name)
            self.rename(f"{layer} received", f"{layer} {name}")

    def _experts_forward(self, layer: int) -> None:
        """One after the other, each with room for as many tokens as the fullest has; results are weighed in fp32. Of
        what comes from several ranks, an expert's is copied for each product."""
        model, room, hidden = self.model, self.rooms[layer], self.model.hidden
        share, inner = room / self.experts, room * model.ffn_hidden / self.experts
        self._keep(layer, "for router", hidden, 4)
        self._keep(layer, "probabilities", model.num_experts, 4)
        self._past(layer, "for router")
        self._keep(layer, "padded", hidden)
        self._keep(layer, "rows", room * hidden)
        self._done(layer, "padded")
        self._send(layer, "rows")
        for expert in range(self.experts):
            for name in ("gate", "up"):
                if self.copies:
                    self._keep(layer, f"rows of {name} {expert}", share * hidden)
                self._keep(layer, f"{name} {expert}", inner)
                if self.copies and (self.selective or self.drops):
                    self._done(layer, f"rows of {name} {expert}")
            for name in ("silu", "activated"):
                self._keep(layer, f"{name} {expert}", inner)
            if self.selective:
                self._done(layer, f"silu {expert}")
            self._past(layer, f"gate {expert}", f"up {expert}", f"silu {expert}")
            self._keep(layer, f"of expert {expert}", share * hidden)
            self._past(layer, f"activated {expert}")
            if self.selective:
                self._done(layer, f"activated {expert}")
        results = [f"of expert {expert}" for expert in range(self.experts)]
        self._keep(layer, "together", room * hidden)
        if not self.selective:
            self._done(layer, *results)
        self._send(layer, "together")
        self._decode(layer)
        if self.selective or self.copies:
            self._done(layer, "rows")
        if self.selective:
            self._done(layer, "in order", "for router")
        else:
            self._keep(layer, "for balance", hidden, 4)
        if self.selective:
            self._done(layer, "n2")

    def _decode(self, layer: int) -> None:
        hidden, chosen = self.model.hidden, self.model.experts_per_token
        self._keep(layer, "padded", self.rooms[layer] * hidden)
        self._done(layer, "together")
        self._keep(layer, "in order", chosen * hidden)
        self._done(layer, "padded")
        self._keep(layer, "weighted", chosen * hidden, 4)
        self._keep(layer, "weighted sum", hidden, 4)
        self._done(layer, "weighted")
        self._keep(layer, "down", hidden)
        self._done(layer, "weighted sum")

    def _recompute(self, layer: int) -> None:
        if not self.has_mixture:
            super()._recompute(layer)
            return
        model, room, hidden = self.model, self.rooms[layer], self.model.hidden
        inner = room * model.ffn_hidden / self.experts
        self._keep(layer, "n1", hidden)
        for name, width in (("q", model.query_width), ("k", model.key_width)):
            self._rotate(layer, name, width)
        if self.exchanges:
            self._keep(layer, "exchanged", model.query_width)
        self._keep(layer, "x2", hidden)
        self._keep(layer, "n2", hidden)
        self._keep(layer, "for router", hidden, 4)
        self._keep(layer, "padded", hidden)
        self._keep(layer, "rows", room * hidden)
        self._done(layer, "padded")
        self._send(layer, "rows")
        for expert in range(self.experts):
            if self.copies:
                for name in ("gate", "up"):
                    self._keep(layer, f"rows of {name} {expert}", room * hidden / self.experts)
            self._keep(layer, f"silu {expert}", inner)
            self._keep(layer, f"activated {expert}", inner)
        self._keep(layer, "together", room * hidden)
        self._send(layer, "together")
        self._decode(layer)
        self._done(layer, "down", *(["rows"] if self.copies else []))
        self._keep(layer, "for balance", hidden, 4)

    def _experts_backward(self, layer: int, is_last: bool) -> None:
        model, chosen, hidden = self.model, self.model.experts_per_token, self.model.hidden
        room, group = self.rooms[layer], experts_of(layer)
        share, inner = room / self.experts, room * model.ffn_hidden / self.experts
        self._keep(layer, "d sum", hidden, 4)
        self._keep(layer, "d weighted", chosen * hidden, 4)
        self._keep(layer, "d in order", chosen * hidden)
        self._done(layer, "d weighted")
        self._keep(layer, "of gates", chosen * hidden, 4)
        self._done(layer, "of gates", "d sum", "in order")
        self._keep(layer, "d of experts", room * hidden)
        self._done(layer, "d in order")
        self._send(layer, "d of experts")
        for expert in reversed(range(self.experts)):
            if self.copies:
                self._keep(layer, "d of expert", share * hidden)
            if self.copies and not expert:
                self._done(layer, "d of experts")
            self._keep(layer, "d activated", inner)
            if self.copies:
                self._done(layer, "d of expert")
            self.gradient(group, "down")
            self._done(layer, f"activated {expert}")
            self._keep(layer, "d silu", inner)
            self._keep(layer, "d up", inner)
            self._done(layer, "d activated", f"silu {expert}")
            self._keep(layer, "d gate", inner)
            self._done(layer, "d silu", f"gate {expert}", f"up {expert}")
            self._keep(layer, "of up", share * hidden)
            self.gradient(group, "up")
            self._done(layer, "d up")
            self._keep(layer, "of gate", share * hidden)
            self.gradient(group, "gate")
            self._done(layer, "d gate")
            self._keep(layer, f"d rows {expert}", share * hidden)
            self._done(layer, "of up", "of gate")
            if self.copies:
                self._done(layer, f"rows of up {expert}", f"rows of gate {expert}")
        self._keep(layer, "d rows", room * hidden)
        kept = () if self.copies else ("rows", "d of experts")
        self._done(layer, *kept, *(f"d rows {expert}" for expert in range(self.experts)))
        self._send(layer, "d rows")
        self._keep(layer, "d padded", hidden)
        self._done(layer, "d rows")
        self._keep(layer, "d for router", hidden, 4)
        self.gradient(block_of(layer), "router")
        self._keep(layer, "d n2 of router", hidden)
        self._done(layer, "d for router", "for router", "for balance")
        self._keep(layer, "d n2", hidden)
        self._done(layer, "d padded", "d n2 of router")
        if self.selective:
            self._done(layer, *(f"of expert {expert}" for expert in range(self.experts)))
