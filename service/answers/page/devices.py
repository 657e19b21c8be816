"""Tables of GPUs and of time: breakdown by rank, means by GPU, imbalance, one trial over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from service.answers.candidates import Candidate
from service.answers.page.evidence import GAUGES, TRAFFIC, DeviceMeans, Evidence, Trace
from service.answers.page.layouts import LAYOUT
from service.answers.page.table import Column, Lacking, Table
from service.metrics import Method
from trainables.breakdown import Breakdown

BROKEN_DOWN = 6
"""Layouts whose steps are broken down by rank, at most."""

PARTS = {
    "matmul_s": "matrix products",
    "attention_s": "attention",
    "other_s": "other computation",
    "memory_copy_s": "copies",
    "exposed_communication_s": "exposed communication",
    "idle_s": "idle",
}
GUESSED = "Power is estimated, not measured: these devices do not tell theirs."
STEP = "end of an optimizer step"
OVERLAPPED = "overlapped_communication_s"

DEVICE = Column("device", "GPU")


def breakdown(evidence: Evidence) -> Table | Lacking:
    """Where a step's time goes on each pipeline rank, in s: means over the ranks of the mesh that share it."""
    rows: list[dict[str, Any]] = []
    layouts = 0
    for one in evidence.shown:
        result = evidence.result(one)
        by_stage: dict[int, list[Breakdown]] = {}
        for rank in result.ranks if result else ():
            if rank.breakdown is not None:
                by_stage.setdefault(rank.coordinates["pp"], []).append(rank.breakdown)
        if not by_stage or layouts == BROKEN_DOWN:
            continue
        layouts += 1
        for stage, ranks in sorted(by_stage.items()):
            names = [*PARTS, OVERLAPPED, "span_s"]
            means = {name: statistics.fmean(getattr(times, name) for times in ranks) for name in names}
            rows.append({"layout": one.label, "rank": stage, "ranks": len(ranks)} | means)
    if not rows:
        return Lacking("No trial has a breakdown of a step by rank: `measurement.breakdown` was off, or it is older.")
    columns = [LAYOUT, Column("rank", "pipeline rank"), Column("ranks", "GPUs")]
    columns += [Column(name, title, "s") for name, title in PARTS.items()]
    columns += [Column(OVERLAPPED, "overlapped communication", "s"), Column("span_s", "whole step", "s")]
    return Table(tuple(columns), rows)


def by_device(evidence: Evidence) -> Table | Lacking:
    """Means of each device over each trial's window, of one trial a layout."""
    rows: list[dict[str, Any]] = []
    for one in evidence.shown:
        for device in evidence.devices_of(one):
            rows.append(
                {"layout": one.label, "device": device.name, "node": device.node}
                | device.means
                | {f"peak_{name}": value for name, value in device.peaks.items()}
            )
    if not rows:
        return Lacking("The record has no samples of its GPUs.")
    gauges = [(name, title, unit) for name, (title, unit) in GAUGES.items()]
    gauges += [(name, title, "GB/s") for name, (title, _) in TRAFFIC.items()]
    columns = [LAYOUT, DEVICE]
    for name, title, unit in gauges:
        if any(name in row for row in rows):
            columns.append(Column(name, f"mean {title}", unit, ",.1f"))
        if any(f"peak_{name}" in row for row in rows):
            columns.append(Column(f"peak_{name}", f"peak {title}", unit, ",.1f"))
    missing = [title for name, (title, _) in TRAFFIC.items() if not any(name in row for row in rows)]
    note = f"Not known by GPU, as counters are read too seldom in a window: {', '.join(missing)}." if missing else ""
    return Table(tuple(columns), rows, f"{note} {_guessed(evidence.shown)}".strip())


def imbalance(evidence: Evidence) -> Table | Lacking:
    """How far each GPU of a trial was off the mean of all, and what the slowest one cost; see `cost_of_slowest`."""
    rows: list[dict[str, Any]] = []
    for one in evidence.shown:
        devices = evidence.devices_of(one)
        if len(devices) < 2:
            continue
        warm, clocks, power = (_off(devices, name) for name in ("gpu_temp_c", "sm_clock_mhz", "power_w"))
        cost = cost_of_slowest([device.means.get("sm_clock_mhz") for device in devices])
        for place, device in enumerate(devices):
            row: dict[str, Any] = {"layout": one.label, "device": device.name, "node": f"node {device.node}"}
            row |= {"warmer_c": warm[place], "clock_mhz": clocks[place], "power_w": power[place]}
            speed = one.metrics.get("tokens_per_s")
            row["cost"] = None if cost is None or speed is None else cost * speed
            row["cost_method"] = "estimated"
            rows.append(row)
    rows = [row for row in rows if any(row[name] is not None for name in ("warmer_c", "clock_mhz", "power_w"))]
    if not rows:
        return Lacking("No trial has samples of two GPUs or more to compare.")
    columns = [
        LAYOUT,
        DEVICE,
        Column("warmer_c", "temperature off the mean", "degC", "+.1f"),
        Column("clock_mhz", "clock off the mean", "MHz", "+,.0f"),
        Column("power_w", "power off the mean", "W", "+,.1f"),
        Column("cost", "the slowest costs up to", "tokens/s", ",.0f"),
    ]
    return Table(tuple(column for column in columns if any(row.get(column.key) is not None for row in rows)), rows)


def cost_of_slowest(clocks: Sequence[float | None]) -> float | None:
    """The share by which a trial would be faster if its slowest GPU had the mean clock of all, where its speed follows
    the clock of the slowest; None unless all clocks are known. An upper bound: what is bound by memory or fabrics does
    not follow the clock.
    """
    known = [clock for clock in clocks if clock is not None]
    if not known or len(known) < len(clocks) or min(known) <= 0:
        return None
    return statistics.fmean(known) / min(known) - 1


def over_time(evidence: Evidence) -> Table | Lacking:
    """Power, clock and temperature of each device of one trial, the first on the front that has samples."""
    trace = evidence.trace
    if trace is None:
        return Lacking("The record has no samples over time of a layout on the front.")
    return of_trace(trace)


def of_trace(trace: Trace) -> Table | Lacking:
    """Power, clock and temperature of a trial's devices."""
    rows = [
        {"device": name, "gauge": column, "quantity": GAUGES[column][0], "time_s": time_s, "value": value}
        for name, columns in trace.series.items()
        for column, points in columns.items()
        for time_s, value in points
    ]
    if not rows:
        return Lacking("The samples of the trial hold no power, clock or temperature.")
    rows += [{"device": None, "quantity": STEP, "time_s": end} for end in trace.steps_s]
    columns = (DEVICE, Column("quantity", "quantity"), Column("time_s", "time in the window", "s", ".2f"))
    value = Column("value", "value, in W, MHz or degC", None, ",.1f")
    note = f"Of {trace.label}. Vertical lines mark ends of optimizer steps. {GUESSED if trace.guessed else ''}"
    return Table((*columns, value), rows, note.strip())


def _guessed(some: Sequence[Candidate]) -> str:
    """What a reader has to know of power where it is not measured."""
    return GUESSED if any(one.methods.get("mean_power_w") == Method.ESTIMATED for one in some) else ""


def _off(devices: Sequence[DeviceMeans], name: str) -> list[float | None]:
    """How far each device's mean is off that of all; None for all unless all are known."""
    known = [device.means[name] for device in devices if name in device.means]
    if len(known) < len(devices):
        return [None] * len(devices)
    return [value - statistics.fmean(known) for value in known]
