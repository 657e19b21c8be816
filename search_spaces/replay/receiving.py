"""When a rank of a pipeline lets go of parameters and has room made for what it receives, as torch lowers schedules.

Schedules of several stages are lowered by `_add_unshard_reshard`, `_add_reduce_grad` and `_add_send_recv` of
`torch/distributed/pipelining/schedules.py`; those of one stage receive right before each pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from search_spaces.layout import ONE_STAGE_SCHEDULES, Layout
from search_spaces.schedules import Action, Order, Pass, order, orders

ACTIVE = 3
"""Stages whose parameters torch has gathered at once, at most: those that have their turns next."""


class Kind(Enum):
    RECEIVE = auto()
    PASS = auto()
    LET_GO = auto()
    REDUCE = auto()


class Doing(NamedTuple):
    """Of what a rank does in a step. Of what is for a whole stage, the microbatch does not matter."""

    kind: Kind
    action: Action


def doings(layout: Layout, rank: int) -> list[Doing]:
    """What a rank of a pipeline does in a step, in order."""
    if layout.pipeline_schedule in ONE_STAGE_SCHEDULES:
        return _one_stage(order(layout, rank), layout.pipeline_stages - 1)
    return _with_receives([_lowered(passes) for passes in orders(layout)], layout.pipeline_stages - 1)[rank]


def _one_stage(passes: Order, last: int) -> list[Doing]:
    done = []
    for action in passes:
        if action.stage != (0 if action.step is Pass.FORWARD else last):
            done.append(Doing(Kind.RECEIVE, action))
        done.append(Doing(Kind.PASS, action))
    return [*done, Doing(Kind.REDUCE, passes[-1])]


def _lowered(passes: Order) -> list[Doing]:
    """Passes, and what becomes of the parameters and gradients of their stages."""
    done: list[Doing] = []
    active: list[int] = []
    left = Counter(action.stage for action in passes)
    for index, action in enumerate(passes):
        coming = list(dict.fromkeys(later.stage for later in passes[index:]))[:ACTIVE]
        done += [Doing(Kind.LET_GO, action._replace(stage=stage)) for stage in active if stage not in coming]
        active = coming
        done.append(Doing(Kind.PASS, action))
        left[action.stage] -= 1
        if not left[action.stage]:
            done.append(Doing(Kind.REDUCE, action))
    return done + [Doing(Kind.LET_GO, passes[-1]._replace(stage=stage)) for stage in active]


def _with_receives(lists: Sequence[Sequence[Doing]], last: int) -> list[list[Doing]]:
    """Ranks take turns, and who sends has the other one receive at once, however much that has to do before."""
    rank_of = {doing.action.stage: rank for rank, doings in enumerate(lists) for doing in doings}
    done: list[list[Doing]] = [[] for _ in lists]
    at = [0] * len(lists)
    passed: set[tuple[int, bool, int]] = set()
    while any(turn < len(doings) for turn, doings in zip(at, lists, strict=True)):
        for rank, mine in enumerate(lists):
            if at[rank] == len(mine):
                continue
            doing = mine[at[rank]]
            stage, step, microbatch = doing.action
            is_forward = step is Pass.FORWARD
            is_sent = doing.kind is Kind.PASS and step is not Pass.WEIGHT
            if is_sent and stage != (0 if is_forward else last):
                before = stage - 1 if is_forward else stage + 1
                if (before, is_forward, microbatch) not in passed:
                    continue
            at[rank] += 1
            done[rank].append(doing)
            if not is_sent:
                continue
            passed.add((stage, is_forward, microbatch))
            if stage != (last if is_forward else 0):
                after = stage + 1 if is_forward else stage - 1
                if rank_of[after] != rank:
                    done[rank_of[after]].append(Doing(Kind.RECEIVE, Action(after, step, microbatch)))
    return done
