"""The pool that lends workers to trials. Without torch and Ray Train: its actor is up sooner than the gangs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from service.remote import ON_HEAD
from service.step import Wish
from service.trials.placing import placed
from trainables.mailbox import Mailbox, Member

RETRY_S = 1.0


@dataclass(frozen=True)
class Lease:
    """What a trial has for itself: some workers of the gang behind a mailbox, by their ranks there.

    One that is alone has all of the gang's workers on its nodes; those beyond its size idle.
    """

    mailbox: ActorHandle[Mailbox]
    workers: tuple[int, ...]


@dataclass(frozen=True)
class _Lent:
    """A lease, as the pool knows it: of which of its gangs, on which nodes."""

    gang: str
    workers: tuple[int, ...]
    nodes: frozenset[str]
    alone: bool


class Pool:
    """Lends workers that are up to one trial at a time. An actor; all methods run on one event loop.

    A gang may wait for the cluster's GPUs, or a worker for Ray Train to start it anew. That is no trial's fault, so no
    trial gets such workers. A pool that died comes back knowing of no gang, until it is told again, and of no lease:
    the trials under way are given up.
    """

    def __init__(self) -> None:
        self._mailboxes: dict[str, Any] = {}
        self._served: frozenset[str] = frozenset()
        self._members: dict[str, list[Member]] = {}
        self._free: dict[str, set[int]] = {}
        self._lent: dict[str, _Lent] = {}
        self._disturbed: set[str] = set()
        self._elsewhere: frozenset[str] = frozenset()
        self._offers: set[asyncio.Task[None]] = set()

    async def serve(self, addresses: Sequence[str], elsewhere: frozenset[str] = frozenset()) -> dict[str, list[str]]:
        """Lend from these gangs, by the names of their mailboxes among Ray's actors, and from no others any more.

        `elsewhere`: the nodes on which other searches have gangs, which disturb the trials there. Returns the gangs
        that are up, with their workers' nodes, those included that are lent no more but have trials under way.
        """
        self._served, self._elsewhere = frozenset(addresses), elsewhere
        self._disturbed.update(trial_id for trial_id, one in self._lent.items() if one.nodes & elsewhere)
        for gang in [gang for gang in self._mailboxes if gang not in addresses]:
            self._free.pop(gang, None)
            if all(one.gang != gang for one in self._lent.values()):
                del self._mailboxes[gang]
                self._members.pop(gang, None)
        for gang in [gang for gang in addresses if gang not in self._mailboxes]:
            self._mailboxes[gang] = ray.get_actor(gang)
            self._offer(gang, None)
        return {gang: [member.node_id for member in members] for gang, members in self._members.items()}

    async def free(self) -> int | None:
        """How many workers of one gang nobody has at present; None while none is up, lent or not."""
        if not self._lent and not any(self._free.values()):
            return None
        return max((len(self._open(gang, alone=False)) for gang in self._free), default=0)

    async def lend(self, trial_id: str, wishes: Sequence[Wish]) -> int | None:
        """Lend a trial what it needs by the first of `wishes` that can be met at once: which one, None if none can."""
        for number, wish in enumerate(wishes):
            if (lent := self._found(wish)) is not None:
                beside = [other for other, one in self._lent.items() if one.nodes & lent.nodes]
                self._disturbed.update([*beside, trial_id] if beside or lent.nodes & self._elsewhere else [])
                self._free[lent.gang] -= set(lent.workers)
                self._lent[trial_id] = lent
                return number
        return None

    async def lease(self, trial_id: str) -> Lease | None:
        """What was lent to a trial; None for one of which this pool knows nothing."""
        lent = self._lent.get(trial_id)
        return None if lent is None else Lease(self._mailboxes[lent.gang], lent.workers)

    async def release(self, trial_id: str) -> bool:
        """Take back what a trial has, whatever that is doing. Releasing twice does nothing.

        Returns whether other trials, or gangs of other searches, had workers on its nodes meanwhile.
        """
        lent = self._lent.pop(trial_id, None)
        if lent is None:
            return False
        with contextlib.suppress(RayError):  # a mailbox that died has no trial under way
            await self._mailboxes[lent.gang].give_up.remote("the trial was ended", lent.workers)
        for worker in lent.workers:
            self._offer(lent.gang, worker)
        disturbed = trial_id in self._disturbed
        self._disturbed.discard(trial_id)
        return disturbed

    async def cancel(self, trial_id: str, cause: str) -> None:
        """End a trial under way as cancelled; of any other nothing is done."""
        if (lent := self._lent.get(trial_id)) is not None:
            with contextlib.suppress(RayError):  # a mailbox that died has no trial under way
                await self._mailboxes[lent.gang].cancel.remote(trial_id, cause)

    def _found(self, wish: Wish) -> _Lent | None:
        """A group of workers as wished for, of the gang that has the fewest left, so that larger groups stay whole."""
        for gang in sorted(self._free, key=lambda one: len(self._free[one])):
            open_now, members = self._open(gang, wish.alone), self._members[gang]
            if (group := placed(wish.size, open_now, members)) is not None:
                nodes = frozenset(members[rank].node_id for rank in group)
                idle = [rank for rank in sorted(open_now - set(group)) if members[rank].node_id in nodes]
                return _Lent(gang, (*group, *idle) if wish.alone else group, nodes, wish.alone)
        return None

    def _open(self, gang: str, alone: bool) -> set[int]:
        """The free workers of a gang on nodes where a trial may have some: where none is alone, or has any."""
        barred = {node for lent in self._lent.values() if alone or lent.alone for node in lent.nodes}
        return {rank for rank in self._free[gang] if self._members[gang][rank].node_id not in barred}

    def _offer(self, gang: str, worker: int | None) -> None:
        """Have a worker lent again once it is up, if its gang is still served; all of a gang, once all are, if that is
        None."""
        mailbox = self._mailboxes[gang]

        async def once_ready() -> None:
            while gang in self._served:
                try:
                    if worker is None:
                        await mailbox.give_up.remote("the process that lends gangs to trials died")
                    members = await mailbox.ready.remote([] if worker is None else [worker])
                    break
                except RayError:  # it died, and will be back
                    await asyncio.sleep(RETRY_S)
            if gang in self._served:
                self._members[gang] = members
                self._free.setdefault(gang, set()).update(range(len(members)) if worker is None else [worker])

        task = asyncio.ensure_future(once_ready())
        self._offers.add(task)
        task.add_done_callback(self._offers.discard)


def start_pool() -> ActorHandle[Pool]:
    """The actor that lends the workers of gangs. Calls wait for one that died to be back."""
    actor: Any = ray.remote(Pool)
    options = {"num_cpus": 0, "resources": ON_HEAD, "max_concurrency": 1000, "max_restarts": -1, "max_task_retries": -1}
    pool: ActorHandle[Pool] = actor.options(**options).remote()
    return pool
