"""What is wrong with the machines, by facts alone: a table of checks, each with all that it finds, in one line each."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from search_spaces.hardware import Accelerator, accelerator_named
from service.doctor.facts import DeviceFacts, Facts, NodeFacts
from service.doctor.history import host_key
from service.history import Figures
from telemetry.devices import is_host
from trainables.probes import Attained

BEHIND_PEERS, BEHIND_ITSELF = 0.05, 0.03
"""How far a GPU may be behind others of its name, which differ by 3% at the power limit, and behind what it was."""

HOST_BEHIND_PEERS, HOST_BEHIND_ITSELF = 0.3, 0.3
"""Likewise of processors, whose figures repeat less well."""

PRODUCTS_SHARE, MEMORY_SHARE, LINK_SHARE = 0.5, 0.7, 0.5
"""Of the peaks of a data sheet, what any GPU in order attains."""

PAIR_BEHIND = 0.15
"""How far a pair of GPUs may be behind the usual pair of its node."""

LAUNCH_S = 10e-6
"""Of one launch, beyond which layouts wait for the host."""

CAPPED_CLOCK = 0.9
"""Share of the highest clock below which products are held, where neither power nor heat is said to hold them."""

HELD_SHARE, POWER_SHARE = 0.01, 0.1
"""Shares of the time over which heat, or the power limit, holds a clock down in earnest."""

HISTORY_HEAT_S, HISTORY_BRAKE_S = 60.0, 1.0
"""Seconds since the driver was loaded that are no accident any more."""

LOWER_W = 1.0

PROGRAM_XIDS = ("13", "31", "43", "45")
"""XID errors that a program causes, not the hardware (NVIDIA, XID errors)."""

FREE_BYTES, WRITE_BYTES_PER_S = 10e9, 50e6
"""A search's record, samples and compiled code take some GB, and are written as it goes."""

OBJECT_BYTES_PER_S = 50e6
"""Far below the slowest network of a cluster."""

CLOCKS_S = 1.0
"""How far clocks of hosts may be apart; NTP holds them within milliseconds."""

HISTORY = 10
"""Earlier examinations whose median a device is held against."""

ANSWERS = {
    "energy_mj": "searches have no joules_per_token by counter",
    "power_w": "searches have no power",
    "sm_clock_mhz": "searches cannot tell a slow clock",
    "gpu_temp_c": "searches have no temperatures",
    "throttle_sw_thermal_ns": "searches cannot tell what heat costs",
}
"""Columns that searches rest on, and what they lack without them."""

GENERATIONS = {"amd": ("throttle_sw_thermal_ns",)}
"""Columns that only some generations of a kind of device have."""


NOTHING = "nothing to look at"


class Verdict(StrEnum):
    """What came of a check."""

    OK = "ok"
    WRONG = "wrong"
    UNKNOWN = "unknown"
    """It was not looked at, or there is nothing to look at."""


@dataclass(frozen=True)
class Finding:
    """One line of an examination: what was seen, of whom, what is expected there, and what to do."""

    check: str
    verdict: Verdict
    seen: str
    subject: str | None = None
    expected: str | None = None
    advice: str | None = None


class Fault(NamedTuple):
    """What one check found wrong."""

    subject: str
    seen: str
    expected: str
    advice: str


class Judged(NamedTuple):
    """What one check came to: what it saw, None if there was nothing to look at; what is wrong; who was left out."""

    seen: str | None
    faults: Sequence[Fault] = ()
    left: Mapping[str, str] = {}


Check = Callable[[Facts], Judged]


def judge(facts: Facts) -> list[Finding]:
    """All checks, in their order: each fault, or what was seen if there is none."""
    found: list[Finding] = []
    for name, check in CHECKS.items():
        judged = check(facts)
        found += [Finding(name, Verdict.WRONG, f.seen, f.subject, f.expected, f.advice) for f in judged.faults]
        if not judged.faults and judged.seen is not None:
            found.append(Finding(name, Verdict.OK, judged.seen))
        found += [Finding(name, Verdict.UNKNOWN, why, subject) for subject, why in judged.left.items()]
        if judged.seen is None and not judged.faults and not judged.left:
            found.append(Finding(name, Verdict.UNKNOWN, NOTHING))
    return found


