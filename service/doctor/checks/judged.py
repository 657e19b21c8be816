"""What a check comes to, and what checks have in common: devices, their like, and what is slower than it should be."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from search_spaces.hardware import Accelerator, accelerator_named
from service.doctor.facts import DeviceFacts, Facts, NodeFacts
from telemetry.devices import is_host

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


HISTORY = 10
"""Earlier examinations whose median a device is held against."""


def each_gpu(facts: Facts) -> Iterator[tuple[NodeFacts, DeviceFacts]]:
    return ((node, device) for node, device in facts.devices() if not is_host(device.info.kind))


def place(node: NodeFacts, device: DeviceFacts) -> str:
    if is_host(device.info.kind):
        return f"{node.name}, processors"
    return f"{node.name} GPU {device.info.index} ({device.info.uuid})"


def sheet_of(device: DeviceFacts) -> Accelerator | None:
    return accelerator_named(device.info.name)


def of_others(facts: Facts, device: DeviceFacts, figure: Callable[[DeviceFacts], float | None]) -> list[float]:
    """A figure of all other devices of the same name."""
    same = [one for _, one in facts.devices() if one.info.name == device.info.name and one is not device]
    return [value for one in same if (value := figure(one)) is not None]


def behind(
    now: float,
    others: Sequence[float],
    past: Sequence[float],
    behind_peers: float,
    behind_itself: float,
    floor: float | None = None,
) -> tuple[float, str] | None:
    """What it should be at least, and why; None for what is well."""
    if others and now < (1 - behind_peers) * (usual := statistics.median(others)):
        return (1 - behind_peers) * usual, f"as {_count(len(others))}: it is {1 - now / usual:.1%} slower"
    if past and now < (1 - behind_itself) * (was := statistics.median(past)):
        return (1 - behind_itself) * was, f"as it was before: it got {1 - now / was:.1%} slower"
    if floor is not None and now < floor:
        return floor, "by its data sheet"
    return None


def _count(number: int) -> str:
    return "the other one" if number == 1 else f"{number} others"


def span(values: Sequence[float] | set[int], style: str) -> str:
    low, high = format(min(values), style), format(max(values), style)
    return low if low == high else f"{low} to {high}"
