"""One optimizer step of a pipeline, played event by event from how long each pass takes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from search_spaces.messages import Batch, Line, Message, Post, Reduce, Run, Script
from search_spaces.schedules import Action, PassTime


class Span(NamedTuple):
    """Seconds from the step's begin at which an action began and ended."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Played:
    """All passes of one step, by pipeline rank. In seconds from the step's begin.

    `messages`: since when each rank sent and received, and until when, as long as a kernel of NCCL's has some of its
    device's processors for it: it waits there for the other end. `begins`: when each rank could begin with its passes.
    `finishes`: when it was through with them, and all that it sent had arrived.
    """

    spans: tuple[tuple[Span, ...], ...]
    messages: tuple[tuple[tuple[float, float], ...], ...]
    begins: tuple[float, ...]
    finishes: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Until the last rank is through."""
        return max(self.finishes)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank's passes took."""
        return tuple(sum(span.end - span.begin for span in spans) for spans in self.spans)

    @property
    def waiting(self) -> tuple[float, ...]:
        """Seconds between its begin and the end of the last rank in which each rank did not compute."""
        return tuple(self.seconds - begin - busy for begin, busy in zip(self.begins, self.busy, strict=True))

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that they wait."""
        waiting, busy = sum(self.waiting), sum(self.busy)
        return waiting / (waiting + busy) if waiting + busy else 0.0


class _Stream:
    """What one rank sends and receives on a line, batch after batch."""

    def __init__(self) -> None:
        self.posted: deque[tuple[float, Batch]] = deque()
        self.left = 0
        self.begin = self.end = 0.0
        self.busy: list[tuple[float, float]] = []


def play(
    scripts: Sequence[Script],
    seconds: Callable[[int, Action], float],
    transfer: Callable[[int, int], float],
    begins: Sequence[float] | None = None,
    reducing: Callable[[int, Action], float] = lambda rank, action: 0.0,
) -> Played:
    """Play the `scripts` of all pipeline ranks.

    `seconds(rank, action)` is how long an action takes, `transfer(sender, receiver)` how long a message between two
    ranks does, `begins` when each rank is at its first action, 0 where left out, and `reducing(rank, action)` how long
    gradients are reduced after the last action of a stage.

    Raises ValueError if ranks wait for each other forever.
    """
    begun = tuple(begins or [0.0] * len(scripts))
    clocks, places = list(begun), [0] * len(scripts)
    spans: list[list[Span]] = [[] for _ in scripts]
    streams: defaultdict[tuple[int, Line], _Stream] = defaultdict(_Stream)
    over: list[dict[Batch, float]] = [{} for _ in scripts]
    met: dict[Message, float] = {}
    """Since when one end of a message has been there."""
    transfer = cache(transfer)
    runnable = deque(range(len(scripts)))

    def communicate(opened: list[tuple[int, Line]]) -> None:
        """Begin with the first batch of each of these ranks on a line, and with what that lets begin."""
        while opened:
            rank, line = opened.pop()
            stream = streams[rank, line]
            posted, batch = stream.posted[0]
            stream.left, stream.begin = len(batch), max(posted, stream.end)
            ready = stream.begin
            for message in batch:
                if (other := met.pop(message, None)) is None:
                    met[message] = ready
                    continue
                end = max(ready, other) + transfer(message.sender, message.receiver)
                for rank in (message.sender, message.receiver):
                    opened += arrived(rank, line, end)

    def arrived(rank: int, line: Line, end: float) -> list[tuple[int, Line]]:
        """Count a message of a rank's batch, and return the rank and the line if it can begin with another one."""
        stream = streams[rank, line]
        stream.left, stream.end = stream.left - 1, max(stream.end, end)
        if stream.left:
            return []
        _, batch = stream.posted.popleft()
        over[rank][batch] = stream.end
        stream.busy.append((stream.begin, stream.end))
        runnable.append(rank)
        return [(rank, line)] if stream.posted else []

    while runnable:
        rank = runnable.popleft()
        script = scripts[rank]
        while places[rank] < len(script):
            step = script[places[rank]]
            if isinstance(step, Run):
                begin = clocks[rank]
                clocks[rank] += seconds(rank, step.action)
                spans[rank].append(Span(step.action, begin, clocks[rank]))
            elif isinstance(step, Reduce):
                clocks[rank] += reducing(rank, step.action)
            elif isinstance(step, Post):
                stream = streams[rank, step.line]
                stream.posted.append((clocks[rank], step.batch))
                if len(stream.posted) == 1:
                    communicate([(rank, step.line)])
            elif step.batch in over[rank]:
                clocks[rank] = max(clocks[rank], over[rank].pop(step.batch))
            else:
                break
            places[rank] += 1
    if places != [len(script) for script in scripts]:
        raise ValueError("the ranks of the pipeline wait for each other")
    busy: list[list[tuple[float, float]]] = [[] for _ in scripts]
    for (rank, _), stream in streams.items():
        busy[rank] += stream.busy
    return Played(tuple(map(tuple, spans)), tuple(map(_united, busy)), begun, tuple(clocks))


def _united(spans: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The times that any of the spans covers."""
    united: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if united and begin < united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((begin, end))
    return tuple(united)


def play_passes(scripts: Sequence[Script], passes: Iterable[PassTime]) -> Played:
    """Play the `scripts` of all pipeline ranks with the `passes` of all stages as they were measured, and messages that
    take no time."""
    times = {(one.stage, one.step): one for one in passes}

    def seconds(_: int, action: Action) -> float:
        return times[action.stage, action.step].of(action.microbatch)

    return play(scripts, seconds, lambda sender, receiver: 0.0)
