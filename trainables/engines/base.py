"""The protocol that engines speak, and what a trial gives them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from search_spaces.layout import Layout
from search_spaces.models import ModelShape
from trainables.passes import Observer

Microbatch = tuple[Tensor, Tensor]

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
GRADIENT_CLIP = 1.0


def learning_rate(model: ModelShape) -> float:
    """A constant rate at which a model of this shape learns from its very first step.

    Adam's first steps move every weight by the rate, all in step, and the residual stream sums `hidden` such moves a
    layer: rate x hidden x layers is kept at 0.2. Real runs start as low, by warming up over thousands of steps; a trial
    has ten. At 3e-4 from the first step, Llama-3-8B went from a loss of 12.6 to 29 in two steps.
    """
    return 0.2 / (model.hidden * model.layers)


@dataclass(frozen=True)
class Job:
    """One rank's share of a trial; `rank` is in the trial's own world of `layout.num_gpus` processes.

    `observe` is told of every pass of a pipeline; None where nobody asks. `alone`: whether all other ranks are stood in
    for, by data like this one's. `is_specimen`: whether the model is tiny and stands for large ones, so that nothing is
    to be left out that only its size makes needless.
    """

    layout: Layout
    model: ModelShape
    sequence_length: int
    seed: int
    rank: int
    device: torch.device
    observe: Observer | None = None
    alone: bool = False
    is_specimen: bool = False

    @property
    def learning_rate(self) -> float:
        """A rank alone has no gradients of the model, by which it could learn: its weights stay as they were drawn."""
        return 0.0 if self.alone else learning_rate(self.model)


@dataclass(frozen=True)
class StepOutput:
    """`loss`: this rank's contribution, which summed over all ranks is the mean loss of the global batch.
    `grad_norm`: norm of the whole model's gradient before clipping, the same on every rank."""

    loss: Tensor
    grad_norm: Tensor


class TrainingEngine(Protocol):
    """A model laid out over the ranks, ready to train."""

    data_parallel_rank: int

    def step(self, microbatches: Iterator[Microbatch]) -> StepOutput:
        """One optimizer step over this rank's `gradient_accumulation_steps` microbatches of (inputs, labels).

        Each is an int64 tensor (micro_batch_size, sequence_length) on the engine's device.
        """
        ...

    def set_global_batch_size(self, size: int) -> None:
        """Train steps of `size` sequences from now on: another number of microbatches, as large as before."""
        ...
