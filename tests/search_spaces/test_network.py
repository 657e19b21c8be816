"""The network: examples by hand, what NCCL would choose, and what must hold for all."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from search_spaces.network import (
    BESIDE,
    GATHERING,
    GATHERS,
    OVERHEAD_S,
    PROTOCOLS,
    REDUCING,
    Collective,
    Curve,
    Group,
    Network,
)

NET = Network("an example", 8, 200e9, 50e9, 5e-6, 10e-6)
START = 2 * GATHERING[-1].start_s - REDUCING[-1].start_s
SIMPLE = PROTOCOLS[-1]
KINDS = st.sampled_from(list(Collective))
SIZES = st.integers(1, 2**36)
NODES = st.integers(1, 128)
TOGETHER = st.sampled_from([1, 2, 4, 8])
NETWORKS = st.builds(
    Network,
    source=st.just("drawn"),
    gpus_per_node=st.just(8),
    link_bytes_per_s=st.floats(1e9, 1e12),
    network_bytes_per_s=st.floats(1e8, 1e11),
    link_latency_s=st.floats(1e-7, 1e-4),
    network_latency_s=st.floats(1e-7, 1e-3),
    gpus_per_switch=st.sampled_from([None, 8, 32]),
    oversubscription=st.floats(1, 8),
)


def ranks_of(nodes: int, together: int) -> list[int]:
    """So many neighbours on each of so many nodes."""
    return [8 * node + gpu for node in range(nodes) for gpu in range(together)]


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        # Thakur et al. 2005: (n - 1) / n of the buffer goes through each GPU, twice to reduce and gather.
        (Collective.ALL_GATHER, range(8), 7 / 8 / 180e9),
        (Collective.REDUCE_SCATTER, range(8), 7 / 8 / 180e9),
        (Collective.REDUCE_SCATTER, range(2), 1 / 2 / 144e9),
        (Collective.ALL_REDUCE, range(2), 1 / 176e9),
        (Collective.ALL_REDUCE, range(8), 7 / 4 / 200e9),
        (Collective.BROADCAST, range(8), 1 / 200e9),
        (Collective.SEND, (0, 5), 1 / 210e9),
        (Collective.ALL_TO_ALL, range(8), 7 / 8 / 180e9),
        # Eight adapters of a node together are faster than a GPU's links, two are not, and one is slowest.
        (Collective.ALL_GATHER, range(16), 15 / 16 / 180e9),
        (Collective.ALL_GATHER, (0, 1, 8, 9), 3 / 4 / 100e9),
        (Collective.ALL_GATHER, (0, 8), 1 / 2 / 50e9),
        (Collective.ALL_GATHER, (0, 1, 2, 8), 3 / 4 / 50e9),
        (Collective.SEND, (0, 8), 1 / 50e9),
        # Half of what each sends goes to the other node, by its own adapter.
        (Collective.ALL_TO_ALL, range(16), 1 / 2 / 50e9),
    ],
)
def test_large_messages_take_their_bytes_by_the_bandwidth(
    kind: Collective, ranks: Sequence[int], expected: float
) -> None:
    assert NET.seconds(kind, 2**40, ranks) == pytest.approx(expected * 2**40, rel=1e-3)


def test_links_are_slower_beside_computation_and_adapters_are_not() -> None:
    within, between = (
        NET.seconds(Collective.ALL_GATHER, 2**40, ranks, beside=True) / NET.seconds(Collective.ALL_GATHER, 2**40, ranks)
        for ranks in (range(8), (0, 8))
    )
    assert within == pytest.approx(BESIDE, rel=1e-3)
    assert between == 1.0


def test_small_messages_take_the_hops() -> None:
    """Of the protocol for small ones: seven of a ring of eight; between nodes a tree, up and down."""
    low, near = PROTOCOLS[0], GATHERING[0]
    assert NET.seconds(Collective.ALL_GATHER, 8, range(8)) == pytest.approx(
        near.start_s + 7 * near.hop * 5e-6, rel=1e-3
    )
    across = NET.seconds(Collective.ALL_REDUCE, 8, ranks_of(64, 1))
    assert across == pytest.approx(low.start_s + 2 * 6 * low.hop * 10e-6, rel=1e-3)
    assert NET.seconds(Collective.BARRIER, 2**40, range(8)) == NET.seconds(Collective.ALL_REDUCE, 4, range(8))


def test_broadcasts_wait_for_the_hops_of_the_protocol_that_nccl_takes() -> None:
    """It counts a single hop of them, and so takes the protocol with the full bandwidth for sizes at which another is
    faster around a long ring."""
    ring = ranks_of(128, 8)
    hops, moving = 896 * OVERHEAD_S + 127 * 10e-6, 2**25 / 200e9
    seconds = NET.seconds(Collective.BROADCAST, 2**25, ring)
    assert seconds == pytest.approx(SIMPLE.start_s + hops + moving, rel=1e-6)
    assert seconds > 2 * NET.seconds(Collective.ALL_GATHER, 2**25, ring)


def test_hops_of_rings_over_several_nodes_take_what_a_host_needs_to_hand_over_a_message() -> None:
    """Within the nodes, too, unless these are slower anyhow."""
    quick, slow = (replace(NET, link_latency_s=seconds) for seconds in (1e-6, 10e-6))
    size, low, near = 64, PROTOCOLS[0], GATHERING[0]
    for net, across in ((quick, OVERHEAD_S), (slow, 10e-6)):
        within, over = (net.seconds(Collective.ALL_GATHER, size, ranks) for ranks in (range(8), range(16)))
        assert within == pytest.approx(near.start_s + 7 * near.hop * net.link_latency_s, rel=0.01)
        assert over == pytest.approx(low.start_s + low.hop * (14 * across + 10e-6), rel=0.01)


def test_rings_have_a_share_of_the_links() -> None:
    """All of it within a node and with enough adapters, else that of the adapters."""
    shares = [NET.share(NET.group(ranks)) for ranks in (range(8), range(16), (0, 1, 8, 9), (0, 8))]
    assert shares == pytest.approx([1.0, 1.0, 0.5, 0.25])


def test_trees_reduce_small_buffers_of_many_nodes_and_rings_large_ones() -> None:
    ranks, few = ranks_of(128, 8), 128 * 8 - 128
    rings = 2 * (few * NET.link_latency_s + 127 * NET.network_latency_s)
    assert NET.seconds(Collective.ALL_REDUCE, 2**20, ranks) < rings / 10
    gather = NET.seconds(Collective.ALL_GATHER, 2**40, ranks)
    assert NET.seconds(Collective.ALL_REDUCE, 2**40, ranks) == pytest.approx(2 * 0.9 * gather, rel=1e-3)


def test_one_rank_needs_nobody() -> None:
    assert {NET.seconds(kind, 2**30, (3,)) for kind in Collective} == {0.0}


def test_rank_order_decides_who_shares_a_node() -> None:
    spread = replace(NET, rank_order=(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15))
    assert NET.group((0, 1)) == Group(2, 1, 2, 2)
    assert spread.group((0, 1)) == Group(2, 2, 1, 2)
    assert spread.group((0, 2, 4)) == Group(3, 1, 3, 3)
    assert spread.seconds(Collective.SEND, 2**30, (0, 1)) > NET.seconds(Collective.SEND, 2**30, (0, 1))


def test_an_oversubscribed_network_is_slow_above_its_switches() -> None:
    """Four nodes below a switch share a quarter of their adapters' bandwidth upwards."""
    thin = replace(NET, gpus_per_switch=32, oversubscription=4.0)
    size = 2**36
    for kind in Collective:
        assert thin.seconds(kind, size, range(32)) == NET.seconds(kind, size, range(32))
    assert thin.group(range(64)) == Group(64, 8, 8, 32)
    # A ring leaves a switch once for its four nodes there; each other message of an exchange goes through the top.
    assert thin.seconds(Collective.ALL_GATHER, size, range(64)) == NET.seconds(Collective.ALL_GATHER, size, range(64))
    plain, slow = (net.seconds(Collective.ALL_TO_ALL, size, range(64)) for net in (NET, thin))
    assert slow / plain == pytest.approx(4 * 32 / 56, rel=1e-2)
    plain, slow = (net.seconds(Collective.SEND, size, (0, 32)) for net in (NET, thin))
    assert slow / plain == pytest.approx(4, rel=1e-2)
    assert thin.seconds(Collective.ALL_GATHER, size, (0, 32)) == pytest.approx(
        4 * NET.seconds(Collective.ALL_GATHER, size, (0, 32)), rel=1e-2
    )