def answering(facts: Facts) -> Judged:
    """Nodes and GPUs that say nothing."""
    faults = [
        Fault(host, why, "an answer", "see `ray status` and that machine's log; searches go round it")
        for host, why in facts.lost.items()
    ]
    for node in facts.nodes:
        for said in node.silent:
            faults.append(
                Fault(node.hostname, said, "every GPU answers", "reset the GPU or reboot; look for XID errors")
            )
    gpus = Counter(device.info.name for _, device in _gpus(facts))
    listed = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
    left = {_place(node, device): f"left alone: {device.held}" for node, device in facts.devices() if device.held}
    return Judged(f"{_nodes(facts)}, {listed}", faults, left)


def drivers(facts: Facts) -> Judged:
    """Drivers are alike."""
    versions = {node.hostname: _joined({d.info.driver_version for d in node.devices}) for node in facts.nodes}
    return _alike({host: version for host, version in versions.items() if version}, "driver", "install that driver")


def versions(facts: Facts) -> Judged:
    """Libraries are alike."""
    faults: list[Fault] = []
    for name in dict.fromkeys(name for node in facts.nodes for name in node.versions if name != "kernel"):
        have = {node.hostname: node.versions[name] for node in facts.nodes if name in node.versions}
        faults += _alike(have, name, "install the versions of constraints.txt everywhere").faults
    shown = ("python", "torch", "ray", "nccl")
    first = facts.nodes[0].versions if facts.nodes else {}
    return Judged(", ".join(f"{name} {first[name]}" for name in shown if name in first), faults)


def fields(facts: Facts) -> Judged:
    """Devices answer what searches rest on, and what their like do."""
    faults = []
    gpus = list(_gpus(facts))
    for node, device in gpus:
        answered = _answered(device)
        for column, lack in ANSWERS.items():
            if column not in answered and column not in GENERATIONS.get(device.info.kind, ()):
                advice = f"update the driver, or leave MIG mode; until then {lack}"
                faults.append(Fault(_place(node, device), f"{column} is not answered", "a value", advice))
        others = [_answered(other) for _, other in gpus if other.info.name == device.info.name and other is not device]
        usual = {column for one in others for column in one if sum(column in each for each in others) > len(others) / 2}
        if missing := sorted(usual - answered - set(ANSWERS)):
            advice = "update the driver, or leave MIG mode"
            faults.append(Fault(_place(node, device), f"{', '.join(missing)}: no answer", "as its like answer", advice))
    counts = {len(_answered(device)) for _, device in gpus}
    return Judged(f"{_span(counts, 'd')} columns answered" if gpus else None, faults)


def power_limit(facts: Facts) -> Judged:
    """Power limits are those of the vendor, and alike."""
    faults, limits = [], []
    for node, device in _gpus(facts):
        limit = device.info.power_limit_w
        if limit is None:
            continue
        limits.append(limit)
        sheet = _sheet(device)
        others = _others(facts, device, lambda one: one.info.power_limit_w)
        known = [device.info.default_power_limit_w, sheet and sheet.power_limit_w, max(others, default=None)]
        usual = next((value for value in known if value), limit)
        if limit < usual - LOWER_W:
            faults.append(
                Fault(
                    _place(node, device),
                    f"power limit {limit:.0f} W",
                    f"{usual:.0f} W",
                    "ask the operator whether it is meant; `nvidia-smi -pl` sets it",
                )
            )
    return Judged(f"{_span(limits, '.0f')} W" if limits else None, faults)


