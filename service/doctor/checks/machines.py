"""Checks of machines, and of what they share."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping

from service.doctor.checks.judged import (
    HISTORY,
    Fault,
    Judged,
    behind,
    each_gpu,
    place,
    span,
)
from service.doctor.facts import Facts, NodeFacts
from service.history import Figures
from telemetry.devices import is_host
from trainables.probes import Attained

HOST_BEHIND_PEERS, HOST_BEHIND_ITSELF = 0.3, 0.3
"""How far processors may be behind those of other nodes, and behind what they were: their figures vary more."""


FREE_BYTES, WRITE_BYTES_PER_S = 10e9, 50e6
"""A search's record, samples and compiled code take some GB, and are written as it goes."""


OBJECT_BYTES_PER_S = 50e6
"""Far below the slowest network of a cluster."""


BUILT = ("torch", "nccl")
"""Libraries that are another one for each kind of GPU."""


CLOCKS_S = 1.0
"""How far clocks of hosts may be apart; NTP holds them within milliseconds."""


def answering(facts: Facts) -> Judged:
    """Nodes and GPUs that say nothing."""
    faults = [
        Fault(host, why, "an answer", "see `ray status` and that machine's log; searches go round it")
        for host, why in facts.lost.items()
    ]
    for node in facts.nodes:
        for said in node.silent:
            faults.append(Fault(node.name, said, "every GPU answers", "reset the GPU or reboot; look for XID errors"))
    gpus = Counter(device.info.name for _, device in each_gpu(facts))
    listed = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
    left = {place(node, device): f"left alone: {device.held}" for node, device in each_gpu(facts) if device.held}
    return Judged(f"{_nodes(facts)}, {listed}", faults, left)


def drivers(facts: Facts) -> Judged:
    """Drivers of like GPUs are alike."""
    seen, faults = list[str](), list[Fault]()
    kinds = dict.fromkeys(device.info.kind for _, device in each_gpu(facts))
    for kind in kinds:
        versions = {
            node.name: _joined({one.info.driver_version for one in node.devices if one.info.kind == kind})
            for node in facts.nodes
        }
        judged = _alike(
            {host: version for host, version in versions.items() if version}, "driver", "install that driver"
        )
        faults += judged.faults
        if judged.seen is not None:
            seen.append(f"{kind} {judged.seen}" if len(kinds) > 1 else judged.seen)
    return Judged(", ".join(seen) or None, faults)


def versions(facts: Facts) -> Judged:
    """Libraries are alike; those that are built for a kind of GPU on nodes that have it."""
    faults: list[Fault] = []
    for name in dict.fromkeys(name for node in facts.nodes for name in node.versions if name != "kernel"):
        have = [node for node in facts.nodes if name in node.versions]
        groups = [[node for node in have if _kinds(node) == kinds] for kinds in dict.fromkeys(map(_kinds, have))]
        for group in groups if name in BUILT else [have]:
            by_host = {node.name: node.versions[name] for node in group}
            faults += _alike(by_host, name, "install the versions of constraints.txt everywhere").faults
    shown = ("python", "torch", "ray", "nccl")
    first = facts.nodes[0].versions if facts.nodes else {}
    return Judged(", ".join(f"{name} {first[name]}" for name in shown if name in first), faults)


def host(facts: Facts) -> Judged:
    """Processors and their memory are as fast as elsewhere and before, and free."""
    faults: list[Fault] = []
    figures: dict[str, tuple[Callable[[Attained], float], Callable[[Figures], float], str]] = {
        "matrix products": (lambda one: one.flops, lambda one: one.flops, "{:,.3g} FLOP/s"),
        "memory": (lambda one: one.memory_bytes_per_s, lambda one: one.memory_bytes_per_s, "{:,.3g} B/s"),
        "dispatch": (lambda one: 1 / one.launch_s, lambda one: 1 / one.launch_s, "{:,.0f} operations/s"),
    }
    known = [(node, node.host) for node in facts.nodes if node.host is not None]
    for node, attained in known:
        others = [one for other, one in known if other is not node and other.cores == node.cores]
        past = facts.history.get(node.host_uuid, ())[-HISTORY:]
        for what, (now, before, unit) in figures.items():
            peers = [now(one) for one in others]
            fault = behind(now(attained), peers, [before(one) for one in past], HOST_BEHIND_PEERS, HOST_BEHIND_ITSELF)
            if fault is not None:
                bound, why = fault
                advice = "set the CPU governor to performance, look for what else runs there"
                seen = f"{what}: {unit.format(now(attained))}"
                faults.append(Fault(f"{node.name}, processors", seen, f"{unit.format(bound)} or more, {why}", advice))
    for node in facts.nodes:
        if node.load_average > node.cores:
            seen = f"load {node.load_average:.1f} on {node.cores} cores"
            advice = "examine it again when it has nothing else to do: its figures may be low"
            faults.append(Fault(node.name, seen, f"{node.cores} at most", advice))
        if node.host is None and node.host_error and not any(one.held for one in node.devices):
            faults.append(Fault(node.name, f"processors: {node.host_error}", "a result", "see that torch runs there"))
    rates = [one.memory_bytes_per_s / 1e9 for _, one in known]
    tells = [1e6 * one.launch_s for _, one in known]
    left = {node.name: str(node.host_error) for node in facts.nodes if any(one.held for one in node.devices)}
    told = f"memory {span(rates, ',.0f')} GB/s, {span(tells, '.1f')} us an operation" if known else None
    return Judged(told, faults, left)


