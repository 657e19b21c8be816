"""How long GPUs take to communicate: by NCCL's own model of its rings and trees, or as was measured where it was.

NCCL chooses among algorithms and protocols what it expects to be fastest, each by latencies and a bandwidth
(`src/graph/tuning.cc` of NCCL 2.30, whose constants are taken here in round figures); the bytes that each must move are
those of Thakur et al. 2005. All GPUs of a node are taken to communicate at once, as the ranks of a layout do.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple


class Collective(StrEnum):
    """What a group of ranks does together. `SEND` is from one rank to another."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
    BARRIER = "barrier"


class Protocol(NamedTuple):
    """One of NCCL's ways to move data: seconds before anything moves, the latency of a hop in that of the protocol with
    the full bandwidth, and the share of that bandwidth."""

    start_s: float
    hop: float
    share: float


PROTOCOLS = (Protocol(6.6e-6, 0.25, 0.25), Protocol(14e-6, 0.5, 0.92), Protocol(8.4e-6, 1.0, 1.0))
"""LL, LL128 and Simple, with the means of what NCCL has for NVLink and networks, rings and trees."""

_SHORT = Protocol(5.2e-6, 0.25, 0.42)
REDUCING = (_SHORT, Protocol(14e-6, 0.5, 0.92), Protocol(14e-6, 1.0, 1.0))
GATHERING = (_SHORT, _SHORT, Protocol(16e-6, 1.0, 1.0))
"""What takes their place within a node: in rings that reduce to all, and in those that gather or scatter and exchanges,
where nothing is seen of LL128. NCCL 2.28 from 64 KiB to 256 MiB, on pairs of H100 and H200 and on four H200 (the
collectives that calibrations measured, in benchmarks/data); by `PROTOCOLS`, 4 to 64 MiB would take 5 to 24% less."""

TREE_SHARE = 0.92
"""Bandwidth of trees, in that of rings."""

PAT_SHARE = 0.75
"""Bandwidth of gathers and scatters by parallel aggregated trees (Jeaugey 2025, arXiv 2506.20252), in that of rings."""

PAT_HOP = 0.3
"""Latency of one level of such a tree, in that of a hop."""

POST = 0.2
"""Time to hand one message to the network, in the latency of a hop."""

OVERHEAD_S = 6e-6
"""What a host takes to hand a message of the protocol with the full bandwidth to the network: each hop of a ring over
several nodes takes as long at least, within these, too (`getNetOverhead` in `tuning.cc`: three times 2 us with CPUs of
AMD; three times 1 us with those of Intel, with which rings of 128 to 1024 A100 were seen to take 8 us a hop)."""

GATHERS = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)

ATTAINED = {
    Collective.ALL_REDUCE: (0.88, 1.0),
    Collective.ALL_GATHER: (0.72, 0.9),
    Collective.REDUCE_SCATTER: (0.72, 0.9),
    Collective.ALL_TO_ALL: (0.85, 0.9),
    Collective.SEND: (1.05, 1.05),
    Collective.BROADCAST: (1.0, 1.0),
}
"""What two ranks of a node, and more, attain of `Network.link_bytes_per_s`: NCCL 2.28 without NVLink SHARP, 64 MiB to 1
GiB, on pairs of H100 and H200 and on four H200 (calibrations in `blind_4xh200` and `blind4_slices_2xh100` of
benchmarks/data)."""

BESIDE = 1.25
"""How much longer a collective within a node takes beside matrix products, there: 1.15 to 1.35 from 256 MiB on."""

LARGE = 2**26
"""Bytes from which on latencies hardly count."""

BARRIER_BYTES = 4
"""A barrier is an all-reduce of a single number."""


class Group(NamedTuple):
    """How ranks lie on the machines: how many, over how many nodes, how many of them share a node, and how many share a
    switch of the network's first level, each in the node or switch that has fewest of them."""

    ranks: int
    nodes: int
    together: int
    beneath: int


