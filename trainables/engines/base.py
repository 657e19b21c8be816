"""The protocol that both engines speak, and what a trial gives them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from search_spaces.config import TrialConfig
from search_spaces.models import ModelShape

Microbatch = tuple[Tensor, Tensor]

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
GRADIENT_CLIP = 1.0
LEARNING_RATE_WARMUP_STEPS = 100


def learning_rate(parameters: int, step: int) -> float:
    """Learning rate of optimizer step `step`, from 0, for a model of so many parameters.

    The peak is a fit to table 2.1 of Brown et al. 2020, 6e-4 at 125 million parameters falling with their cube root.
    It is reached linearly: large models diverge in their very first steps otherwise, and their trials would not learn.
    """
    peak = 6e-4 * (125e6 / parameters) ** (1 / 3)
    return peak * min(1.0, (step + 1) / LEARNING_RATE_WARMUP_STEPS)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@dataclass(frozen=True)
class Job:
    """One rank's share of a trial; `rank` is in the trial's own world of `config.num_gpus` processes."""

    config: TrialConfig
    model: ModelShape
    sequence_length: int
    seed: int
    rank: int
    device: torch.device


@dataclass(frozen=True)
class StepOutput:
    """`loss`: this rank's contribution, which summed over all ranks is the mean loss of the global batch.
    `grad_norm`: norm of the whole model's gradient before clipping, the same on every rank."""

    loss: Tensor
    grad_norm: Tensor


class Engine(Protocol):
    """A model laid out over the ranks, ready to train."""

    data_parallel_rank: int

    def step(self, microbatches: Iterator[Microbatch]) -> StepOutput:
        """One optimizer step over this rank's `gradient_accumulation_steps` microbatches of (inputs, labels).

        Each is an int64 tensor (micro_batch_size, sequence_length) on the engine's device.
        """
        ...
