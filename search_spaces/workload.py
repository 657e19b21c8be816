"""What every trial of one search has in common."""

from __future__ import annotations

from dataclasses import dataclass, replace

from search_spaces.hardware import ACCELERATORS, Accelerator
from search_spaces.models import ModelShape


@dataclass(frozen=True)
class Workload:
    """A model, how it is trained, and the machines.

    `sequence_length` counts tokens, `global_batch_size` sequences. `depths`: the numbers of layers, in ascending order,
    that trials run with in place of the model's; none for its own. `gpus_per_node`: those with fast links among them.
    `gpus_per_switch`, `oversubscription`: of the network between nodes, see `search_spaces.network.Network`.
    `refuse_borderline`: whether a layout that may run out of memory is not tried.
    """

    model: ModelShape
    sequence_length: int
    global_batch_size: int
    accelerator: Accelerator = ACCELERATORS["gpu"]
    depths: tuple[int, ...] = ()
    gpus_per_node: int = 8
    gpus_per_switch: int | None = None
    oversubscription: float = 1.0
    refuse_borderline: bool = False

    def speed(self, tokens_per_s: float, gpus: int) -> dict[str, float | None]:
        """The metrics that follow from the tokens a second of so many GPUs.

        MFU is the model's FLOPs over the GPUs' peak (Chowdhery et al. 2022, appendix B), None where that is not known.
        """
        peak_flops = self.accelerator.peak_flops
        flops = self.model.flops_per_token(self.sequence_length) * tokens_per_s
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_gpu": tokens_per_s / gpus,
            "mfu": None if peak_flops is None else flops / (gpus * peak_flops),
        }

    @property
    def run(self) -> Workload:
        """The work of the largest model that trials really run: the deeper proxy, or the model itself."""
        if not self.depths:
            return self
        return replace(self, model=replace(self.model, layers=max(self.depths)), depths=())
