"""torch's caching allocator, by sizes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks import DATA
from benchmarks.measure.blind import read
from search_spaces.replay.allocator import Allocator, Piece

MIB = 2**20


def test_segments_are_of_three_kinds() -> None:
    for size, reserved in (
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (33 * MIB, 34 * MIB),
    ):
        allocator = Allocator()
        allocator.take(size)
        assert allocator.reserved == reserved


def test_the_smallest_piece_that_is_large_enough_is_taken() -> None:
    allocator = Allocator()
    pieces = [allocator.take(size * MIB) for size in (100, 40, 60)]
    allocator.give_back(pieces[0])
    allocator.give_back(pieces[2])
    allocator.take(50 * MIB)
    allocator.take(100 * MIB)
    assert allocator.reserved == 200 * MIB


def test_what_lies_in_the_place_of_a_large_tensor_costs_another_of_its_size() -> None:
    allocator = Allocator()
    large = allocator.take(800 * MIB)
    allocator.give_back(large)
    kept = allocator.take(32 * MIB)
    again = allocator.take(800 * MIB)
    assert allocator.reserved == 1600 * MIB
    allocator.give_back(kept)
    allocator.give_back(again)
    for _ in range(2):
        allocator.take(800 * MIB)
    assert allocator.reserved == 1600 * MIB


def test_streams_share_nothing() -> None:
    allocator = Allocator()
    allocator.give_back(allocator.take(100 * MIB))
    allocator.take(100 * MIB, stream=1)
    assert allocator.reserved == 200 * MIB


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 3)), min_size=1, max_size=40))
def test_what_is_given_back_becomes_whole_again(requests: list[tuple[int, int]]) -> None:
    """In whatever order: the largest of all fits in again."""
    allocator = Allocator()
    held = [(order, allocator.take(size)) for size, order in requests]
    assert 0 < allocator.used == allocator.most <= allocator.reserved
    for _, piece in sorted(held, key=lambda pair: pair[0]):
        allocator.give_back(piece)
    assert allocator.used == 0
    reserved = allocator.reserved
    allocator.take(max(size for size, _ in requests))
    assert allocator.reserved == reserved


def test_segments_of_which_nothing_is_in_use_can_be_given_back() -> None:
    allocator = Allocator()
    pieces = [allocator.take(100 * MIB) for _ in range(2)]
    allocator.give_back(pieces[0])
    part = allocator.take(40 * MIB)
    allocator.give_back(pieces[1])
    allocator.empty()
    assert allocator.reserved == 100 * MIB
    allocator.take(60 * MIB)
    assert allocator.reserved == 100 * MIB
    allocator.give_back(part)
    allocator.empty()
    assert allocator.reserved == 100 * MIB


def reserved(rank: dict[str, Any]) -> int:
    """Bytes at most, by the requests in a rank's record. One of the engines empties torch's cache before it makes the
    moments."""
    events, places = rank["events"], rank["places"]
    late = {one[0] for one in events if one[1:] == ["late"]}
    allocator, held, most, is_new = Allocator(), dict[int, Piece](), 0, True
    for number, one in enumerate(events):
        if len(one) == 3:
            if is_new and "_make_moments" in places[one[2]]:
                allocator.empty()
                is_new = False
            held[number] = allocator.take(one[0], one[1])
        elif one[1:] == ["late"] or (len(one) == 1 and one[0] not in late):
            allocator.give_back(held.pop(one[0]))
        most = max(most, allocator.reserved)
    return most


def test_what_was_asked_for_on_gpus_is_reserved_as_it_was_there() -> None:
    """To the byte, by 41 of 44 ranks of two engines; two others begin again among older segments."""
    off = [
        reserved(rank) - rank["reserved"]
        for name in ("allocations_2xh200", "allocations2_2xh200")
        for row in read(DATA / f"{name}.jsonl.xz")
        for rank in row["ranks"]
    ]
    assert sorted(off) == [0] * 41 + [2 * MIB] + [64 * MIB] * 2
