"""Which workers a trial gets."""

from __future__ import annotations

import pytest

from service.trials.placing import placed
from trainables.mailbox import Member


def gang(*nodes: int) -> list[Member]:
    """A gang with so many workers on each node, whose devices are numbered against the order of their ranks."""
    members: list[Member] = []
    for node, size in enumerate(nodes):
        start = len(members)
        numbers = [str(size - 1 - i) for i in range(size)]
        members += [
            Member(start + i, f"node{node}", "host", 1, f"GPU-{number}", number) for i, number in enumerate(numbers)
        ]
    return members


@pytest.mark.parametrize(
    ("size", "taken", "group"),
    [
        (1, [], (7,)),
        (2, [], (7, 6)),
        (1, [7], (6,)),
        (1, [7, 6], (5,)),
        (2, [7], (5, 4)),
        (2, [7, 6], (5, 4)),
        (2, [7, 3], (5, 4)),
        (4, [7], (3, 2, 1, 0)),
        (4, [7, 0], None),
        (8, [], (7, 6, 5, 4, 3, 2, 1, 0)),
        (3, [], (7, 6, 5)),
        (3, [7], (4, 3, 2)),
        (9, [], None),
    ],
)
def test_neighbours_on_one_node_by_their_devices(size: int, taken: list[int], group: tuple[int, ...] | None) -> None:
    assert placed(size, set(range(8)) - set(taken), gang(8)) == group


@pytest.mark.parametrize(
    ("size", "taken", "nodes"),
    [
        (4, [], {0}),
        (4, [3], {1}),
        (4, [3, 5], {2}),
        (4, [3, 5, 8], None),
        (2, [3], {0}),
        (8, [], {0, 1}),
        (8, [0], {1, 2}),
        (8, [0, 4], None),
        (6, [0, 1], {1, 2}),
        (6, [0, 1, 4, 5], {2, 0}),
        (12, [], {0, 1, 2}),
    ],
)
def test_as_few_nodes_as_can_be(size: int, taken: list[int], nodes: set[int] | None) -> None:
    members = gang(4, 4, 4)
    group = placed(size, set(range(12)) - set(taken), members)
    if nodes is None:
        assert group is None
    else:
        assert group is not None
        assert len(set(group)) == size
        assert {members[rank].node_id for rank in group} == {f"node{node}" for node in nodes}


def test_where_no_node_has_as_many_the_fewest_are_taken() -> None:
    assert placed(2, {0, 1}, gang(1, 1)) == (0, 1)
    assert placed(2, {0}, gang(1, 1)) is None


def test_ten_devices_are_in_the_order_of_their_numbers() -> None:
    members = [Member(rank, "node", "host", 1, f"GPU-{rank}", str(rank)) for rank in range(12)]
    assert placed(8, set(range(12)), members) == tuple(range(8))
    assert placed(4, set(range(12)), members) == (8, 9, 10, 11), "which no group of eight could have"
