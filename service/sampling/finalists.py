"""The layouts that may be the best of a search and are worth measuring again, and in which order.

First those of the front, in as many rounds as the search asks for. Then what these leave open by the rules of the
answers (`service.answers.ranking`): a layout that leads by a single measurement, or two that cannot be told apart.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from search_spaces.layout import Layout
from service.answers.candidates import candidates
from service.answers.ranking import ranked, undecided
from service.goals import Comparison, Goals
from service.pareto import dominating, scaled
from service.problem import Finalists
from service.result import Purpose, TrialResult
from service.sampling.correction import corrected
from trainables.status import Status

CLOSE = 0.02
"""By what share of a figure a layout may have been measured worse than it is: a short trial, run once."""

ERRORS = 2.0
"""How many times the standard error that a short trial gives itself comes on top of that."""


def due(results: Sequence[TrialResult], goals: Goals, chosen: Finalists, seed: int) -> list[Layout]:
    """What is to be measured again after these results of a search that has ended exploring, in this order.

    One batch after the other: rounds of all `contenders`, then `further` ones until nothing is open, of which at most
    as many trials as `chosen` has for the contenders. What slices explored is corrected by how far they were off in the
    batches before (`service.sampling.correction`). Batches follow from the results before them alone, so that what
    is left of one follows from the results too.
    """
    exploring = [result for result in results if result.purpose == Purpose.SEARCH]
    again = [result for result in results if result.purpose == Purpose.FINALIST]
    good = [result for result in exploring if result.status == Status.OK]
    batch = rounds([one.layout for one in contenders(good, goals, chosen.count)], chosen.repeats, seed)
    most, begun = len(batch) + chosen.count * chosen.repeats, 0
    while batch and begun + len(batch) <= len(again):
        begun += len(batch)
        seen = corrected([*exploring, *again[:begun]])
        batch = further(seen, goals, chosen.repeats, most - begun, seed + begun)
    for done in again[begun:]:
        if done.layout in batch:
            batch.remove(done.layout)
    return batch


def further(results: Sequence[TrialResult], goals: Goals, repeats: int, most: int, seed: int) -> list[Layout]:
    """What results with finalists among them leave open, in rounds: layouts of which it is `undecided` which is the
    best on an objective, and those of the front that were measured once and beat one that was measured again.

    Layouts that were measured again already take part in the first round alone, the others in all `repeats`. One that
    came to no result when it was measured again is not asked once more. Of more than `most` trials those of layouts
    that were measured once come first, of which more is learnt.
    """
    comparison = goals.among(candidates(results))
    asked = {result.layout for result in results if result.purpose == Purpose.FINALIST}
    some, on_front = ranked(comparison), comparison.front()
    again = [one for one in some if one.confirmed]
    ahead = [one for one in on_front if not one.confirmed and any(comparison.beating(other, [one]) for other in again)]
    groups = [*undecided(comparison).values(), *((one,) for one in ahead)]
    can = [group for group in groups if all(one.confirmed or one.layout not in asked for one in group)]
    layouts = list(dict.fromkeys(one.layout for group in can for one in group))
    fresh = [layout for layout in layouts if layout not in asked]
    batch = rounds(layouts, 1, seed) + rounds(fresh, repeats - 1, seed + 1)
    return batch if len(batch) <= most else sorted(batch, key=asked.__contains__)[:most]


def contenders(results: Sequence[TrialResult], goals: Goals, count: int) -> list[TrialResult]:
    """At most `count` of results that ended well: of their front; if it has fewer, then those that would be on it were
    they better by what they may be measured wrong.

    Of the latter, those first that no other of them beats.
    """
    comparison = goals.among(results)
    ranked = comparison.ranked(comparison.admitted)
    costs = comparison.costs(ranked)
    own_errors = [result.metrics.get("extrapolation_error") or 0.0 for result in ranked]
    better = costs - (CLOSE + ERRORS * np.array(own_errors)[:, None]) * np.abs(costs)
    left = [result for result, row in zip(ranked, better, strict=True) if not dominating(costs, row).any()]
    chosen: list[TrialResult] = []
    while left and len(chosen) < count:
        best = comparison.front(left)
        chosen += spread(best, comparison, count - len(chosen))
        left = [result for result in left if all(result is not one for one in best)]
    return chosen


def spread(front: Sequence[TrialResult], comparison: Comparison[TrialResult], count: int) -> list[TrialResult]:
    """At most `count` of a front: the best on each objective, then always the one farthest from those chosen.

    Distances are Euclidean, each objective scaled to the front's range on it.
    """
    if len(front) <= count:
        return list(front)
    costs = comparison.costs(front)
    places = scaled(costs)
    chosen = list(dict.fromkeys(int(i) for i in costs.argmin(axis=0)))[:count]
    while len(chosen) < count:
        gaps = np.linalg.norm(places[:, None] - places[chosen], axis=2).min(axis=1)
        gaps[chosen] = -1.0  # equal results have no gap between them
        chosen.append(int(gaps.argmax()))
    return [front[i] for i in chosen]


def rounds(layouts: Sequence[Layout], repeats: int, seed: int) -> list[Layout]:
    """Each layout `repeats` times: rounds of all of them, each in an order of its own that the seed decides."""
    draw = random.Random(seed)
    return [layout for _ in range(repeats) for layout in draw.sample(list(layouts), len(layouts))]
