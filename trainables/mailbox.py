"""The actor through which a gang's workers get their trials and hand in what came of them.

Trials of some of the gang's workers each run side by side. Workers are known by their rank in the gang. The rank that
one takes in a trial is another matter, of who takes part and of the trial's `rank_order`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainables.child import ABORTED, Outcome
from trainables.program import Progress, TrialRequest
from trainables.status import Status

SILENT_S, LISTEN_S = 60.0, 5.0
"""After so long without a word a worker is taken for stopped, and how often that is looked for during a trial."""


@dataclass(frozen=True)
class Member:
    """One worker of a gang, by its rank there.

    `uuid` is what telemetry calls its device, which is that of each rank that it runs; `device` is what the node calls
    its GPU, None on CPU; `pid` is its process there. It keeps a key-value store at (`host`, `store_port`), at which the
    ranks of a trial meet whose first worker it is.
    """

    rank: int
    node_id: str
    host: str
    store_port: int
    uuid: str
    device: str | None = None
    pid: int | None = None


@dataclass(frozen=True)
class Order:
    """One trial for some workers of the gang: `members` are those that take part, in their order there."""

    number: int
    request: TrialRequest
    members: tuple[Member, ...]

    def place(self, worker: int) -> int:
        """Where `worker` is among those that take part."""
        return next(place for place, member in enumerate(self.members) if member.rank == worker)


@dataclass
class _Round:
    """A trial under way on `workers`, of whom the first have a part in it. `taken`: those of them that know of it; all
    else is by place in the order. `left`: what was left behind, of those that are done with it."""

    order: Order
    workers: tuple[int, ...]
    taken: set[int] = field(default_factory=set)
    steady: dict[int, Progress] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    left: dict[int, tuple[str, ...]] = field(default_factory=dict)
    failure: Outcome | None = None

    @property
    def told(self) -> bool:
        """Whether all ranks have handed in what came of it."""
        return len(self.outcomes) == len(self.order.members)


class Mailbox:
    """State of one gang. All methods run on one event loop, so that none sees another half done.

    A worker that died is started anew by Ray Train and joins again: the trial that it was part of is over then, it
    crashed; trials of other workers go on. One that says nothing for a minute, or owes an answer for too long, is out:
    its trial is over, and it is turned away until it has joined anew. A mailbox whose own process died comes back
    empty, and turns away the workers that it does not know, for Ray Train to start them anew.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.members: dict[int, Member] = {}
        self.heard: dict[int, float] = {}
        self.out: set[int] = set()
        self.doomed: list[Member] = []
        self.rounds: dict[int, _Round] = {}
        self.number = 0
        self.numbers: dict[str, int] = {}
        self.expired: set[str] = set()
        self.cancelled: dict[str, str] = {}
        self.closed = False
        self.free_since: dict[int, float] = {}
        self.changed = asyncio.Condition()

    async def join(self, member: Member) -> None:
        """Take a worker in. If it was in already, it has died meanwhile: a trial that it had begun is over, and one too
        that others have begun whose ranks were to meet at its store."""
        async with self.changed:
            for current in list(self.rounds.values()):
                ranks = [one.rank for one in current.order.members]
                if member.rank in current.taken or (member.rank == ranks[0] and current.taken):
                    self._end(_lost("a worker process of the gang died; it was started anew"), current.workers)
                elif member.rank in ranks:
                    members = tuple(member if one.rank == member.rank else one for one in current.order.members)
                    current.order = replace(current.order, members=members)
            self.members[member.rank] = member
            self.heard[member.rank] = time.monotonic()
            self.out.discard(member.rank)
            self.free_since[member.rank] = time.monotonic()
            self.changed.notify_all()

    async def beat(self, worker: int) -> None:
        """Hear from a worker that it is alive, which it says every few seconds whatever it does."""
        self.heard[worker] = time.monotonic()

    async def next(self, worker: int, after: int) -> Order | None:
        """Wait for the first trial numbered above `after` that `worker` takes part in; None ends the worker.

        Raises `LookupError` for a worker that has not joined, or was taken for dead since.
        """
        async with self.changed:
            while not self.closed:
                if worker not in self.members:
                    raise LookupError(f"worker {worker} has not joined: the mailbox was started anew")
                if worker in self.out:
                    raise LookupError(f"worker {worker} was silent: it is to be started anew")
                for number, current in self.rounds.items():  # in the order of their numbers
                    if number > after and any(member.rank == worker for member in current.order.members):
                        current.taken.add(worker)
                        return current.order
                await self.changed.wait()
            return None

    async def aborted(self, number: int) -> None:
        """Return once trial `number` need not go on: a rank failed, or it is over."""
        async with self.changed:
            while (current := self.rounds.get(number)) is not None and current.failure is None:
                await self.changed.wait()

    async def hand_in(self, worker: int, number: int, outcome: Outcome) -> None:
        """Take what came of trial `number` on a worker; the first that failed ends the trial for all."""
        async with self.changed:
            if (current := self.rounds.get(number)) is None:
                return  # of a trial that was given up
            place = current.order.place(worker)
            current.outcomes[place] = outcome
            if outcome.status not in (Status.OK, ABORTED) and current.failure is None:
                rank = current.order.request.ranks[place]
                name = f"rank {rank}" if rank == worker else f"rank {rank} on worker {worker}"
                current.failure = replace(outcome, cause=f"{name}: {outcome.cause}")
            self.changed.notify_all()

    async def leave(self, worker: int, number: int, left: tuple[str, ...]) -> None:
        """Take what trial `number` has left behind on a worker, which is done with it: its process there has ended."""
        async with self.changed:
            if (current := self.rounds.get(number)) is not None:
                current.left[current.order.place(worker)] = left
                self.changed.notify_all()

    async def note(self, worker: int, number: int, progress: Progress) -> None:
        """Take the progress with which a rank of trial `number` begins a window."""
        async with self.changed:
            if (current := self.rounds.get(number)) is not None:
                current.steady[current.order.place(worker)] = progress
                self.changed.notify_all()

    async def steady(self, trial_id: str) -> tuple[list[Progress], list[Member]] | None:
        """Wait until the first window of all ranks of a trial begins: their progress, and its members, in their order.

        None if the trial ended before. To be called once `evaluate` was.
        """
        async with self.changed:
            await self.changed.wait_for(lambda: trial_id in self.numbers)
            number = self.numbers[trial_id]
            if (current := self.rounds.get(number)) is None:
                return None
            ranks = len(current.order.members)
            await self.changed.wait_for(lambda: len(current.steady) == ranks or number not in self.rounds)
            if number not in self.rounds:
                return None
            return [current.steady[place] for place in range(ranks)], list(current.order.members)

    async def ready(self, workers: Sequence[int] = ()) -> list[Member]:
        """Wait until every worker has joined once, and of `workers` none is out. Returns all, as they are known."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.members) == self.world_size and self.out.isdisjoint(workers))
            return [self.members[rank] for rank in range(self.world_size)]

    async def evaluate(
        self, request: TrialRequest, workers: Sequence[int] | None = None
    ) -> tuple[list[Outcome], list[Member], float]:
        """Run one trial on `workers`, all if that is None, of which nobody else is to make use meanwhile.

        As many of them as it has ranks take part, the first ones. Returns the outcomes in their order, or the one
        outcome that ended it, the first of them with all that was left behind; all of `workers`; and the seconds that
        they spent on it: since the last of them was free, so that waiting for this trial counts. A trial that failed
        once all its ranks had handed over a report has ended well.
        """
        async with self.changed:
            lent = tuple(range(self.world_size) if workers is None else workers)
            await self.changed.wait_for(
                lambda: (
                    request.trial_id in self.expired
                    or self._cause(request) is not None
                    or self.members.keys() - self.out >= set(lent)
                )
            )
            if request.trial_id in self.expired:
                raise LookupError(f"trial {request.trial_id} was given up before it began")
            if (cause := self._cause(request)) is not None:
                return [Outcome(Status.CANCELLED, cause)], [], 0.0
            members = [self.members[worker] for worker in lent]
            self.number = number = self.number + 1
            self.numbers[request.trial_id] = number
            order = Order(number, request, tuple(members[: len(request.ranks)]))
            self.rounds[number] = current = _Round(order, lent)
            self.changed.notify_all()
            ranks = len(order.members)
            while not (current.told and len(current.left) == ranks) and number in self.rounds:
                self._listen(current)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), LISTEN_S)
            self.rounds.pop(number, None)
            gang_s = time.monotonic() - max(self.free_since[worker] for worker in lent)
            self.free_since |= dict.fromkeys(lent, time.monotonic())
            self.changed.notify_all()
        outcomes = [current.outcomes[place] for place in range(ranks) if place in current.outcomes]
        if current.failure is not None:
            if not current.told or any(outcome.report is None for outcome in outcomes):
                outcomes = [current.failure]
            else:
                outcomes = [replace(outcome, status=Status.OK, cause=None) for outcome in outcomes]
        left = tuple(line for place in sorted(current.left) for line in current.left[place])
        return [replace(outcomes[0], left=left), *outcomes[1:]], members, gang_s

    async def expire(self, trial_id: str, cause: str) -> list[Member]:
        """End a trial that should be over by now, as crashed; the workers that owe it an answer are out. Returns those
        that take part; none if it has not begun, or is over."""
        async with self.changed:
            self.expired.add(trial_id)
            self.changed.notify_all()
            if (current := self.rounds.get(self.numbers.get(trial_id, 0))) is None:
                return []
            members = list(current.order.members)
            self._cast_out([member for place, member in enumerate(members) if place not in current.left])
            self._end(_lost(cause), current.workers)
            return members

    async def outcasts(self) -> list[Member]:
        """The workers that are out since this was asked last, whose processes are to be ended."""
        doomed, self.doomed = self.doomed, []
        return doomed

    async def give_up(self, cause: str, workers: Sequence[int] | None = None) -> None:
        """End the trials under way on any of `workers`, on all if that is None, as crashed: those are gone."""
        async with self.changed:
            self._end(_lost(cause), workers)
            self.changed.notify_all()

    async def prune(self, trial_id: str, cause: str) -> None:
        """End this trial, if it is under way: it is not worth going on with. The gang is well."""
        async with self.changed:
            current = self.rounds.get(self.numbers.get(trial_id, 0))
            if current is not None and current.failure is None:
                self._end(Outcome(Status.PRUNED, cause, "window"), current.workers)
                self.changed.notify_all()

    async def cancel(self, trial_id: str, cause: str) -> None:
        """End a trial, and all that is still to be run of it. The gang is well."""
        async with self.changed:
            self.cancelled[trial_id] = cause
            for current in list(self.rounds.values()):
                if current.failure is None and self._cause(current.order.request) is not None:
                    self._end(Outcome(Status.CANCELLED, cause), current.workers)
            self.changed.notify_all()

    async def close(self) -> None:
        """Send the workers home, from the trials under way as well."""
        async with self.changed:
            self.closed = True
            self._end(_lost("the gang was closed"))
            self.changed.notify_all()

    def _cause(self, request: TrialRequest) -> str | None:
        """Why a request is not to be run, of a trial that was cancelled or a part of one; None if it is."""
        for trial_id, cause in self.cancelled.items():
            if request.trial_id == trial_id or request.trial_id.startswith(f"{trial_id}-"):
                return cause
        return None

    def _listen(self, current: _Round) -> None:
        """End a trial of which a worker says nothing any more."""
        since = time.monotonic() - SILENT_S
        if silent := [member for member in current.order.members if self.heard[member.rank] < since]:
            self._cast_out(silent)
            cause = f"worker {silent[0].rank} of the gang said nothing for {SILENT_S:.0f} s"
            self._end(Outcome(Status.HANG, cause, infrastructure=True), current.workers)
            self.changed.notify_all()

    def _cast_out(self, silent: Sequence[Member]) -> None:
        self.doomed += [member for member in silent if member.rank not in self.out]
        self.out |= {member.rank for member in silent}

    def _end(self, outcome: Outcome, workers: Sequence[int] | None = None) -> None:
        for number, current in list(self.rounds.items()):
            if workers is None or not set(workers).isdisjoint(current.workers):
                if not current.told:  # or it is known already what came of it
                    current.failure = outcome
                del self.rounds[number]


def _lost(cause: str) -> Outcome:
    return Outcome(Status.CRASH, cause, infrastructure=True)
