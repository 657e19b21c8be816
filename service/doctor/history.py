"""What an examination adds to what is known of devices."""

from __future__ import annotations

import time

from service.doctor.facts import Facts, NodeFacts
from service.history import Figures


def host_key(node: NodeFacts) -> str:
    """What a node's processors are called, as telemetry does."""
    return f"cpu:{node.hostname}"


def figures(facts: Facts) -> dict[str, Figures]:
    """What this examination adds, by UUID."""
    now = time.time()
    found = {
        device.info.uuid: Figures(
            now,
            attained.flops,
            attained.memory_bytes_per_s,
            attained.launch_s,
            attained.all_reduce_bytes_per_s,
            None if device.load is None else device.load.mean_sm_clock_mhz,
        )
        for _, device in facts.devices()
        if (attained := device.attained) is not None
    }
    hosts = ((host_key(node), node.host) for node in facts.nodes)
    return found | {
        key: Figures(now, host.flops, host.memory_bytes_per_s, host.launch_s) for key, host in hosts if host is not None
    }
