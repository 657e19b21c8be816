"""What the passes of a pipeline rank take, but for what disturbs one or another of them by chance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from search_spaces.schedules import Action, Order, Pass

FEWEST = 3
"""Passes alike of which the median tells more than each of them."""


def undisturbed(passes: Mapping[Action, float], order: Order) -> dict[Action, float]:
    """Seconds of each pass of a rank that does them in this order: of a stage's passes of one kind the median of those
    while the pipeline fills, while it is full, and while it drains.

    What was measured of one rank stands for many. A moment in which its host was late would befall all of them at the
    same microbatch, and each would hand it on to the next. The first and the last microbatch do what happens once a
    step, so that their passes stay as they were measured.
    """
    last = max((action.microbatch for action in order), default=0)
    forwards = [index for index, action in enumerate(order) if action.step is Pass.FORWARD]
    backwards = [index for index, action in enumerate(order) if action.step is not Pass.FORWARD]
    alike: defaultdict[tuple[bool, bool, int, Pass], list[Action]] = defaultdict(list)
    for index, action in enumerate(order):
        if 0 < action.microbatch < last:
            alike[index < backwards[0], index > forwards[-1], action.stage, action.step].append(action)
    found = dict(passes)
    for actions in alike.values():
        if len(actions) >= FEWEST:
            found |= dict.fromkeys(actions, median(passes[action] for action in actions))
    return found
