"""What every trial of one search has in common."""

from __future__ import annotations

from dataclasses import dataclass, replace

from search_spaces.hardware import ACCELERATORS, Accelerator
from search_spaces.models import ModelShape
from search_spaces.trainer import Trainer


@dataclass(frozen=True)
class Workload:
    """A model, how it is trained, and the machines.

    `sequence_length` counts tokens, `global_batch_size` sequences. `depths`: the numbers of layers, in ascending order,
    that trials run with in place of the model's; none for its own. `gpus_per_node`: those with fast links among them.
    `gpus_per_switch`, `oversubscription`: of the network between nodes, see `search_spaces.network.Network`.
    `refuse_borderline`: whether a layout that may run out of memory is not tried. `trainer`: the program that trains,
    None for Wattune's own engines. `model` is None where a trainer has one of which nothing is known.
    """

    model: ModelShape | None
    sequence_length: int
    global_batch_size: int
    accelerator: Accelerator = ACCELERATORS["gpu"]
    depths: tuple[int, ...] = ()
    gpus_per_node: int = 8
    gpus_per_switch: int | None = None
    oversubscription: float = 1.0
    refuse_borderline: bool = False
    trainer: Trainer | None = None

    @property
    def shape(self) -> ModelShape:
        """The model, where one is known: of a trainer's without, nobody may ask."""
        assert self.model is not None, "nothing is known of the model"
        return self.model

    def speed(self, tokens_per_s: float, gpus: int) -> dict[str, float | None]:
        """The metrics that follow from the tokens a second of so many GPUs.

        MFU is the model's FLOPs over the GPUs' peak (Chowdhery et al. 2022, appendix B), None where one is not known.
        """
        peak_flops, model = self.accelerator.peak_flops, self.model
        flops = None if model is None else model.flops_per_token(self.sequence_length) * tokens_per_s
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_gpu": tokens_per_s / gpus,
            "mfu": None if peak_flops is None or flops is None else flops / (gpus * peak_flops),
        }

    @property
    def run(self) -> Workload:
        """The work of the largest model that trials really run: the deeper proxy, or the model itself."""
        if not self.depths:
            return self
        return replace(self, model=replace(self.shape, layers=max(self.depths)), depths=())