def clocks(facts: Facts) -> Judged:
    """Clocks under load are what power and heat leave, and those of their like."""
    faults, seen = [], []
    for node, device in _gpus(facts):
        load = device.load
        if load is None or load.mean_sm_clock_mhz is None:
            continue
        clock = load.mean_sm_clock_mhz
        seen.append(clock)
        highest = device.info.max_sm_clock_mhz
        others = _others(facts, device, lambda one: None if one.load is None else one.load.mean_sm_clock_mhz)
        usual = statistics.median(others) if others else None
        held = _share(device, "power_cap") > POWER_SHARE or _hot(device) > HELD_SHARE
        expected = None
        if not held and highest and clock < CAPPED_CLOCK * highest:
            expected = f"up to {highest:,.0f} MHz, as neither power nor heat holds it"
        elif usual and clock < (1 - 2 * BEHIND_PEERS) * usual:
            expected = f"{usual:,.0f} MHz, as its like"
        if expected:
            advice = "look for locked clocks: `nvidia-smi -q -d CLOCK`; `nvidia-smi -rgc` frees them"
            faults.append(Fault(_place(node, device), f"{clock:,.0f} MHz in matrix products", expected, advice))
    return Judged(f"{_span(seen, ',.0f')} MHz in matrix products" if seen else None, faults)


def heat(facts: Facts) -> Judged:
    """Heat holds no clock down, and did not before."""
    faults, seen = [], []
    for node, device in _gpus(facts):
        peak = None if device.load is None else device.load.peak_gpu_temp_c
        if peak is not None:
            seen.append(peak)
        if (hot := _hot(device)) > HELD_SHARE:
            at = "" if peak is None else f" at {peak:.0f} degC"
            faults.append(
                Fault(
                    _place(node, device),
                    f"heat held its clock down for {hot:.0%} of the time{at}",
                    "never",
                    "look at fans, air flow and neighbours, or give it the stage with least to do",
                )
            )
        past = [_seconds(device, cause) for cause in ("sw_thermal", "hw_thermal")]
        brake = _seconds(device, "hw_brake")
        for seconds, bound, what in ((max(past), HISTORY_HEAT_S, "heat"), (brake, HISTORY_BRAKE_S, "the power brake")):
            if seconds > bound:
                faults.append(
                    Fault(
                        _place(node, device),
                        f"{what} held its clock down for {seconds:,.0f} s since the driver was loaded",
                        f"less than {bound:.0f} s",
                        "look at cooling and power supply; throttle_ratio of trials says what it costs",
                    )
                )
    return Judged(f"{_span(seen, '.0f')} degC at most" if seen else _none_or(facts, "no time lost"), faults)


def ecc(facts: Facts) -> Judged:
    """No memory error that was not corrected."""
    faults, corrected = [], []
    for node, device in _gpus(facts):
        reading = device.reading
        if reading.get("ecc_corrected") is not None:
            corrected.append(int(reading["ecc_corrected"]))
        if errors := reading.get("ecc_uncorrected"):
            seen = f"{errors:,} memory errors that were not corrected since the driver was loaded"
            advice = "reset the GPU to have rows remapped; have it replaced if they come again"
            faults.append(Fault(_place(node, device), seen, "none", advice))
    return Judged(f"none uncorrected, {sum(corrected):,} corrected" if corrected else None, faults)


def xid(facts: Facts) -> Judged:
    """No XID error while the doctor watched, and none of the hardware's in the kernel's log."""
    faults = []
    for node, device in _gpus(facts):
        if errors := device.reading.get("xid_errors"):
            seen = f"{errors} XID errors while it was watched, the last {device.reading.get('xid')}"
            faults.append(
                Fault(_place(node, device), seen, "none", "look the number up in NVIDIA's list of XID errors")
            )
    for node in facts.nodes:
        of_hardware = [one for one in node.xids or () if one.split()[0] not in PROGRAM_XIDS]
        if of_hardware:
            seen = f"XID errors in the kernel's log: {', '.join(of_hardware)}"
            faults.append(Fault(node.hostname, seen, "none", "look the number up in NVIDIA's list of XID errors"))
    unread = {node.hostname: "the kernel's log may not be read" for node in facts.nodes if node.xids is None}
    gpus = any(True for _ in _gpus(facts))
    return Judged("none" if gpus else None, faults, unread if gpus else {})


def products(facts: Facts) -> Judged:
    """Matrix products at the power limit are as fast as elsewhere, as before, and as a data sheet has it."""

    def peak(sheet: Accelerator) -> float | None:
        return sheet.peak_flops and PRODUCTS_SHARE * sheet.peak_flops

    judged = _attained(
        facts, "{:,.0f} TFLOP/s", 1e-12, lambda one: one.flops, peak, "see clocks and heat, then swap it"
    )
    failed = [
        Fault(
            _place(node, device),
            f"matrix products failed: {device.error}",
            "a result",
            "run `wattune doctor` again; if it stays, reset the GPU or look for its XID errors",
        )
        for node, device in _gpus(facts)
        if device.error and device.attained is None
    ]
    return Judged(judged.seen, [*judged.faults, *failed])


