"""The actor through which a gang's workers get their trials and hand in what came of them.

Workers are known by their rank in the gang. The rank that one takes in a trial is another matter, of the trial's
`rank_order`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from trainables.child import ABORTED, Outcome
from trainables.program import Progress, TrialRequest
from trainables.status import Status


@dataclass(frozen=True)
class Member:
    """One worker of a gang, by its rank there.

    Rank 0 also keeps the key-value store at which the ranks of a trial meet.
    """

    rank: int
    local_rank: int
    node_id: str
    host: str
    store_port: int | None


@dataclass(frozen=True)
class Order:
    """One trial for the gang; `store` is the (host, port) of rank 0's key-value store."""

    number: int
    request: TrialRequest
    store: tuple[str, int]


@dataclass
class _Round:
    """The trial under way."""

    order: Order
    steady: dict[int, Progress] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    failure: Outcome | None = None


class Mailbox:
    """State of one gang. All methods run on one event loop, so that none sees another half done.

    When Ray Train restarts the workers after one died, they join again under a new `incarnation`, and the trial that
    was under way is over: it crashed. A mailbox whose own process died comes back empty, and turns away the workers
    that it does not know, for Ray Train to start them anew.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.incarnation = ""
        self.members: dict[int, Member] = {}
        self.round: _Round | None = None
        self.number = 0
        self.latest = ""
        self.closed = False
        self.free_since = time.monotonic()
        self.changed = asyncio.Condition()

    async def join(self, incarnation: str, member: Member) -> None:
        """Take a worker in. The first of another incarnation ends the trial under way as crashed."""
        async with self.changed:
            if incarnation != self.incarnation:
                self.incarnation, self.members = incarnation, {}
                self._end(_lost("a worker process of the gang died; the gang was started anew"))
            self.members[member.rank] = member
            self.free_since = time.monotonic()
            self.changed.notify_all()

    async def next(self, worker: int, after: int) -> Order | None:
        """Wait for the first trial numbered above `after` that `worker` takes part in; None ends the worker.

        Raises `LookupError` for a worker that has not joined.
        """
        async with self.changed:
            while not self.closed:
                if worker not in self.members:
                    raise LookupError(f"worker {worker} has not joined: the mailbox or the gang was started anew")
                if (
                    self.round is not None
                    and self.round.order.number > after
                    and worker < len(self.round.order.request.ranks)
                ):
                    return self.round.order
                await self.changed.wait()
            return None

    async def aborted(self, number: int) -> None:
        """Return once trial `number` need not go on: a rank failed, or it is over."""
        async with self.changed:
            while self.round is not None and self.round.order.number == number and self.round.failure is None:
                await self.changed.wait()

    async def hand_in(self, worker: int, number: int, outcome: Outcome) -> None:
        """Take what came of trial `number` on a worker; the first that failed ends the trial for all."""
        async with self.changed:
            if self.round is None or self.round.order.number != number:
                return  # of a trial that was given up
            self.round.outcomes[worker] = outcome
            if outcome.status not in (Status.OK, ABORTED) and self.round.failure is None:
                rank = self.round.order.request.ranks[worker]
                name = f"rank {rank}" if rank == worker else f"rank {rank} on worker {worker}"
                self.round.failure = replace(outcome, cause=f"{name}: {outcome.cause}")
            self.changed.notify_all()

    async def note(self, worker: int, number: int, progress: Progress) -> None:
        """Take the progress with which a rank of trial `number` begins a window."""
        async with self.changed:
            if self.round is not None and self.round.order.number == number:
                self.round.steady[worker] = progress
                self.changed.notify_all()

    async def steady(self, trial_id: str) -> tuple[list[Progress], list[Member]] | None:
        """Wait until the first window of all ranks of a trial begins: their progress by worker, and the gang's members.

        None if the trial ended before. To be called once `evaluate` was.
        """
        async with self.changed:
            await self.changed.wait_for(lambda: self.latest == trial_id)
            current = self.round
            if current is None:
                return None
            workers = len(current.order.request.ranks)
            await self.changed.wait_for(lambda: len(current.steady) == workers or self.round is not current)
            if self.round is not current:
                return None
            return [current.steady[worker] for worker in range(workers)], await self._all_members()

    async def ready(self) -> list[Member]:
        """Wait until every worker has joined."""
        async with self.changed:
            return await self._all_members()

    async def evaluate(self, request: TrialRequest) -> tuple[list[Outcome], list[Member], float]:
        """Run one trial.

        Returns the outcomes by worker, or the one outcome that ended it, the gang's members, and the seconds that the
        gang spent on it: since it was last free, so that waiting for this trial counts. A trial that failed once all
        its ranks had handed over a report has ended well.
        """
        async with self.changed:
            members = await self._all_members()
            self.number += 1
            port = members[0].store_port
            assert port is not None, "rank 0 keeps the store"
            self.round = current = _Round(Order(self.number, request, (members[0].host, port)))
            self.latest = request.trial_id
            self.changed.notify_all()
            workers = len(request.ranks)
            await self.changed.wait_for(lambda: len(current.outcomes) == workers or self.round is not current)
            if self.round is current:
                self.round = None
            gang_s, self.free_since = time.monotonic() - self.free_since, time.monotonic()
            self.changed.notify_all()
        outcomes = [current.outcomes[worker] for worker in range(workers) if worker in current.outcomes]
        if current.failure is not None:
            if len(outcomes) < workers or any(outcome.report is None for outcome in outcomes):
                return [current.failure], members, gang_s
            outcomes = [replace(outcome, status=Status.OK, cause=None) for outcome in outcomes]
        return outcomes, members, gang_s

    async def give_up(self, cause: str) -> None:
        """End the trial under way, if any, as crashed: its gang is gone."""
        async with self.changed:
            self._end(_lost(cause))
            self.changed.notify_all()

    async def prune(self, trial_id: str, cause: str) -> None:
        """End this trial, if it is under way: it is not worth going on with. The gang is well."""
        async with self.changed:
            if self.latest == trial_id and self.round is not None and self.round.failure is None:
                self._end(Outcome(Status.PRUNED, cause, "window"))
                self.changed.notify_all()

    async def close(self) -> None:
        """Send the workers home, from the trial under way as well."""
        async with self.changed:
            self.closed = True
            self._end(_lost("the gang was closed"))
            self.changed.notify_all()

    async def _all_members(self) -> list[Member]:
        await self.changed.wait_for(lambda: len(self.members) == self.world_size)
        return [self.members[rank] for rank in range(self.world_size)]

    def _end(self, outcome: Outcome) -> None:
        if self.round is not None:
            self.round.failure = outcome
            self.round = None


def _lost(cause: str) -> Outcome:
    return Outcome(Status.CRASH, cause, infrastructure=True)
