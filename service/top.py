"""Every GPU of a cluster, live, as the telemetry of the searches that run there sees it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import ray
from ray.exceptions import RayError

from service.answers.tables import render
from service.cluster import joined, shown, within
from service.errors import InputError
from service.metrics import MARKS
from service.remote import call
from telemetry.actor import NodeState, Telemetry, Work, find_telemetry
from telemetry.devices import DeviceInfo

PERIOD_S = 1.0
ANSWER_S = 2.0

HEADINGS = ("node", "GPU", "W", "degC", "MHz", "GiB", "busy", "throttled by", "trial", "phase", "tokens/s", "layout")
_UNUSED = ("-",) * 4


def watch(address: str | None) -> Generator[list[NodeState], None, None]:
    """What each node is at, every second until the cluster is gone; empty while no search runs.

    `address` is that of the Ray cluster, such as ``head:6379``; default: RAY_ADDRESS, else the Ray of this machine.
    Raises `InputError` if no cluster answers there, or none of its nodes has telemetry in the beginning.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    with joined(address):
        states = poll()
        if not states:
            raise InputError(f"no telemetry at {shown(address)}: no search is running there")
        while True:
            yield states
            time.sleep(PERIOD_S)
            try:
                states = within(2 * ANSWER_S, poll)
            except TimeoutError:
                return


def show(watched: Iterator[list[NodeState]], once: bool) -> None:
    """Print the first of what was watched if `once`, or where nobody looks; else draw each until the user ends it."""
    states = next(watched)
    if once or not sys.stdout.isatty():
        print(page(states))
        return
    with contextlib.suppress(KeyboardInterrupt), _screen():
        for now in chain([states], watched):
            _draw(page(now) if now else "no search is running")


def poll() -> list[NodeState]:
    """What each node is at now, by host name; without nodes that do not answer within `ANSWER_S`."""
    asked = [call(actor, Telemetry.state) for actor in find_telemetry().values()]
    if not asked:
        return []
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
    states = []
    for reference in answered:
        try:
            states.append(ray.get(reference))
        except RayError:
            continue  # its search has just ended, or its node was lost
    return sorted(states, key=lambda state: (state.hostname, state.node_id))


def page(states: Iterable[NodeState]) -> str:
    """Totals, and a table with a row for each GPU and trial. Of a node that several searches watch, one's samples."""
    nodes: dict[str, NodeState] = {}
    works: dict[str, dict[Work, None]] = {}
    for state in states:
        nodes[state.node_id] = state
        for work in state.works:
            works.setdefault(work.device, {})[work] = None
    rows: list[list[str]] = []
    watts: list[float | None] = []
    for state in nodes.values():
        for info in sorted(state.devices, key=lambda info: info.index):
            sample = state.latest.get(info.uuid, {})
            watts.append(sample.get("power_w"))
            device = [state.hostname, str(info.index), *_device(info, sample, state.throttled_by.get(info.uuid, ()))]
            cells = [_work(work) for work in works.get(info.uuid, ())] or [_UNUSED]
            rows += [[*(device if place == 0 else [""] * len(device)), *cell] for place, cell in enumerate(cells)]
    trials = {work.trial_id for of_device in works.values() for work in of_device}
    known = [power for power in watts if power is not None]
    power = f"{sum(known):,.0f} W" if known else "-"
    totals = f"nodes: {len(nodes)}  devices: {len(watts)}  power: {power}  trials: {len(trials)}"
    return f"{time.strftime('%H:%M:%S')}  {totals}\n\n{render(HEADINGS, rows)}"


def _device(info: DeviceInfo, sample: dict[str, Any], causes: Sequence[str]) -> tuple[str, ...]:
    def figure(style: str, *columns: str) -> str:
        known = [sample[column] for column in columns if sample.get(column) is not None]
        return format(known[0], style) if known else "-"

    watts = figure(",.0f", "power_w")
    return (
        watts if watts == "-" else watts + MARKS.get(info.energy_method, ""),
        figure(".0f", "gpu_temp_c", "cpu_temp_c"),
        figure(",.0f", "sm_clock_mhz", "cpu_clock_mhz"),
        figure(".1f", "memory_used_gib"),
        figure(".0%", "gpu_utilisation", "cpu_utilisation"),
        ", ".join(causes) or "-",
    )


def _work(work: Work) -> tuple[str, ...]:
    return work.trial_id, work.phase, "-" if work.tokens_per_s is None else f"{work.tokens_per_s:,.0f}", work.layout


@contextmanager
def _screen() -> Iterator[None]:
    """A screen of our own in place of the terminal's."""
    sys.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        yield
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()


def _draw(text: str) -> None:
    """Replace what the screen shows by as much of the text as fits."""
    columns, rows = shutil.get_terminal_size()
    lines = [line[:columns] for line in text.splitlines()]
    if len(lines) > rows:
        lines[rows - 1 :] = [f"... and {len(lines) - rows + 1} more"]
    sys.stdout.write("\x1b[H" + "\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J")
    sys.stdout.flush()