def memory(facts: Facts) -> Judged:
    """Likewise the bandwidth of memory."""

    def peak(sheet: Accelerator) -> float | None:
        return sheet.memory_bytes_per_s and MEMORY_SHARE * sheet.memory_bytes_per_s

    return _attained(
        facts, "{:,.2f} TB/s", 1e-12, lambda one: one.memory_bytes_per_s, peak, "look for remapped rows and ECC errors"
    )


def launches(facts: Facts) -> Judged:
    """The host launches as fast as layouts need it."""
    faults, seen = [], []
    for node, device in _gpus(facts):
        if device.attained is None:
            continue
        each = device.attained.launch_s
        seen.append(1e6 * each)
        others = _others(facts, device, lambda one: None if one.attained is None else one.attained.launch_s)
        usual = statistics.median(others) if others else None
        bound = min(LAUNCH_S, (1 + HOST_BEHIND_PEERS) * usual) if usual else LAUNCH_S
        if each > bound:
            faults.append(
                Fault(
                    _place(node, device),
                    f"{1e6 * each:.1f} us to launch one kernel",
                    f"{1e6 * bound:.1f} us at most",
                    "set the CPU governor to performance, look for what else runs there; compile: true launches less",
                )
            )
    return Judged(f"{_span(seen, '.1f')} us to launch one kernel" if seen else None, faults)


def links(facts: Facts) -> Judged:
    """All links between the GPUs of a node are up."""
    faults, peaks = [], []
    for node, device in _gpus(facts):
        peak = device.info.link_peak_bytes_per_s
        others = _others(facts, device, lambda one: one.info.link_peak_bytes_per_s)
        sheet = _sheet(device)
        alone = sum(1 for one in node.devices if one.info.name == device.info.name) == 1
        of_sheet = None if sheet is None or alone else sheet.link_bytes_per_s
        usual = max([*others, *([of_sheet] if of_sheet else [])], default=None)
        if peak is not None:
            peaks.append(peak / 1e9)
        if usual and (peak or 0.0) < 0.99 * usual:
            seen = f"links of {(peak or 0.0) / 1e9:,.0f} GB/s are up"
            advice = "see `nvidia-smi nvlink -s` for the dead one; reset the node, or have it serviced"
            faults.append(Fault(_place(node, device), seen, f"{usual / 1e9:,.0f} GB/s", advice))
    return Judged(f"{_span(peaks, ',.0f')} GB/s one way" if peaks else None, faults)


