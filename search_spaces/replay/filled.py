"""The experts of DeepSpeed: computed one after the other, all with room for equally many tokens."""

from __future__ import annotations

from search_spaces.replay.groups import block_of, experts_of
from search_spaces.replay.training import Training


class FilledExperts(Training):
    """A training whose experts, if there are any, are computed one after the other."""

    @property
    def experts(self) -> int:
        """Of each block, those that a rank holds."""
        return self.model.num_experts // self.spread_over

    @property
    def room(self) -> int:
        """Of each token in a block's experts, which all get equally many: they need no more."""
        return self.model.experts_per_token

    @property
    def copies(self) -> bool:
        """Whether what an expert is given is in several pieces."""
        return self.spread_over > 1 and self.experts > 1

    def _send(self, layer: int, name: str) -> None:
        """What is to be computed elsewhere, for what is to be computed here, or back."""
        if self.spread_over > 1:
            self._keep(layer, "received", self.room * self.model.hidden)
            self._done(layer, name)
            self.rename(f"{layer} received", f"{layer} {name}")

    def _experts_forward(self, layer: int) -> None:
        """One after the other, each with room for equally many tokens; results are weighed in fp32. Of what comes from
        several ranks, an expert's is copied for each product."""
        model, room, hidden = self.model, self.room, self.model.hidden
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
            self._done(layer, "in order", "for router", "n2")

    def _decode(self, layer: int) -> None:
        hidden, chosen = self.model.hidden, self.model.experts_per_token
        self._keep(layer, "padded", self.room * hidden)
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
        model, room, hidden = self.model, self.room, self.model.hidden
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

    def _experts_backward(self, layer: int, is_last: bool) -> None:
        model, chosen, hidden = self.model, self.model.experts_per_token, self.model.hidden
        room, group = self.room, experts_of(layer)
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
        self._done(layer, "d for router", "for router")
        self._keep(layer, "d n2", hidden)
        self._done(layer, "d padded", "d n2 of router")
        if self.selective:
            self._done(layer, *(f"of expert {expert}" for expert in range(self.experts)))
