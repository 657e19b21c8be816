"""What is wrong with the machines, by facts alone: a table of checks, and all that they find, in one line each."""

from __future__ import annotations

from service.doctor.checks import gpus, links, machines
from service.doctor.checks.judged import NOTHING, Check, Finding, Verdict
from service.doctor.facts import Facts


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


CHECKS: dict[str, Check] = {
    "answers": machines.answering,
    "driver": machines.drivers,
    "versions": machines.versions,
    "telemetry": gpus.fields,
    "power limit": gpus.power_limit,
    "clocks": gpus.clocks,
    "heat": gpus.heat,
    "ecc": gpus.ecc,
    "xid": gpus.xid,
    "products": gpus.products,
    "memory": gpus.memory,
    "launches": gpus.launches,
    "links": links.links,
    "collectives": links.all_reduce,
    "host": machines.host,
    "disk": machines.disk,
    "mlflow": machines.mlflow,
    "object store": machines.object_store,
    "host clocks": machines.host_clocks,
}
"""In the order in which they are told."""
