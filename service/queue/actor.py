"""The queue of a cluster: an actor with which its searches check in, and which says whose turn it is.

It knows what they tell it, again with each check-in, and nothing else. So it is nobody's in particular: it dies with
the search that started it, the others start another, and that knows as much as soon as they have checked in there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from service.errors import InputError
from service.queue.claims import Claim, Grant, Node, Turn
from service.queue.fairshare import occupancy, standings, turn
from service.queue.policy import Policy, read_policy
from service.remote import ON_HEAD, call
from telemetry import actor as telemetry
from trainables.bounds import refusal

NAME, NAMESPACE = "queue", "wattune"
LOST_S = 30.0
"""After so long without a word a search is taken for dead, and what it had for free."""
GATHER_S = 10.0
"""How long a queue that has just begun waits for the searches that there are to check in, before it grants anything."""

ANSWER_S = 10.0
TRIES, RETRY_S = 3, 0.5
"""How often the queue is asked, and after how long again, while one takes the place of another."""

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")


class Queue:
    """Whose turn it is, of the searches that check in. An actor; its methods run one by one."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._policy = Policy()
        self._claims: dict[str, Claim] = {}
        self._seen: dict[str, float] = {}

    def policy(self, data: str | None = None) -> Policy | str:
        """The operator's policy as its file is now, which holds from now on; or what is wrong with the file, or with
        the place of the data of who asks, as this node finds it."""
        try:
            self._policy = read_policy()
        except InputError as error:
            return str(error)
        return refusal(data, self._policy.data) or self._policy

    def check_in(self, claim: Claim) -> Turn:
        """Take what a search says, and tell it what it has. To be called every few seconds: see `LOST_S`."""
        now, nodes = time.time(), _nodes()
        for search in [search for search, seen in self._seen.items() if now - seen > LOST_S]:
            self.check_out(search)
        exclusive = self._policy.exclusive
        if (known := self._claims.get(claim.search)) is not None:
            lasted = now - self._seen[claim.search]
            claim = replace(
                claim,
                received=(known.received or 0.0) + lasted * occupancy(known, nodes, exclusive),
                grants=_timed(claim, known, now),
            )
        elif claim.received is None:  # who comes anew has not missed what was before
            claim = replace(claim, received=min((one.received or 0.0 for one in self._claims.values()), default=0.0))
        self._claims[claim.search], self._seen[claim.search] = claim, now
        if not self._gathering():
            grants = turn(claim.search, list(self._claims.values()), nodes, self._policy, now)
            self._claims[claim.search] = claim = replace(claim, grants=grants)
        claims = list(self._claims.values())
        others = [one for one in claims if one.search != claim.search]
        return Turn(
            grants=claim.grants,
            received=claim.received or 0.0,
            standing=standings(claims, nodes, self._policy, now).get(claim.search),
            nodes=frozenset(node.id for node in nodes) if others else frozenset(),
            beside=frozenset().union(*(one.nodes for one in others)),
        )

    def check_out(self, search: str) -> None:
        """Forget a search, which has given everything back."""
        self._claims.pop(search, None)
        self._seen.pop(search, None)

    def _gathering(self) -> bool:
        """Whether a search is about that has not checked in since this queue began: one that has telemetry."""
        if time.monotonic() - self._began > GATHER_S:
            return False
        named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
        about = {one["name"].rpartition(":")[0] for one in named if one["namespace"] == telemetry.NAMESPACE}
        return bool(about - set(self._claims))


class Member:
    """A process's way to the queue of its cluster, which it has started if there is none, without waiting for it.

    It holds the actor, which Ray ends once its owner does not.
    """

    def __init__(self) -> None:
        self._actor: ActorHandle[Queue] | None = _queue()

    def ask(
        self,
        method: Callable[Concatenate[Queue, Arguments], Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        """What the queue answers; of one whose owner has ended, another in its place.

        Raises `RayError` if there is no answer within `ANSWER_S`, or no queue.
        """
        for left in reversed(range(TRIES)):
            try:
                self._actor = self._actor or _queue()
                return ray.get(call(self._actor, method, *arguments, **named), timeout=ANSWER_S)
            except RayActorError:
                self._actor = None
                if not left:
                    raise
            time.sleep(RETRY_S)
        raise AssertionError("it has answered or raised")


def _timed(claim: Claim, known: Claim, now: float) -> tuple[Grant, ...]:
    """The grants of a claim, with those of which a gang has come up since what is `known` counted from now."""
    starting = {grant.number for grant in known.grants if not grant.up}
    return tuple(
        replace(grant, since=now) if grant.up and grant.number in starting else grant for grant in claim.grants
    )


def _queue() -> ActorHandle[Queue]:
    """The cluster's queue, started if there is none at present."""
    actor: Any = ray.remote(Queue)
    options = {"num_cpus": 0, "resources": ON_HEAD, "max_restarts": -1}
    found: ActorHandle[Queue] = actor.options(name=NAME, namespace=NAMESPACE, get_if_exists=True, **options).remote()
    return found


def _nodes() -> list[Node]:
    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    alive: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    return [Node(node["NodeID"], node["Resources"], free.get(node["NodeID"], {})) for node in alive]
