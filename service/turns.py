"""A search's part in the queue of its cluster: its gangs come when it is its turn, and go when it is that of others."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from service.problem import Problem
from service.queue.actor import ANSWER_S, Member, Queue
from service.queue.admission import policy_for
from service.queue.claims import Claim, Grant, Turn
from service.record.standing import Standing
from service.remote import call
from service.step import Wish
from service.trials.accelerators import resources_per_worker
from service.trials.bench import Bench
from service.trials.gang import CLOSE_TIMEOUT_S, Gang, close_gangs
from service.trials.pool import RETRY_S, Lease, Pool, start_pool
from telemetry.actor import Fleet, start_telemetry, stop_telemetry

CHECK_IN_S = 2.0


@dataclass
class _Held:
    """A gang under its grant. `dismissed`: when its closing began, in seconds of `time.monotonic`, None before."""

    grant: Grant
    gang: Gang
    dismissed: float | None = None


class Turns:
    """Keeps the gangs of a search as its turns come and go, by a thread of the driver that checks in with the queue.

    A gang that others wait for is lent to no more trials; when those under way are over, it is closed. While nothing
    answers, the search goes on with what it has.
    """

    def __init__(
        self, claim: Claim, queue: Member, start: Callable[[str, Collection[str]], Gang], say: Callable[[str], None]
    ) -> None:
        """`claim`: what the search wants of `queue`. `start` starts a gang of this name that keeps off these nodes, by
        Ray's ids. `say` tells the person who waits."""
        self._claim, self._queue, self._start, self._say = claim, queue, start, say
        self._needs: tuple[int, float | None] = claim.gangs, None
        self._received: float | None = None
        self._started = 0
        self._held: dict[int, _Held] = {}
        self._beside: frozenset[str] = frozenset()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.standing: Standing | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What Tune keeps on disk of it: nothing, as a search that is resumed begins its turns anew."""
        return {}

    @property
    def waiting(self) -> bool:
        """Whether it is the turn of others: no gang is up that is to stay, nor has been under its grant.

        Raises what ended the thread, if anything did.
        """
        if self._failure is not None:
            raise self._failure
        return not any(held.grant.up and not held.grant.recalled for held in list(self._held.values()))

    def begin(self, pool: ActorHandle[Pool]) -> None:
        """Check in, from now on every few seconds, and have `pool` lend from the gangs."""
        self._thread = threading.Thread(target=self._keep, args=(pool,), name="turns", daemon=True)
        self._thread.start()

    def foresee(self, trials: int, left_s: float | None) -> None:
        """Say how many trials are to come at most, and how long they may take: there is no use for more gangs."""
        self._needs = max(1, min(self._claim.gangs, trials)), left_s

    @contextlib.contextmanager
    def bench(self, problem: Problem, pool: ActorHandle[Pool], telemetry: Fleet) -> Iterator[Bench]:
        """What the workers of a gang that `pool` lends from measure on, alone there until the end, for `problem`.

        Waits until it is the turn of the search and they are free.
        """
        trial_id = "alone"

        def leased() -> Lease | None:
            ray.get(call(pool, Pool.lend, trial_id, [Wish(self._claim.size, alone=True)]))
            return ray.get(call(pool, Pool.lease, trial_id))

        while self.waiting or (lease := leased()) is None:
            time.sleep(RETRY_S)
        try:
            yield Bench(problem, lease.mailbox, telemetry, {}, workers=lease.workers)
        finally:
            ray.get(call(pool, Pool.release, trial_id))

    def end(self) -> None:
        """Close the gangs and give everything back."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        close_gangs([held.gang for held in self._held.values()])
        with contextlib.suppress(RayError):
            self._queue.ask(Queue.check_out, self._claim.search)

    def _keep(self, pool: ActorHandle[Pool]) -> None:
        try:
            while not self._over.is_set():
                with contextlib.suppress(RayError):  # it does not answer: the search goes on with what it has
                    self._take(self._check_in())
                with contextlib.suppress(RayError):  # it is being started anew
                    self._serve(pool)
                self._over.wait(CHECK_IN_S)
        except Exception as error:
            self._failure = error

    def _serve(self, pool: ActorHandle[Pool]) -> None:
        """Have the pool lend from what is to stay, dismiss what it makes no use of any more, and see where all is."""
        lending = [held.gang.address for held in self._held.values() if not held.grant.recalled]
        up = ray.get(call(pool, Pool.serve, lending, self._beside), timeout=ANSWER_S)
        for number, held in list(self._held.items()):
            if (nodes := up.get(held.gang.address)) is not None:
                held.grant = replace(held.grant, workers=dict(Counter(nodes)), up=True, settled=True)
            elif held.grant.recalled and held.dismissed is None:
                held.gang.dismiss()
                held.dismissed = time.monotonic()
            if held.dismissed is not None and self._is_gone(held.gang, held.dismissed):
                del self._held[number]

    def _is_gone(self, gang: Gang, dismissed: float) -> bool:
        """Whether a gang has given back what it had. Of one that does not, its own workers see to it later."""
        if not gang.ended and time.monotonic() < dismissed + CLOSE_TIMEOUT_S:
            return False
        if gang.ended:
            ray.kill(gang.mailbox)
        return True

    def _check_in(self) -> Turn:
        grants, (gangs, left_s) = tuple(held.grant for held in self._held.values()), self._needs
        claim = replace(self._claim, gangs=gangs, grants=grants, left_s=left_s, received=self._received)
        return self._queue.ask(Queue.check_in, claim)

    def _take(self, turn: Turn) -> None:
        """Start the gangs that were granted, and note what has become of the others' grants."""
        self._received, self._beside = turn.received, turn.beside
        for grant in turn.grants:
            if grant.number not in self._held:
                name = f"{self._claim.search}-{self._started}"
                self._started += 1
                self._held[grant.number] = _Held(grant, self._start(name, turn.nodes - set(grant.workers)))
                continue
            held = self._held[grant.number]
            if grant.recalled and not held.grant.recalled:
                self._say("others wait: a gang is given back after the trials under way")
            held.grant = grant
        before, self.standing = self.standing, turn.standing
        if turn.nodes and self.standing is not None and (before is None or before.place != self.standing.place):
            self._say(f"queued: {self.standing.told}")


@contextlib.contextmanager
def bench_in_turn(name: str, problem: Problem, size: int, preload: Sequence[str], queue: Member) -> Iterator[Bench]:
    """A gang of `size` workers, all of them for one trial, once it is their turn on the Ray that is at hand.

    `queue` knows it by `name` as a search. `preload`: modules that its programs need. Raises `InputError` for data that
    the cluster does not allow.
    """
    cluster = problem.cluster
    places = policy_for(queue, problem.data).data
    claim = Claim(name, problem.priority, time.time(), resources_per_worker(cluster), size, gangs=1)
    telemetry, pool = start_telemetry(name), start_pool()
    with tempfile.TemporaryDirectory() as storage:

        def start(gang: str, avoid: Collection[str]) -> Gang:
            return Gang(gang, size, cluster, Path(storage), telemetry, preload, avoid, problem.data, places)

        turns = Turns(claim, queue, start, partial(print, file=sys.stderr, flush=True))
        turns.begin(pool)
        try:
            with turns.bench(problem, pool, telemetry) as bench:
                yield bench
        finally:
            turns.end()
            stop_telemetry(telemetry)
