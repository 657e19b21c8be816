"""Whether what ran is training, by its losses."""

from __future__ import annotations

import math

from trainables.program import InvalidTrial


def check_finite(name: str, values: tuple[float, ...]) -> None:
    """Raise `InvalidTrial` unless all of `values`, which are called `name`, are finite."""
    if not all(math.isfinite(value) for value in values):
        raise InvalidTrial(f"the {name} is not finite: {values[0]:.4g} at first, {values[-1]:.4g} at last")


def check_learning(losses: tuple[float, ...]) -> None:
    """Raise `InvalidTrial` unless all losses are finite and the last third lies below the first loss on average."""
    check_finite("loss", losses)
    tail = losses[-max(1, len(losses) // 3) :]
    if sum(tail) / len(tail) >= losses[0]:
        raise InvalidTrial(f"the loss does not fall: {losses[0]:.4f} at first, {sum(tail) / len(tail):.4f} at last")
