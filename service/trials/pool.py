"""The pool that lends gangs to trials. Without torch and Ray Train: its actor is up sooner than the gangs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from service.remote import ON_HEAD
from trainables.mailbox import Mailbox

RETRY_S = 1.0


class Pool:
    """Lends each gang whose workers are up to one trial at a time. An actor; all methods run on one event loop.

    A gang may wait for the cluster's GPUs, or for Ray Train to start it anew. That is no trial's fault, so no trial
    gets such a gang.
    """

    def __init__(self, mailboxes: list[ActorHandle[Mailbox]]) -> None:
        self._starting = list(mailboxes)
        self._free: asyncio.Queue[ActorHandle[Mailbox]] = asyncio.Queue()
        self._lent: dict[str, ActorHandle[Mailbox]] = {}
        self._offers: set[asyncio.Task[None]] = set()

    async def up(self) -> int:
        """How many gangs are up: those that are free, and those that are lent."""
        self._offer_new()
        return self._free.qsize() + len(self._lent)

    async def lease(self, trial_id: str, timeout_s: float) -> ActorHandle[Mailbox] | None:
        """A gang's mailbox for one trial, once one is free; None if none was in time."""
        self._offer_new()
        try:
            self._lent[trial_id] = await asyncio.wait_for(self._free.get(), timeout_s)
        except TimeoutError:
            return None
        return self._lent[trial_id]

    async def release(self, trial_id: str) -> None:
        """Take the gang of a trial back, whatever it is doing. Releasing twice does nothing."""
        mailbox = self._lent.pop(trial_id, None)
        if mailbox is not None:
            with contextlib.suppress(RayError):  # a mailbox that died has no trial under way
                await mailbox.give_up.remote("the trial was ended")
            self._offer(mailbox)

    def _offer_new(self) -> None:
        """Offer all gangs, in the first call: an actor is made outside its event loop."""
        while self._starting:
            self._offer(self._starting.pop())

    def _offer(self, mailbox: Any) -> None:
        async def once_ready() -> None:
            while True:
                try:
                    await mailbox.ready.remote()
                    break
                except RayError:  # it died, and will be back
                    await asyncio.sleep(RETRY_S)
            self._free.put_nowait(mailbox)

        task = asyncio.ensure_future(once_ready())
        self._offers.add(task)
        task.add_done_callback(self._offers.discard)


def start_pool(mailboxes: list[ActorHandle[Mailbox]]) -> ActorHandle[Pool]:
    """The actor that lends the gangs of these mailboxes."""
    actor: Any = ray.remote(Pool)
    options = {"num_cpus": 0, "resources": ON_HEAD, "max_concurrency": 1000}
    pool: ActorHandle[Pool] = actor.options(**options).remote(mailboxes)
    return pool
