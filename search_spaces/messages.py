"""What the ranks of a pipeline send each other, and when each engine posts it and waits for it.

As NCCL does it under torch, in whose groups each rank has one stream for all that it sends and receives: batches go one
after another in the order in which a rank posted them, and a message is on its way when both its ends are there (so
with a group bound to its device: pytorch/pytorch issues 154132 and 175225). What waits in line holds up what is behind
it, which schedules of several stages a rank would feel on more than two ranks: `megatron` has groups of their own for
theirs (`trainables/engines/megatron/links.py`). The four ways of posting are those of torch's `ScheduleGPipe`,
`Schedule1F1B` and `_PipelineScheduleRuntime`, 2.11 to 2.13, and of DeepSpeed's `TrainSchedule`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from search_spaces.engines import engine_of
from search_spaces.layout import Layout
from search_spaces.schedules import Action, Order, Pass, orders


class Message(NamedTuple):
    """What comes out of an action: hidden states, or the gradients of them; between pipeline ranks."""

    sender: int
    receiver: int
    action: Action


Batch = tuple[Message, ...]
"""Messages that a rank posts at once, to send or to receive."""

Line = tuple[int, ...]
"""What goes one after another: what one rank sends another, or all that a rank sends and receives, which is ()."""


class Run(NamedTuple):
    action: Action


class Reduce(NamedTuple):
    """What a stage's gradients are reduced by, once the last of its actions has run and what came out is on its way."""

    action: Action


class Post(NamedTuple):
    """Begin to send and receive once all that ran before is over, and what was posted before on the line."""

    batch: Batch
    line: Line = ()


class Wait(NamedTuple):
    """Let nothing run until all of a batch is sent and received."""

    batch: Batch


Script = tuple[Run | Reduce | Post | Wait, ...]
"""All that one rank does in a step, in its order."""

_Steps = list[Run | Reduce | Post | Wait]

GATHERED = 3
"""Stages of a rank whose parameters torch's schedules gather ahead."""


def scripts(layout: Layout) -> tuple[Script, ...]:
    """Of each pipeline rank, by rank; a rank without a pipeline has nothing to do with others."""
    if layout.pipeline_parallel_size == 1:
        return ((),)
    ends, order = _Ends(layout), orders(layout)
    if engine_of(layout).sends_one_by_one:
        steps = [_one_by_one(each, ends) for each in order]
    elif layout.pipeline_schedule == "gpipe":
        steps = [_phase_by_phase(each, ends) for each in order]
    elif layout.pipeline_schedule == "1f1b":
        steps = [_exchanging(each, ends) for each in order]
    else:
        steps = _posting_ahead(order, ends)
    return tuple(map(tuple, steps))


class _Ends:
    """Between which ranks the messages of a layout go. Stages on one rank hand over without any."""

    def __init__(self, layout: Layout) -> None:
        self.rank_of = {stage: r for r in range(layout.pipeline_parallel_size) for stage in layout.stages_of(r)}

    def sent(self, action: Action) -> Batch:
        """What is sent of an action: one message or none."""
        if action.step is Pass.WEIGHT:
            return ()
        stage = action.stage + (1 if action.step is Pass.FORWARD else -1)
        sender, receiver = self.rank_of[action.stage], self.rank_of.get(stage)
        return () if receiver in (None, sender) else (Message(sender, receiver, action),)

    def awaited(self, action: Action) -> Batch:
        """What an action needs of another rank: one message or none."""
        if action.step is Pass.WEIGHT:
            return ()
        stage = action.stage - (1 if action.step is Pass.FORWARD else -1)
        return self.sent(action._replace(stage=stage)) if stage in self.rank_of else ()


def _waited(batch: Batch) -> _Steps:
    return [Post(batch), Wait(batch)] if batch else []


def _one_by_one(order: Order, ends: _Ends) -> _Steps:
    """DeepSpeed sends what an action made before the next, and waits for it as for what it receives. What a rank sends
    forward comes after the gradient that it has for the pass, all else is sent before anything is received."""
    steps: _Steps = []
    before: Action | None = None
    for action in order:
        sent, received = _waited(ends.sent(before) if before else ()), _waited(ends.awaited(action))
        turns = before is not None and before.step is Pass.FORWARD and action.step is Pass.BACKWARD
        steps += [*received, *sent] if turns else [*sent, *received]
        steps.append(Run(action))
        before = action
    return steps + _waited(ends.sent(before) if before else ())


def _phase_by_phase(order: Order, ends: _Ends) -> _Steps:
    """What is sent is waited for at the end of all forward, and of all backward passes."""
    steps: _Steps = []
    for _, phase in itertools.groupby(order, key=lambda action: action.step):
        sends: list[Batch] = []
        for action in phase:
            steps += [*_waited(ends.awaited(action)), Run(action)]
            if sent := ends.sent(action):
                steps.append(Post(sent))
                sends.append(sent)
        steps += map(Wait, sends)
    return steps


def _exchanging(order: Order, ends: _Ends) -> _Steps:
    """Where forward and backward passes alternate, what one made is sent in one batch with receiving what the next
    needs, and both are waited for. Before and after, it is sent at once, and waited for after one more pass."""
    steps: _Steps = []
    held: Batch = ()
    sending: Batch = ()
    for action, following in itertools.zip_longest(order, order[1:]):
        steps += [*_waited(held + ends.awaited(action)), Run(action)]
        if sending:
            steps.append(Wait(sending))
        held, sending = ends.sent(action), ()
        if held and (following is None or following.step is action.step):
            steps.append(Post(held))
            held, sending = (), held
    return [*steps, Wait(sending)] if sending else steps


def _posting_ahead(order: Sequence[Order], ends: _Ends) -> list[_Steps]:
    """Receiving is posted where the rank would be, when something is sent to it, if all took turns. What one rank sends
    another has a line of its own, and is waited for at the end of the step."""
    steps: list[_Steps] = [[] for _ in order]
    sends: list[_Steps] = [[] for _ in order]
    announced: set[Batch] = {()}
    turns = [_turns(actions, ends) for actions in order]
    while any(turns):
        for rank, left in enumerate(turns):
            if not left or left[0][1] not in announced:
                continue
            step, needed = left.popleft()
            if step is None:
                continue
            steps[rank] += [Wait(needed), step] if needed else [step]
            if isinstance(step, Run) and (sent := ends.sent(step.action)):
                announced.add(sent)
                sends[rank].append(Wait(sent))
                line = rank, sent[0].receiver
                for end in line:
                    steps[end].append(Post(sent, line))
    return [[*ran, *reversed(waits)] for ran, waits in zip(steps, sends, strict=True)]


def _turns(order: Order, ends: _Ends) -> deque[tuple[Run | Reduce | None, Batch]]:
    """Each action and what it needs, with a turn for reducing the gradients of a stage after its last action, and
    nothing for those that torch takes for gathering the parameters of the next stages and releasing those of others."""
    turns: deque[tuple[Run | Reduce | None, Batch]] = deque()
    later: list[int] = []
    """The stages still to come, in the order in which they do."""
    for action in reversed(order):
        soon = [action.stage, *(stage for stage in later if stage != action.stage)]
        if later:
            turns.extendleft([(None, ())] * len(set(soon[:GATHERED]) ^ set(later[:GATHERED])))
        if action.stage not in later:
            turns.appendleft((Reduce(action), ()))
        turns.appendleft((Run(action), ends.awaited(action)))
        later = soon
    return turns