def all_reduce(facts: Facts) -> Judged:
    """Collectives and pairs attain their share of the links."""
    faults, seen = [], []
    for node in facts.nodes:
        working = [one for one in node.devices if one.attained and one.attained.all_reduce_bytes_per_s]
        for one in node.devices:
            if one.attained is not None and one.error:
                faults.append(
                    Fault(_place(node, one), f"NCCL: {one.error}", "an all-reduce", "run with NCCL_DEBUG=INFO")
                )
        if not working:
            continue
        peak = min((_fabric(one) or 0.0 for one in working), default=0.0)
        attained = [one.attained.all_reduce_bytes_per_s or 0.0 for one in working if one.attained]
        bus = min(attained)
        seen.append(bus / 1e9)
        if peak and bus < LINK_SHARE * peak:
            faults.append(
                Fault(
                    f"{node.hostname}, {len(working)} GPUs",
                    f"all-reduce at {bus / 1e9:,.0f} GB/s",
                    f"{LINK_SHARE * peak / 1e9:,.0f} GB/s or more, of links of {peak / 1e9:,.0f}",
                    "run with NCCL_DEBUG=INFO: it may go over PCIe or the network",
                )
            )
        faults += _slow_pairs(node, working, peak)
    return Judged(f"all-reduce at {_span(seen, ',.0f')} GB/s" if seen else None, faults)


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
        past = facts.history.get(host_key(node), ())[-HISTORY:]
        for what, (now, before, unit) in figures.items():
            peers = [now(one) for one in others]
            fault = _behind(now(attained), peers, [before(one) for one in past], HOST_BEHIND_PEERS, HOST_BEHIND_ITSELF)
            if fault is not None:
                bound, why = fault
                advice = "set the CPU governor to performance, look for what else runs there"
                seen = f"{what}: {unit.format(now(attained))}"
                faults.append(
                    Fault(f"{node.hostname}, processors", seen, f"{unit.format(bound)} or more, {why}", advice)
                )
    for node in facts.nodes:
        if node.load_average > node.cores:
            seen = f"load {node.load_average:.1f} on {node.cores} cores"
            advice = "examine it again when it has nothing else to do: its figures may be low"
            faults.append(Fault(node.hostname, seen, f"{node.cores} at most", advice))
        if node.host is None and node.host_error and not any(one.held for one in node.devices):
            faults.append(
                Fault(node.hostname, f"processors: {node.host_error}", "a result", "see that torch runs there")
            )
    rates = [one.memory_bytes_per_s / 1e9 for _, one in known]
    tells = [1e6 * one.launch_s for _, one in known]
    left = {node.hostname: str(node.host_error) for node in facts.nodes if any(one.held for one in node.devices)}
    told = f"memory {_span(rates, ',.0f')} GB/s, {_span(tells, '.1f')} us an operation" if known else None
    return Judged(told, faults, left)


def disk(facts: Facts) -> Judged:
    """There is room to write to, and time."""
    faults, free = [], []
    for node in facts.nodes:
        for one in node.disks:
            subject = f"{node.hostname}, {one.path}"
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
    return Judged(f"{_span(free, ',.0f')} GB free" if free else None, faults)


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
            faults.append(Fault(node.hostname, f"no object comes: {node.object_store_error}", "an object", advice))
        elif rate is not None:
            rates.append(rate / 1e6)
            if rate < OBJECT_BYTES_PER_S:
                expected = f"{OBJECT_BYTES_PER_S / 1e6:.0f} MB/s or more"
                faults.append(Fault(node.hostname, f"objects come at {rate / 1e6:,.0f} MB/s", expected, advice))
    return Judged(f"objects come at {_span(rates, ',.0f')} MB/s" if rates else None, faults)


def host_clocks(facts: Facts) -> Judged:
    """Clocks of hosts agree, as far as their answers tell."""
    known = {
        node.hostname: (node.clock_s, node.clock_error_s or 0.0) for node in facts.nodes if node.clock_s is not None
    }
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


CHECKS: dict[str, Check] = {
    "answers": answering,
    "driver": drivers,
    "versions": versions,
    "telemetry": fields,
    "power limit": power_limit,
    "clocks": clocks,
    "heat": heat,
    "ecc": ecc,
    "xid": xid,
    "products": products,
    "memory": memory,
    "launches": launches,
    "links": links,
    "collectives": all_reduce,
    "host": host,
    "disk": disk,
    "mlflow": mlflow,
    "object store": object_store,
    "host clocks": host_clocks,
}
"""In the order in which they are told."""


def _gpus(facts: Facts) -> Iterator[tuple[NodeFacts, DeviceFacts]]:
    return ((node, device) for node, device in facts.devices() if not is_host(device.info.kind))


def _none_or(facts: Facts, seen: str) -> str | None:
    return seen if any(True for _ in _gpus(facts)) else None


def _place(node: NodeFacts, device: DeviceFacts) -> str:
    if is_host(device.info.kind):
        return f"{node.hostname}, processors"
    return f"{node.hostname} GPU {device.info.index} ({device.info.uuid})"


def _nodes(facts: Facts) -> str:
    return f"{len(facts.nodes)} node{'s' * (len(facts.nodes) != 1)}"


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


def _answered(device: DeviceFacts) -> set[str]:
    return {column for column, value in device.reading.items() if value is not None and column != "xid"}


def _sheet(device: DeviceFacts) -> Accelerator | None:
    return accelerator_named(device.info.name)


