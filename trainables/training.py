"""The program that trains a language model of one shape and times it. Needs no torch until it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from trainables.engines.build import engine_module
from trainables.program import Place, Progress, RankProgram, RankReport, TrialRequest


@dataclass(frozen=True)
class Training(RankProgram):
    """Trains `model` on `data`, a source of `trainables.data.open_tokens`, from weights drawn by `seed`.

    Sequences are of `sequence_length` tokens.
    """

    model: ModelShape
    data: str
    sequence_length: int
    seed: int

    @staticmethod
    def preload(layouts: Iterable[Layout]) -> list[str]:
        """What runs a rank, the layouts' engines with what they import, and the compiler if any layout needs it."""
        chosen = list(layouts)
        engines = dict.fromkeys(engine_module(layout.engine) for layout in chosen)
        compiled = any(layout.compile or layout.precision == "fp8" for layout in chosen)
        return ["trainables.rank", *engines, *["torch._inductor.compile_fx", "trainables.hashed"] * compiled]

    def run(self, request: TrialRequest, place: Place, on_progress: Callable[[Progress], None]) -> RankReport:
        """Train and time the layout with each of the request's batches. Collective over the ranks.

        Raises `InvalidTrial` if the loss does not fall, `torch.OutOfMemoryError`, and whatever torch, the engine or
        the reading of data raise.
        """
        from trainables.rank import train

        return train(self, request, place, on_progress)
