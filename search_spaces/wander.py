"""What ranks that meet in every block wait for each other, as the clocks of GPUs at their power limit wander.

In the products between two meetings GPUs are apart by `Accelerator.apart`, in a longer time by less, with its root
(`service.trials.straggler.WANDER`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

from search_spaces.layout import Layout

REACH, POINTS = 8.0, 400
"""To how many deviations from the slowest rank's mean the distribution is followed, and at how many points."""


def meeting(layout: Layout) -> int:
    """How many ranks meet in every block, and cannot go on before the last of them is there: those of tensors, of a
    sequence, and of experts, which are spread over sequences and replicas."""
    return layout.tensor_parallel_size * max(layout.context_parallel_size, layout.expert_parallel_size)


def waited(ahead: Sequence[float], deviation: float) -> float:
    """By how much the last of some ranks comes later to a meeting than the slowest of them does on average.

    `ahead`: by how much each comes earlier on average than the slowest, for which that is 0, and the `deviation` of
    each from its own mean, in the same unit. They are taken to be normal and independent, so that the largest is below
    a value with the product of the probabilities that each is (David and Nagaraja, Order Statistics, section 2.1).
    """
    if len(ahead) < 2 or not deviation:
        return 0.0
    ranks = [(NormalDist(-mean, deviation), count) for mean, count in Counter(ahead).items()]
    width = 2 * REACH * deviation / POINTS
    middles = ((point + 0.5) * width - REACH * deviation for point in range(POINTS))
    below = (math.prod(rank.cdf(at) ** count for rank, count in ranks) for at in middles)
    return REACH * deviation - width * sum(below)
