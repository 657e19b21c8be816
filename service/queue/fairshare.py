"""Fair shares of a cluster: which search is to have a gang where, reckoned anew from what all claim and what all have.

Values in, values out. Shares are filled one gang at a time, each for the search that has least so far, those of higher
priority before all others; of several that have the same, for the one that has received least until now. So as many
nodes change hands as have to: searches that a cluster has room for keep theirs, others take turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from service.queue.claims import Claim, Grant, Node
from service.queue.policy import Policy
from service.record.standing import Standing

START_S = 120.0
"""How long a gang that is not up may have taken for that, before its slice is taken to have begun."""
SETTLE_S = 60.0
"""How long a gang may take to come up before others no longer wait to see on which nodes it is."""


@dataclass(frozen=True)
class Share:
    """A gang that a search is to have: its workers on each node, and the grant, if it is one that it has."""

    workers: Mapping[str, int]
    grant: Grant | None = None


def shares(claims: Sequence[Claim], nodes: Sequence[Node], exclusive: bool) -> dict[str, list[Share]]:
    """The gangs that each search is to have, by its id. `exclusive`: whether a node is one search's at a time.

    Those that are to come are on nodes that nobody has as far as there are any, then on those of whom fairness leaves
    least: there, what is had longest has to go.
    """
    board = _Board(claims, nodes, exclusive)
    held = {one.search: sorted((g for g in one.grants if not g.recalled), key=lambda g: g.since) for one in claims}
    goal: dict[str, list[Share]] = {one.search: [] for one in claims}
    wanting = [one for one in claims if one.gangs]
    while wanting:
        claim = min(wanting, key=lambda one: (-one.priority, board.occupied(one), *_order(one)))
        share = None
        while share is None and held[claim.search]:
            grant = held[claim.search].pop()
            share = Share(grant.workers, grant) if board.open(claim, grant.workers) else None
        if share is None and (workers := board.place(claim)) is not None:
            share = Share(workers)
        if share is not None:
            board.take(claim, share.workers)
            goal[claim.search].append(share)
        if share is None or len(goal[claim.search]) == claim.gangs:
            wanting.remove(claim)
    return goal


def turn(search: str, claims: Sequence[Claim], nodes: Sequence[Node], policy: Policy, now: float) -> tuple[Grant, ...]:
    """The grants of one search from `now` on, in seconds since the epoch: those it has, perhaps recalled, and new ones.

    What is not to be a search's any more is recalled when somebody waits for a node of it: at once for a higher
    priority, or if it has no use for it; of the same priority after `policy.slice_s`. What a search is to have it is
    granted once Ray has the resources for it and, where nodes are exclusive, the others have left these.
    """
    goal = shares(claims, nodes, policy.exclusive)
    (me,) = (one for one in claims if one.search == search)
    kept = {share.grant.number for share in goal[search] if share.grant is not None}
    others = [one for one in claims if one.search != search]
    awaited: dict[str, list[Claim]] = {}
    for one in others:
        for node in (node for share in goal[one.search] if share.grant is None for node in share.workers):
            awaited.setdefault(node, []).append(one)
    idle = sum(not grant.recalled for grant in me.grants) - me.gangs

    grants = []
    for grant in me.grants:
        if not grant.recalled and grant.number not in kept:
            waiting = [one for node in grant.workers for one in awaited.get(node, ())]
            slice_s = policy.slice_s if grant.up else policy.slice_s + START_S
            due = idle > 0 or now - grant.since >= slice_s or any(one.priority > me.priority for one in waiting)
            if waiting and due:
                grant, idle = replace(grant, recalled=True), idle - 1
        grants.append(grant)

    now_free = _Board(claims, nodes, policy.exclusive)
    for one in claims:
        for grant in one.grants:
            now_free.take(one, grant.workers)
    moving = any(not grant.settled and now - grant.since < SETTLE_S for one in others for grant in one.grants)
    for share in goal[search]:
        if share.grant is None and not moving and now_free.has(me, share.workers):
            now_free.take(me, share.workers)
            number = 1 + max((grant.number for grant in grants), default=-1)
            grants.append(Grant(number, share.workers, now, settled=bool(others)))
    return tuple(grants)


def standings(claims: Sequence[Claim], nodes: Sequence[Node], policy: Policy, now: float) -> dict[str, Standing]:
    """Where each search stands that has no grant. A start is foretold as if each turn lasted `policy.slice_s` and each
    search as long as it says."""
    waiting = sorted(
        (one for one in claims if not one.grants and one.gangs), key=lambda one: (-one.priority, *_order(one))
    )
    board = _Board(claims, nodes, policy.exclusive)
    booked: dict[str, float] = {}
    found = {}
    for place, one in enumerate(waiting, start=1):
        free = {node: booked.get(node) or _free_at(node, one, claims, policy, now) for node in board.nodes}
        room, starts, chosen = 0, now, list[str]()
        for node, at in sorted(((node, at) for node, at in free.items() if at is not None), key=itemgetter(1)):
            if room < one.size and (here := board.room(one, node)):
                room, starts = room + here, max(starts, at)
                chosen.append(node)
        if room >= one.size:
            lasts = policy.slice_s if one.left_s is None else min(policy.slice_s, one.left_s)
            booked |= dict.fromkeys(chosen, starts + lasts)
        found[one.search] = Standing(place, len(waiting), starts if room >= one.size else None)
    return found


def occupancy(claim: Claim, nodes: Sequence[Node], exclusive: bool) -> float:
    """How many nodes a search has; of a node that it shares its part."""
    board = _Board([], nodes, exclusive)
    for grant in claim.grants:
        board.take(claim, grant.workers)
    return board.occupied(claim)


def _order(claim: Claim) -> tuple[float, float, str]:
    """Who goes first, of those who have the same."""
    return claim.received or 0.0, claim.submitted, claim.search


def _free_at(node: str, waiting: Claim, claims: Iterable[Claim], policy: Policy, now: float) -> float | None:
    """When a node may be had by who waits for it, in seconds since the epoch; None where nothing says when."""
    at = now
    for one in claims:
        end = None if one.left_s is None else now + one.left_s
        for grant in one.grants:
            if node not in grant.workers or grant.recalled or one.priority < waiting.priority:
                continue
            if one.priority == waiting.priority:
                over = grant.since + policy.slice_s
                end = over if end is None else min(end, over)
            if end is None:
                return None
            at = max(at, end)
    return at


class _Board:
    """Nodes while they are handed out: what is left of each, and whose it is."""

    def __init__(self, claims: Iterable[Claim], nodes: Iterable[Node], exclusive: bool) -> None:
        """All is there to be handed out that is free, or that `claims` have."""
        self.exclusive = exclusive
        self.nodes = {node.id: node for node in nodes}
        self.left = {node.id: dict(node.available) for node in nodes}
        self.claims = {one.search: one for one in claims}
        self.holders: dict[str, list[tuple[Claim, Grant]]] = {}
        self.owners: dict[str, set[str]] = {}
        self.parts: defaultdict[str, float] = defaultdict(float)
        for one in self.claims.values():
            for grant in one.grants:
                for node, count in grant.workers.items():
                    self.holders.setdefault(node, []).append((one, grant))
                    for name, each in one.worker.items():
                        if node in self.left:
                            self.left[node][name] = self.left[node].get(name, 0.0) + count * each
        for one_node in self.nodes.values():  # what was granted may not have been taken yet
            left = self.left[one_node.id]
            left |= {name: min(amount, one_node.total.get(name, 0.0)) for name, amount in left.items()}

    def occupied(self, claim: Claim) -> float:
        """How much a search has been handed out, in nodes."""
        if self.exclusive:
            return sum(claim.search in owners for owners in self.owners.values())
        return self.parts[claim.search]

    def room(self, claim: Claim, node: str) -> int:
        """How many workers of a search a node has room for."""
        left = self.left.get(node, {})
        return int(min(left.get(name, 0.0) / each + 1e-9 for name, each in claim.worker.items()))

    def open(self, claim: Claim, nodes: Iterable[str]) -> bool:
        """Whether a search may be on these nodes."""
        return not self.exclusive or all(self.owners.get(node, set()) <= {claim.search} for node in nodes)

    def has(self, claim: Claim, workers: Mapping[str, int]) -> bool:
        """Whether there is room for these workers now."""
        return self.open(claim, workers) and all(self.room(claim, node) >= count for node, count in workers.items())

    def take(self, claim: Claim, workers: Mapping[str, int]) -> None:
        """Hand out. Of nodes that are lost nothing is left."""
        for node, count in workers.items():
            self.owners.setdefault(node, set()).add(claim.search)
            if node in self.nodes:
                total, left = self.nodes[node].total, self.left[node]
                self.parts[claim.search] += max(
                    count * each / total[name] for name, each in claim.worker.items() if total.get(name)
                )
                for name, each in claim.worker.items():
                    left[name] = left.get(name, 0.0) - count * each

    def place(self, claim: Claim) -> dict[str, int] | None:
        """Where a gang is to be, on as few nodes as it takes; None if there is no room for it."""
        rooms = {node: room for node in self.nodes if self.open(claim, [node]) and (room := self.room(claim, node)) > 0}
        ranks = {node: self._preference(claim, node) for node in rooms}
        if fits := [node for node, room in rooms.items() if room >= claim.size]:
            return {min(fits, key=lambda node: (ranks[node], rooms[node])): claim.size}
        workers: dict[str, int] = {}
        for node in sorted(rooms, key=lambda node: (ranks[node], -rooms[node])):
            workers[node] = min(rooms[node], claim.size - sum(workers.values()))
            if sum(workers.values()) == claim.size:
                return workers
        return None

    def _preference(self, claim: Claim, node: str) -> tuple[float, ...]:
        """What makes one node better than another for a gang to come: its own, nobody's, that of who has most."""
        others = [(one, grant) for one, grant in self.holders.get(node, ()) if one.search != claim.search]
        if claim.search in self.owners.get(node, set()):
            return (0.0,)
        if not others:
            return (1.0,)
        return (
            2.0,
            max(float(one.priority) for one, _ in others),
            -float(min(len(one.nodes) for one, _ in others)),
            -min(one.received or 0.0 for one, _ in others),
            max(grant.since for _, grant in others),
        )