@settings(deadline=None)
@given(NETWORKS, KINDS, NODES, TOGETHER, SIZES, st.integers(0, 2**36))
def test_more_bytes_never_take_less(
    net: Network, kind: Collective, nodes: int, together: int, size: int, by: int
) -> None:
    ranks = ranks_of(nodes, together)
    assert net.seconds(kind, size, ranks) <= net.seconds(kind, size + by, ranks) * (1 + 1e-9)


@settings(deadline=None)
@given(NETWORKS, KINDS, NODES, NODES, TOGETHER, SIZES)
def test_more_nodes_never_take_less(
    net: Network, kind: Collective, nodes: int, more: int, together: int, size: int
) -> None:
    """Of whole switches, and from two on, with links that are as fast as the network: of an exchange, less stays within
    each of more nodes."""
    assume(net.link_bytes_per_s >= net.network_bytes_per_s)
    few, many = (net.seconds(kind, size, ranks_of(4 * count, together)) for count in sorted((nodes, more)))
    assert few <= many * (1 + 1e-9)


@settings(deadline=None)
@given(NETWORKS, KINDS, st.integers(2, 8), st.integers(2, 8), SIZES)
def test_more_gpus_of_a_node_never_take_less(net: Network, kind: Collective, few: int, many: int, size: int) -> None:
    few, many = sorted((few, many))
    assert net.seconds(kind, size, range(few)) <= net.seconds(kind, size, range(many)) * (1 + 1e-9)