def disk(facts: Facts) -> Judged:
    """There is room to write to, and time."""
    faults, free = [], []
    for node in facts.nodes:
        for one in node.disks:
            subject = f"{node.name}, {one.path}"
            if one.error is not None or one.free_bytes is None or one.write_bytes_per_s is None:
                advice = "free some space, or set WATTUNE_HOME to another disk"
                faults.append(Fault(subject, f"cannot be written: {one.error}", "room to write", advice))
                continue
            free.append(one.free_bytes / 1e9)
            if one.free_bytes < FREE_BYTES:
                seen, expected = f"{one.free_bytes / 1e9:,.1f} GB free", f"{FREE_BYTES / 1e9:.0f} GB or more"
                faults.append(Fault(subject, seen, expected, "free some space, or set WATTUNE_HOME to another disk"))
            if one.write_bytes_per_s < WRITE_BYTES_PER_S:
                seen = f"writes {one.write_bytes_per_s / 1e6:,.0f} MB/s"
                advice = "set WATTUNE_HOME to a local disk: telemetry and results are written as a search goes"
                faults.append(Fault(subject, seen, f"{WRITE_BYTES_PER_S / 1e6:.0f} MB/s or more", advice))
    return Judged(f"{span(free, ',.0f')} GB free" if free else None, faults)


def mlflow(facts: Facts) -> Judged:
    """The tracking store answers."""
    one = facts.store
    if one.error is None:
        return Judged(one.uri)
    advice = "start the server, or name another by --tracking-uri or MLFLOW_TRACKING_URI"
    return Judged(None, [Fault(one.uri, one.error, "an answer", advice)])


def object_store(facts: Facts) -> Judged:
    """Objects come from every node through Ray's store."""
    faults, rates = [], []
    for node in facts.nodes:
        rate = node.object_store_bytes_per_s
        advice = "look at the network between the nodes, and at the room in /dev/shm"
        if node.object_store_error is not None:
            faults.append(Fault(node.name, f"no object comes: {node.object_store_error}", "an object", advice))
        elif rate is not None:
            rates.append(rate / 1e6)
            if rate < OBJECT_BYTES_PER_S:
                expected = f"{OBJECT_BYTES_PER_S / 1e6:.0f} MB/s or more"
                faults.append(Fault(node.name, f"objects come at {rate / 1e6:,.0f} MB/s", expected, advice))
    return Judged(f"objects come at {span(rates, ',.0f')} MB/s" if rates else None, faults)


def host_clocks(facts: Facts) -> Judged:
    """Clocks of hosts agree, as far as their answers tell."""
    known = {node.name: (node.clock_s, node.clock_error_s or 0.0) for node in facts.nodes if node.clock_s is not None}
    if not known:
        return Judged(None)
    usual = statistics.median(ahead for ahead, _ in known.values())
    faults = []
    for name, (ahead, off) in known.items():
        if abs(ahead - usual) - off > CLOCKS_S:
            seen = f"its clock is {abs(ahead - usual):.1f} s {'ahead' if ahead > usual else 'behind'}"
            advice = "have NTP or chrony set it: searches tell by heartbeats which driver is alive"
            faults.append(Fault(name, seen, f"within {CLOCKS_S:.0f} s of the others", advice))
    apart = max(ahead for ahead, _ in known.values()) - min(ahead for ahead, _ in known.values())
    return Judged(f"{apart:.3f} s apart" if len(known) > 1 else f"{abs(usual):.3f} s from this one", faults)


def _nodes(facts: Facts) -> str:
    return f"{len(facts.nodes)} node{'s' * (len(facts.nodes) != 1)}"


def _kinds(node: NodeFacts) -> frozenset[str]:
    """What kinds of GPU a node has."""
    return frozenset(device.info.kind for device in node.devices if not is_host(device.info.kind))


def _joined(known: set[str | None]) -> str:
    return ", ".join(sorted(one for one in known if one))


def _alike(by_host: Mapping[str, str], what: str, advice: str) -> Judged:
    """Hosts that have another version than most; of as many with either, than the first."""
    if not by_host:
        return Judged(None)
    counts = Counter(by_host.values())
    usual = max(counts, key=lambda version: counts[version])
    faults = [
        Fault(name, f"{what} {version}", f"{usual}, as {counts[usual]} of {len(by_host)} nodes", advice)
        for name, version in by_host.items()
        if version != usual
    ]
    return Judged(usual, faults)