def _others(facts: Facts, device: DeviceFacts, figure: Callable[[DeviceFacts], float | None]) -> list[float]:
    """A figure of all other devices of the same name."""
    same = [one for _, one in facts.devices() if one.info.name == device.info.name and one is not device]
    return [value for one in same if (value := figure(one)) is not None]


def _share(device: DeviceFacts, cause: str) -> float:
    """Share of the load's time in which a cause held the clock down; 0 where nobody knows."""
    load = device.load
    return 0.0 if load is None else (load.throttle_s.get(cause) or 0.0) / load.duration_s


def _hot(device: DeviceFacts) -> float:
    return max(_share(device, cause) for cause in ("sw_thermal", "hw_thermal"))


def _seconds(device: DeviceFacts, cause: str) -> float:
    """Since the driver was loaded; 0 where nobody counts."""
    return (device.reading.get(f"throttle_{cause}_ns") or 0) / 1e9


def _fabric(device: DeviceFacts) -> float | None:
    return device.info.link_peak_bytes_per_s or device.info.pcie_peak_bytes_per_s


def _attained(
    facts: Facts,
    unit: str,
    scale: float,
    figure: Callable[[Any], float],
    least: Callable[[Accelerator], float | None],
    advice: str,
) -> Judged:
    """A figure of each GPU, of an `Attained` and of `Figures` alike: against its like, itself and its data sheet."""
    faults, seen = [], []
    for node, device in _gpus(facts):
        if device.attained is None:
            continue
        now = figure(device.attained)
        seen.append(now)
        others = _others(facts, device, lambda one: None if one.attained is None else figure(one.attained))
        past = [figure(one) for one in facts.history.get(device.info.uuid, ())[-HISTORY:]]
        sheet = _sheet(device)
        floor = None if sheet is None else least(sheet)
        fault = _behind(now, others, past, BEHIND_PEERS, BEHIND_ITSELF, floor)
        if fault is not None:
            bound, why = fault
            expected = f"{unit.format(scale * bound)} or more, {why}"
            faults.append(Fault(_place(node, device), unit.format(scale * now), expected, advice))
    if not seen:
        return Judged(None)
    low, high = unit.format(scale * min(seen)), unit.format(scale * max(seen))
    return Judged(low if low == high else f"{low.split()[0]} to {high}", faults)


def _behind(
    now: float,
    others: Sequence[float],
    past: Sequence[float],
    behind_peers: float,
    behind_itself: float,
    floor: float | None = None,
) -> tuple[float, str] | None:
    """What it should be at least, and why; None for what is well."""
    if others and now < (1 - behind_peers) * (usual := statistics.median(others)):
        return (1 - behind_peers) * usual, f"as {_count(len(others))} of its like: it is {1 - now / usual:.1%} slower"
    if past and now < (1 - behind_itself) * (was := statistics.median(past)):
        return (1 - behind_itself) * was, f"as before: it got {1 - now / was:.1%} slower"
    if floor is not None and now < floor:
        return floor, "by its data sheet"
    return None


def _count(number: int) -> str:
    return "the other one" if number == 1 else f"the {number} others"


def _slow_pairs(node: NodeFacts, working: Sequence[DeviceFacts], peak: float) -> Iterator[Fault]:
    index = {one.info.uuid: one.info.index for one in working}
    rates = {
        (one.info.uuid, other): rate
        for one in working
        for other, rate in ((one.attained and one.attained.pairs) or {}).items()
        if one.info.uuid < other
    }
    usual = statistics.median(rates.values()) if len(rates) > 2 else None
    for (one, other), rate in rates.items():
        bound = max((1 - PAIR_BEHIND) * usual if usual else 0.0, LINK_SHARE * peak)
        if rate < bound:
            yield Fault(
                f"{node.hostname} GPU {index[one]} and GPU {index.get(other, '?')}",
                f"{rate / 1e9:,.0f} GB/s between them",
                f"{bound / 1e9:,.0f} GB/s or more",
                "see `nvidia-smi nvlink -s` and `nvidia-smi topo -m` for a dead or slow link",
            )


def _span(values: Sequence[float] | set[int], style: str) -> str:
    low, high = format(min(values), style), format(max(values), style)
    return low if low == high else f"{low} to {high}"
