"""Who has which nodes, and when: fair shares, turns, priorities, and what is foretold of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest

from service.queue.claims import Claim, Grant, Node
from service.queue.fairshare import occupancy, shares, standings, turn
from service.queue.policy import Policy

SLICE_S = 600.0
POLICY = Policy(slice_s=SLICE_S)
SHARED = replace(POLICY, exclusive=False)
GPU = {"CPU": 1.0, "GPU": 1.0}


def claim(search: str, size: int = 8, gangs: int = 1, priority: int = 0, submitted: float = 0.0) -> Claim:
    return Claim(search, priority, submitted, GPU, size, gangs, received=0.0)


def having(one: Claim, *nodes: str, since: float = 0.0, left_s: float | None = None) -> Claim:
    """With a gang on each of these nodes."""
    return replace(
        one, grants=tuple(Grant(i, {n: one.size}, since, up=True) for i, n in enumerate(nodes)), left_s=left_s
    )


class Machine:
    """A Ray cluster and its queue, without either: the searches check in one after the other, every `STEP_S`."""

    STEP_S = 10.0

    def __init__(self, claims: Sequence[Claim], nodes: int = 3, gpus: int = 8, policy: Policy = POLICY) -> None:
        self.total = {f"n{i}": {"CPU": 64.0, "GPU": float(gpus)} for i in range(nodes)}
        self.claims = {one.search: one for one in claims}
        self.policy, self.now = policy, 0.0
        self.had: defaultdict[str, float] = defaultdict(float)
        self.changes = 0

    @property
    def nodes(self) -> list[Node]:
        left = {node: dict(total) for node, total in self.total.items()}
        for one in self.claims.values():
            for grant in one.grants:
                for node, count in grant.workers.items():
                    left[node]["GPU"] -= count
                    left[node]["CPU"] -= count
        assert all(amount >= 0 for free in left.values() for amount in free.values()), "more than there is"
        return [Node(node, total, left[node]) for node, total in self.total.items()]

    def step(self) -> None:
        """What is granted is up, and what is recalled is given back, at once."""
        for search in list(self.claims):
            one = self.claims[search]
            grants = turn(search, list(self.claims.values()), self.nodes, self.policy, self.now)
            self.changes += sum(grant.number not in {g.number for g in one.grants} for grant in grants)
            kept = tuple(replace(grant, up=True) for grant in grants if not grant.recalled)
            self.claims[search] = replace(one, grants=kept)
        if self.policy.exclusive:
            owners = [node for one in self.claims.values() for node in one.nodes]
            assert len(owners) == len(set(owners)), "a node is one search's at a time"
        for search, one in self.claims.items():
            has = occupancy(one, self.nodes, self.policy.exclusive)
            self.had[search] += has * self.STEP_S
            self.claims[search] = replace(one, received=(one.received or 0.0) + has * self.STEP_S)
        self.now += self.STEP_S

    def run(self, seconds: float) -> Machine:
        for _ in range(round(seconds / self.STEP_S)):
            self.step()
        return self

    def nodes_of(self, search: str) -> frozenset[str]:
        return self.claims[search].nodes


def test_a_search_alone_has_all_that_it_wants_and_keeps_it() -> None:
    machine = Machine([claim("a", gangs=3)]).run(10 * SLICE_S)
    assert machine.nodes_of("a") == {"n0", "n1", "n2"}
    assert machine.changes == 3
    assert standings(list(machine.claims.values()), machine.nodes, POLICY, machine.now) == {}


def test_searches_that_fit_side_by_side_never_disturb_each_other() -> None:
    machine = Machine([claim("a"), claim("b", size=16)]).run(10 * SLICE_S)
    assert (len(machine.nodes_of("a")), len(machine.nodes_of("b"))) == (1, 2)
    assert machine.changes == 2


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("searches", [2, 3, 4])
def test_searches_that_all_want_everything_come_to_have_the_same(nodes: int, searches: int) -> None:
    length_s = 24 * SLICE_S
    machine = Machine([claim(f"s{i}", gangs=nodes) for i in range(searches)], nodes).run(length_s)
    each = nodes * length_s / searches
    assert sum(machine.had.values()) == pytest.approx(nodes * length_s, rel=0.02), "no node idles"
    assert all(had == pytest.approx(each, abs=2 * SLICE_S) for had in machine.had.values()), machine.had
    assert machine.changes <= nodes * length_s / SLICE_S + nodes, "at most one change a node and slice"


def test_large_gangs_have_their_turns_beside_small_ones() -> None:
    machine = Machine([claim("small", gangs=3), claim("large", size=24)]).run(24 * SLICE_S)
    assert machine.had["large"] == pytest.approx(machine.had["small"], rel=0.25)


def test_a_gang_is_recalled_when_its_slice_is_over_and_somebody_waits() -> None:
    a, b = having(claim("a", gangs=3), "n0", "n1", "n2", since=0.0), claim("b", gangs=3, submitted=1.0)
    machine = Machine([replace(a, received=10.0), replace(b, received=9.0)])
    claims = list(machine.claims.values())
    assert not any(grant.recalled for grant in turn("a", claims, machine.nodes, POLICY, SLICE_S - 1))
    recalled = [grant.recalled for grant in turn("a", claims, machine.nodes, POLICY, SLICE_S)]
    assert sum(recalled) == 2, "b, which has received less, is to have two of three"
    assert turn("b", claims, machine.nodes, POLICY, SLICE_S) == (), "not before they are free"


def test_a_gang_has_its_slice_however_long_it_takes_to_start() -> None:
    a = having(claim("a"), "n0")
    starting = replace(a, grants=tuple(replace(grant, up=False) for grant in a.grants), received=1.0)
    nodes = Machine([a], nodes=1).nodes
    for now, recalled in ((SLICE_S, False), (SLICE_S + 120, True)):
        (grant,) = turn("a", [starting, claim("b")], nodes, POLICY, now)
        assert grant.recalled is recalled


def test_what_a_search_has_no_use_for_goes_at_once_but_only_where_somebody_waits() -> None:
    a = replace(having(claim("a", gangs=3), "n0", "n1", "n2"), gangs=1)
    machine = Machine([a])
    assert not any(grant.recalled for grant in turn("a", [a], machine.nodes, POLICY, 1.0))
    waits = [a, claim("b")]
    assert sum(grant.recalled for grant in turn("a", waits, machine.nodes, POLICY, 1.0)) == 1


def test_higher_priority_comes_first_and_does_not_wait_for_a_slice() -> None:
    low, high = having(claim("low", gangs=3), "n0", "n1", "n2"), claim("high", gangs=2, priority=5, submitted=9.0)
    machine = Machine([low, high])
    claims = list(machine.claims.values())
    assert sum(grant.recalled for grant in turn("low", claims, machine.nodes, POLICY, 1.0)) == 2
    machine.run(20 * SLICE_S)
    assert (len(machine.nodes_of("high")), len(machine.nodes_of("low"))) == (2, 1)
    assert machine.changes == 2, "it keeps them"


def test_a_node_is_shared_where_the_operator_lets_it() -> None:
    machine = Machine([claim("a", size=4), claim("b", size=4)], nodes=1, policy=SHARED).run(SLICE_S)
    assert machine.nodes_of("a") == machine.nodes_of("b") == {"n0"}
    assert machine.had["a"] == machine.had["b"] == SLICE_S / 2, "of half a node"
    assert len(Machine([claim("a", size=4), claim("b", size=4)], nodes=1).run(SLICE_S / 2).nodes_of("b")) == 0


def test_gangs_of_one_search_share_a_node_and_leave_it_together() -> None:
    machine = Machine([claim("a", size=2, gangs=4), claim("b")], nodes=1)
    machine.run(SLICE_S / 2)
    assert [len(one.grants) for one in machine.claims.values()] == [4, 0]
    machine.run(SLICE_S)
    assert [len(one.grants) for one in machine.claims.values()] == [0, 1]


def test_what_others_than_searches_hold_is_left_to_them() -> None:
    nodes = Machine([]).nodes
    nodes[0] = replace(nodes[0], available={"CPU": 60.0, "GPU": 4.0})
    assert [share.workers for share in shares([claim("a", gangs=3)], nodes, True)["a"]] == [{"n1": 8}, {"n2": 8}]
    assert shares([claim("a", size=25)], nodes, True)["a"] == []


def test_a_gang_takes_as_few_nodes_as_it_needs_those_that_nobody_has_first() -> None:
    nodes = Machine([], nodes=4).nodes
    claims = [having(claim("a"), "n0"), claim("b", size=12)]
    (share,) = shares(claims, nodes, True)["b"]
    assert sum(share.workers.values()) == 12
    assert len(share.workers) == 2
    assert "n0" not in share.workers


def test_nothing_is_granted_while_it_is_not_known_where_a_gang_of_another_comes_up() -> None:
    first = Machine([claim("a")])
    (grant,) = turn("a", list(first.claims.values()), first.nodes, POLICY, 0.0)
    assert not grant.settled, "nobody else was there to be avoided"
    claims = [replace(claim("a"), grants=(grant,)), claim("b")]
    assert turn("b", claims, first.nodes, POLICY, 30.0) == ()
    settled = [replace(claim("a"), grants=(replace(grant, settled=True),)), claim("b")]
    (other,) = turn("b", settled, first.nodes, POLICY, 30.0)
    assert other.settled
    assert not set(other.workers) & set(grant.workers)
    assert len(turn("b", claims, first.nodes, POLICY, 61.0)) == 1, "one that never comes up is not waited for"


def test_a_node_that_is_lost_is_no_reason_to_give_up_the_rest() -> None:
    a = having(claim("a", gangs=2), "n0", "gone")
    machine = Machine([a], nodes=1)
    assert turn("a", [a], Machine([], nodes=1).nodes, POLICY, 5.0) == a.grants
    assert machine.policy.exclusive


def test_the_queue_says_in_which_order_and_when() -> None:
    now = 100.0
    a = having(claim("a", gangs=2), "n0", "n1", since=now, left_s=9000.0)
    short = having(claim("short"), "n2", since=now, left_s=120.0)
    low = claim("low", priority=-1)
    waiting = [claim("b", submitted=2.0), claim("c", submitted=1.0), low]
    told = standings([a, short, *waiting], Machine([]).nodes, POLICY, now)
    assert {search: one.place for search, one in told.items()} == {"c": 1, "b": 2, "low": 3}
    assert {one.of for one in told.values()} == {3}
    assert told["c"].starts == now + 120, "when the short one has ended"
    assert told["b"].starts == now + SLICE_S
    assert told["low"].starts == now + 120 + SLICE_S, "after c, which has its turn for a slice"
    assert standings([claim("vast", size=99)], Machine([]).nodes, POLICY, now)["vast"].starts is None
    held = having(claim("held"), "n0", since=now)
    assert standings([held, replace(low, priority=-2)], Machine([], nodes=1).nodes, POLICY, now)["low"].starts is None
