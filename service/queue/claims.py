"""What searches and the queue of their cluster tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.record.standing import Standing


@dataclass(frozen=True)
class Grant:
    """Leave for a search to have one gang, known to both sides by a `number` among the search's.

    `workers`: how many of the gang's are, or are to be, on each node. `since` is in seconds since the epoch by the
    queue's clock: when it was granted or, once it is `up`, when it first was. One that is `recalled` is to be given
    back as soon as no trial is under way on it. One that is `settled` has its workers on just these nodes; else they
    may come to be on others.
    """

    number: int
    workers: Mapping[str, int]
    since: float
    up: bool = False
    recalled: bool = False
    settled: bool = True


@dataclass(frozen=True)
class Claim:
    """What a search says each time that it checks in: all that the queue knows of it.

    `submitted` is in seconds since the epoch. `worker`: what Ray reserves for a worker. `size` is that of a gang, in
    workers, and `gangs` how many it has use for at present. `left_s`: how long it still takes with what it has, None
    where nobody knows. `received` is what it got so far, in node-seconds: as the queue said last, None before it did.
    """

    search: str
    priority: int
    submitted: float
    worker: Mapping[str, float]
    size: int
    gangs: int
    grants: tuple[Grant, ...] = ()
    left_s: float | None = None
    received: float | None = None

    @property
    def nodes(self) -> frozenset[str]:
        """Those of its grants."""
        return frozenset(node for grant in self.grants for node in grant.workers)


@dataclass(frozen=True)
class Node:
    """A node of the Ray cluster that is alive: what it has by Ray's names of resources, and what of that is free."""

    id: str
    total: Mapping[str, float]
    available: Mapping[str, float]


@dataclass(frozen=True)
class Turn:
    """The queue's answer. `standing` is None for a search that has a grant.

    `nodes` are all that there are, for gangs to keep to those granted; none where no other search is about.
    `beside`: the nodes on which other searches have a gang.
    """

    grants: tuple[Grant, ...]
    received: float
    standing: Standing | None
    nodes: frozenset[str]
    beside: frozenset[str]
