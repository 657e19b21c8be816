"""Checks of the links between the GPUs of a node."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from service.doctor.checks.judged import (
    Fault,
    Judged,
    each_gpu,
    of_others,
    place,
    sheet_of,
    span,
)
from service.doctor.facts import DeviceFacts, Facts, NodeFacts

LINK_SHARE = 0.5
"""Of the links' peak, what any collective and any pair in order attains."""


PAIR_BEHIND = 0.15
"""How far a pair of GPUs may be behind the usual pair of its node."""


def links(facts: Facts) -> Judged:
    """All links between the GPUs of a node are up."""
    faults, peaks = [], []
    for node, device in each_gpu(facts):
        peak = device.info.link_peak_bytes_per_s
        others = of_others(facts, device, lambda one: one.info.link_peak_bytes_per_s)
        sheet = sheet_of(device)
        alone = sum(1 for one in node.devices if one.info.name == device.info.name) == 1
        of_sheet = None if sheet is None or alone else sheet.link_bytes_per_s
        usual = max([*others, *([of_sheet] if of_sheet else [])], default=None)
        if peak is not None:
            peaks.append(peak / 1e9)
        if usual and (peak or 0.0) < 0.99 * usual:
            seen = f"links of {(peak or 0.0) / 1e9:,.0f} GB/s are up"
            advice = "see `nvidia-smi nvlink -s` for the dead one; reset the node, or have it serviced"
            faults.append(Fault(place(node, device), seen, f"{usual / 1e9:,.0f} GB/s", advice))
    return Judged(f"{span(peaks, ',.0f')} GB/s one way" if peaks else None, faults)


def all_reduce(facts: Facts) -> Judged:
    """Collectives and pairs attain their share of the links."""
    faults, seen = [], []
    for node in facts.nodes:
        working = [one for one in node.devices if one.attained and one.attained.all_reduce_bytes_per_s]
        for one in node.devices:
            if one.attained is not None and one.error:
                faults.append(Fault(place(node, one), one.error, "an all-reduce", "run with NCCL_DEBUG=INFO"))
        if not working:
            continue
        peak = min((_fabric(one) or 0.0 for one in working), default=0.0)
        attained = [one.attained.all_reduce_bytes_per_s or 0.0 for one in working if one.attained]
        bus = min(attained)
        seen.append(bus / 1e9)
        if peak and bus < LINK_SHARE * peak:
            faults.append(
                Fault(
                    f"{node.name}, {len(working)} GPUs",
                    f"all-reduce at {bus / 1e9:,.0f} GB/s",
                    f"{LINK_SHARE * peak / 1e9:,.0f} GB/s or more, of links of {peak / 1e9:,.0f}",
                    "run with NCCL_DEBUG=INFO: it may go over PCIe or the network",
                )
            )
        faults += _slow_pairs(node, working, peak)
    return Judged(f"all-reduce at {span(seen, ',.0f')} GB/s" if seen else None, faults)


def _fabric(device: DeviceFacts) -> float | None:
    return device.info.link_peak_bytes_per_s or device.info.pcie_peak_bytes_per_s


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
                f"{node.name} GPU {index[one]} and GPU {index.get(other, '?')}",
                f"{rate / 1e9:,.0f} GB/s between them",
                f"{bound / 1e9:,.0f} GB/s or more",
                "see `nvidia-smi nvlink -s` and `nvidia-smi topo -m` for a dead or slow link",
            )