@settings(deadline=None)
@given(NETWORKS, KINDS, NODES, TOGETHER, SIZES)
def test_nothing_beats_the_bandwidth(net: Network, kind: Collective, nodes: int, together: int, size: int) -> None:
    """Each GPU must send and receive so many bytes by its links and its share of the adapters."""
    ranks = ranks_of(nodes, together)
    fastest = net.link_bytes_per_s + (0 if nodes == 1 else together * net.network_bytes_per_s)
    share = (1 - 1 / len(ranks)) * {Collective.ALL_REDUCE: 2, Collective.BARRIER: 0}.get(kind, 1)
    assert net.seconds(kind, size, ranks) >= share * size / fastest * (1 - 1e-9)


@settings(deadline=None)
@given(NETWORKS, NODES, TOGETHER, SIZES)
def test_an_all_reduce_is_at_most_a_reduce_scatter_and_an_all_gather(
    net: Network, nodes: int, together: int, size: int
) -> None:
    """It is just these, but for the start, where rings are the fastest for both, and for what links attain then."""
    ranks = ranks_of(nodes, together)
    slower = {1: 1.0, 2: 0.88 / 0.72}.get(len(ranks), 1 / 0.9)
    both = sum(net.seconds(kind, size, ranks) for kind in GATHERS)
    whole = net.seconds(Collective.ALL_REDUCE, size, ranks)
    if nodes == 1:
        assert whole * (1 - 1e-9) <= both <= (slower * whole + START) * (1 + 1e-9)
    huge = 2**50
    both = sum(net.seconds(kind, huge, ranks) for kind in GATHERS)
    whole = net.seconds(Collective.ALL_REDUCE, huge, ranks)
    assert whole * (1 - 1e-2) <= both <= slower * whole * (1 + 1e-2)


def test_a_thousand_ranks_are_reckoned_by_their_shape_once() -> None:
    ranks = tuple(range(1024))
    assert NET.group(ranks) == Group(1024, 128, 8, 1024)
    assert NET.group(ranks) is NET.group(list(ranks))


CURVE = Curve(
    Collective.ALL_GATHER, 4, 4, (2**10, 2**20, 2**30), (1e-5, 4e-5, 4e-3), (1e-5, 5e-5, 5e-3), (0.0, 0.0, 0.4)
)


def test_what_was_measured_counts_and_the_model_beyond() -> None:
    known = NET.informed([CURVE])
    gather = Collective.ALL_GATHER
    assert [known.seconds(gather, size, range(4)) for size in CURVE.sizes] == list(CURVE.seconds)
    assert known.seconds(gather, 1, range(4)) == CURVE.seconds[0]
    assert known.seconds(gather, 2**15, (8, 9, 10, 11)) == pytest.approx(2e-5)  # half way, of both logarithms
    assert known.seconds(gather, 2**31, range(4)) == pytest.approx(2 * CURVE.seconds[-1], rel=0.02)
    assert known.source_of(gather, range(4)) == "measured here"
    assert known.source_of(gather, range(8)) == known.source_of(Collective.SEND, (0, 1)) == "an example"
    assert [known.seconds(gather, size, range(4), beside=True) for size in CURVE.sizes] == list(CURVE.beside_s)
    attained = 3 / 4 * 2**30 / 4e-3
    assert known.link_bytes_per_s == pytest.approx(attained / 0.9)
    assert known.seconds(gather, 2**40, range(8)) == pytest.approx(7 / 8 * 2**40 / attained, rel=1e-3)
    assert known.seconds(gather, 2**30, (0, 1, 8, 9)) == NET.seconds(gather, 2**30, (0, 1, 8, 9))
    small = replace(CURVE, sizes=(2**10, 2**18), seconds=(1e-5, 2e-3))
    assert NET.informed([small]).link_bytes_per_s == NET.link_bytes_per_s, "it says nothing of bandwidth"
    assert NET.informed([]) == NET


@settings(deadline=None)
@given(st.floats(0, 40), st.floats(0, 40))
def test_a_measured_curve_is_followed_upwards(low: float, high: float) -> None:
    known = NET.informed([CURVE])
    small, large = (round(2**power) for power in sorted((low, high)))
    taken = [known.seconds(Collective.ALL_GATHER, size, range(4)) for size in (small, large)]
    assert taken == sorted(taken)


def test_records_from_before_kinds_were_told_apart_are_read_as_they_were_meant() -> None:
    values = asdict(NET)
    assert Network.from_dict(values) == NET
    del values["by_kind"]
    before = Network.from_dict(values)
    for kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.SEND):
        moved = {Collective.ALL_REDUCE: 1.0, Collective.ALL_GATHER: 0.5, Collective.SEND: 1.0}[kind] * 2**40
        for beside in (False, True):
            assert before.seconds(kind, 2**40, (0, 1), beside) == pytest.approx(moved / 200e9, rel=1e-3)


def test_it_travels() -> None:
    known = NET.informed([CURVE])
    known.seconds(Collective.ALL_GATHER, 8, range(4))
    assert pickle.loads(pickle.dumps(known)) == known