def group_of(gpus: Sequence[int], per_node: int, per_switch: int | None) -> Group:
    """How ranks on these GPUs lie, of which so many share a node, and a switch if there are several."""
    nodes = Counter(gpu // per_node for gpu in gpus)
    beneath = len(gpus) if per_switch is None else min(Counter(gpu // per_switch for gpu in gpus).values())
    return Group(len(gpus), len(nodes), min(nodes.values()), beneath)


@dataclass(frozen=True)
class Curve:
    """Measured seconds of a collective of `ranks` ranks, `together` of them on each node: ascending sizes in bytes with
    the seconds of each. `beside_s`: of each while the GPUs multiply matrices; `slowed`: by what share of the
    collective's own time alone these products then take longer."""

    kind: Collective
    ranks: int
    together: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    beside_s: tuple[float, ...]
    slowed: tuple[float, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Curve:
        """Of what `dataclasses.asdict` makes of one, also after a round trip through JSON."""
        columns = {name: tuple(values[name]) for name in ("sizes", "seconds", "beside_s", "slowed")}
        return cls(Collective(values["kind"]), values["ranks"], values["together"], **columns)


@dataclass(frozen=True)
class Curves:
    """What was measured of collectives, each kind and group once."""

    rows: tuple[Curve, ...] = ()

    def __hash__(self) -> int:
        """Predictions ask for it all the time: what more differs, a comparison tells."""
        return len(self.rows)


NO_CURVES = Curves()


@dataclass(frozen=True)
class Network:
    """The links within nodes and the network between them.

    - `source`: where the figures come from, for readers.
    - `gpus_per_node`: GPU g is on node g // `gpus_per_node`; rank r is on GPU r, or on `rank_order[r]`.
    - `link_bytes_per_s`: what a large all-reduce of a node attains of a GPU's links to its neighbours there together,
      one way; `network_bytes_per_s`: what collectives attain of its share of the node's adapters.
    - `link_latency_s`, `network_latency_s`: of a hop from GPU to GPU, with the protocol for large messages.
    - `gpus_per_switch`: GPUs below one switch of the network's first level, None where there is but one such switch;
      `oversubscription`: the bandwidth into such a switch from below, in that out of it.
    - `measured`: takes the place of the model where there is a curve.
    - `by_kind`: whether kinds attain what they do (`ATTAINED`, `BESIDE`), or all the same, as records have it in which
      that is not said.
    """

    source: str
    gpus_per_node: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    link_latency_s: float
    network_latency_s: float
    gpus_per_switch: int | None = None
    oversubscription: float = 1.0
    rank_order: tuple[int, ...] | None = None
    measured: tuple[Curve, ...] = ()
    by_kind: bool = True

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Network:
        """Of what `dataclasses.asdict` makes of one, also after a round trip through JSON."""
        order, curves = values["rank_order"], tuple(map(Curve.from_dict, values["measured"]))
        by_kind = values.get("by_kind", False)
        return cls(**{**values, "rank_order": order and tuple(order), "measured": curves, "by_kind": by_kind})

    def seconds(self, kind: Collective, size: int, ranks: Sequence[int], beside: bool = False) -> float:
        """Of one collective of `ranks`, global ranks as torch counts them; for `SEND` the two. `beside`: while the GPUs
        compute.

        `size` in bytes is that of nccl-tests: of the whole buffer, which is the output of an all-gather, the input of a
        reduce-scatter, what one rank sends in an all-to-all, and the message of a send.
        """
        return self.takes(kind, size, self.group(ranks), beside)

    def group(self, ranks: Sequence[int]) -> Group:
        """How `ranks` lie on the machines."""
        placed = ranks if isinstance(ranks, range) else tuple(ranks)
        return _placed(placed, self.gpus_per_node, self.gpus_per_switch, self.rank_order)

    def takes(self, kind: Collective, size: float, group: Group, beside: bool = False) -> float:
        """Seconds of one collective of a group that lies so; see `seconds`."""
        if group.ranks == 1:
            return 0.0
        if kind == Collective.BARRIER:
            kind, size = Collective.ALL_REDUCE, BARRIER_BYTES
        curve = self._curves.get((kind, group.ranks, group.together)) if self.measured else None
        if curve is None:
            return self._model(kind, size, group, beside)
        seconds = curve.beside_s if beside else curve.seconds
        if size <= curve.sizes[0]:
            return seconds[0]
        if size >= curve.sizes[-1]:
            return seconds[-1] * self._model(kind, size, group) / self._model(kind, curve.sizes[-1], group)
        return _between(curve.sizes, seconds, size)

    def share(self, group: Group) -> float:
        """Bandwidth of the group's rings, in that of links."""
        return self._rate(group, self.link_bytes_per_s) / self.link_bytes_per_s

    def source_of(self, kind: Collective, ranks: Sequence[int]) -> str:
        """Where the seconds of such a collective come from, for readers."""
        group = self.group(ranks)
        known = (Collective.ALL_REDUCE if kind == Collective.BARRIER else kind, group.ranks, group.together)
        return "measured here" if known in self._curves else self.source

    def informed(self, curves: Sequence[Curve]) -> Network:
        """The network with what was measured of it; beyond that, links have the bandwidth that follows from the fastest
        large gathers and scatters."""
        attained = [
            (1 - 1 / curve.ranks) * curve.sizes[-1] / curve.seconds[-1] / _attained(curve.kind, curve.ranks)
            for curve in curves
            if curve.together == curve.ranks and curve.sizes[-1] >= LARGE and curve.kind in GATHERS
        ]
        return replace(self, measured=tuple(curves), link_bytes_per_s=max(attained, default=self.link_bytes_per_s))

    @cached_property
    def _curves(self) -> dict[tuple[Collective, int, int], Curve]:
        return {(curve.kind, curve.ranks, curve.together): curve for curve in self.measured}

    def _model(self, kind: Collective, size: float, group: Group, beside: bool = False) -> float:
        link = self.link_bytes_per_s
        if self.by_kind:
            link *= _attained(kind, group.ranks) / (BESIDE if beside else 1.0)
        if kind == Collective.SEND:
            return self._send(size, group, link)
        if kind == Collective.ALL_TO_ALL:
            return self._all_to_all(size, group, link)
        rate, part = self._rate(group, link), size * (1 - 1 / group.ranks)
        if kind == Collective.ALL_REDUCE:
            return min(self._ring(2 * part / rate, 2, group), self._tree(size / rate, group))
        if kind == Collective.BROADCAST:
            return self._broadcast(size / rate, group)
        ring = self._ring(part / rate, 1, group)
        return min(ring, self._pat(size / rate, group)) if group.ranks == group.nodes else ring

    def _rate(self, group: Group, link: float) -> float:
        """Bytes a second through each GPU of rings or trees, by links of so many. They enter and leave each node, and
        each switch, once: through the adapters of all their ranks there."""
        if group.nodes == 1:
            return link
        rate = min(link, group.together * self.network_bytes_per_s)
        if group.beneath < group.ranks:
            rate = min(rate, group.beneath * self.network_bytes_per_s / self.oversubscription)
        return rate

    def _ring(self, moving: float, rounds: int, group: Group) -> float:
        """What moves through each GPU in `moving` seconds, in so many rounds."""
        protocols = PROTOCOLS if group.nodes > 1 else GATHERING if rounds == 1 else REDUCING
        return _fastest(moving, rounds * self._hops(group), protocols)

    def _broadcast(self, moving: float, group: Group) -> float:
        """Around a ring, with the protocol that were fastest if its latency was that of one hop: so NCCL chooses."""
        hops = self._hops(group)
        hop = hops / (group.ranks - 1)
        chosen = min(PROTOCOLS, key=lambda protocol: protocol.start_s + protocol.hop * hop + moving / protocol.share)
        return chosen.start_s + chosen.hop * hops + moving / chosen.share

    def _hops(self, group: Group) -> float:
        """Latency of a ring's hops, which lead to another node once for each node."""
        within = self.link_latency_s if group.nodes == 1 else max(self.link_latency_s, OVERHEAD_S)
        return (group.ranks - group.nodes) * within + (group.nodes - 1) * self.network_latency_s

    def _tree(self, moving: float, group: Group) -> float:
        """An all-reduce up and down a chain within each node and a binary tree over nodes."""
        chain, levels = group.ranks / group.nodes - 1, math.log2(group.nodes)
        latency = 2 * (chain * self.link_latency_s + levels * self.network_latency_s)
        return _fastest(2 * moving / TREE_SHARE, latency)

    def _pat(self, moving: float, group: Group) -> float:
        """A gather or scatter of nodes with one rank each by parallel trees, whose messages are handed over singly."""
        latency = (PAT_HOP * math.log2(group.nodes) + POST * group.ranks) * self.network_latency_s
        return PROTOCOLS[-1].start_s + latency + moving / PAT_SHARE

    def _send(self, size: float, group: Group, link: float) -> float:
        """A message to a neighbour, as far as the group spreads."""
        if group.nodes == 1:
            return _fastest(size / link, self.link_latency_s)
        slower = self.oversubscription if group.beneath < group.ranks else 1.0
        return _fastest(slower * size / self.network_bytes_per_s, self.network_latency_s)

    def _all_to_all(self, size: float, group: Group, link: float) -> float:
        """A message from each rank to each: those within the node through its links, at the same time those to other
        nodes through its share of the adapters, and of these what leaves a switch through what that has upwards."""
        inside, outside, above = group.together - 1, group.ranks - group.together, group.ranks - group.beneath
        each = size / group.ranks
        moving = max(
            inside * each / link,
            outside * each / self.network_bytes_per_s,
            above * each / self.network_bytes_per_s * self.oversubscription,
        )
        hop = self.network_latency_s if outside else self.link_latency_s
        latency = hop + POST * (inside * self.link_latency_s + outside * self.network_latency_s)
        return _fastest(moving, latency, PROTOCOLS if outside else GATHERING)


def sent_bytes(kind: Collective, size: float, ranks: int) -> float:
    """That each of so many ranks sends in a collective of `size` bytes (Thakur et al. 2005)."""
    if kind == Collective.SEND:
        return size
    return (2 if kind == Collective.ALL_REDUCE else 1) * size * (ranks - 1) / ranks


def _attained(kind: Collective, ranks: int) -> float:
    """Of a node's links, by so many ranks there or in other nodes."""
    two, more = ATTAINED[kind]
    return two if ranks == 2 else more


def _fastest(moving: float, latency: float, protocols: tuple[Protocol, Protocol, Protocol] = PROTOCOLS) -> float:
    """By the best protocol, of `moving` seconds at the full bandwidth and the latency that goes with it."""
    low, middle, full = protocols  # not in a loop: the cost model asks often
    return min(
        low.start_s + low.hop * latency + moving / low.share,
        middle.start_s + middle.hop * latency + moving / middle.share,
        full.start_s + full.hop * latency + moving / full.share,
    )


@lru_cache(maxsize=4096)
def _placed(ranks: Sequence[int], per_node: int, per_switch: int | None, order: tuple[int, ...] | None) -> Group:
    return group_of(ranks if order is None else [order[rank] for rank in ranks], per_node, per_switch)


def _between(sizes: Sequence[int], seconds: Sequence[float], size: float) -> float:
    """Straight between the measured points around `size`, over logarithms of both."""
    above = bisect_right(sizes, size)
    low, high = above - 1, above
    share = math.log(size / sizes[low]) / math.log(sizes[high] / sizes[low])
    return seconds[low] * math.pow(seconds[high] / seconds[low], share)
