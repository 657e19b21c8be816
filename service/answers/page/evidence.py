"""All that a page is made of, read from the record once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from search_spaces import cost
from search_spaces.layout import Layout
from service.answers.candidates import Candidate
from service.answers.findings import Found
from service.answers.report import found
from service.goals import Comparison
from service.metrics import Method
from service.problem import Problem
from service.record.results import Results, SearchRecord
from service.result import NodeWindow, TrialResult
from telemetry.counters import integral
from telemetry.devices import is_host

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN = 20
"""Layouts of which figures show each one by itself: those on the front, then the best of the others."""

GAUGES = {
    "power_w": ("power", "W"),
    "sm_clock_mhz": ("SM clock", "MHz"),
    "gpu_temp_c": ("GPU temperature", "degC"),
    "hbm_temp_c": ("HBM temperature", "degC"),
    "cpu_clock_mhz": ("CPU clock", "MHz"),
    "cpu_temp_c": ("CPU temperature", "degC"),
}
"""Column of the samples -> what it is, and its unit."""

TRAFFIC = {
    "link": ("traffic between GPUs", ("link_rx_bytes", "link_tx_bytes")),
    "pcie": ("PCIe traffic", ("pcie_rx_bytes", "pcie_tx_bytes")),
}
"""Fabric -> what is counted, and the running totals that count it, both directions; in GB/s together."""

POINTS = 120
"""Points of one device's series over time."""


@dataclass(frozen=True)
class DeviceMeans:
    """One device over a trial's window.

    `name` is short, ``node1 gpu3``. `means` and `peaks` are over time, by column of `GAUGES`, and `means` of `TRAFFIC`
    in GB/s; what cannot be known of the samples is left out.
    """

    device: str
    node: int
    name: str
    means: dict[str, float]
    peaks: dict[str, float]


@dataclass(frozen=True)
class Trace:
    """One trial over time: name of the device -> column of `GAUGES` -> (s since the window began, value), and when
    optimizer steps ended, in s. `guessed`: whether power is estimated."""

    label: str
    series: dict[str, dict[str, list[tuple[float, float]]]]
    steps_s: tuple[float, ...]
    guessed: bool


@dataclass(frozen=True)
class Evidence:
    """What is known of a search.

    `problem` is None where its spec is out of reach. `predicted` has the figures that the cost model, resting on
    `source`, foretells of layouts. `results` is by id of trial, of those `shown` alone, as `devices` is; older records
    may lack both.
    """

    search: SearchRecord
    problem: Problem | None = None
    predicted: Mapping[Layout, Mapping[str, float]] = field(default_factory=dict)
    source: str | None = None
    results: Mapping[str, TrialResult] = field(default_factory=dict)
    devices: Mapping[str, tuple[DeviceMeans, ...]] = field(default_factory=dict)
    trace: Trace | None = None

    @cached_property
    def found(self) -> Found:
        """What findings are made of."""
        return found(self.search, self.problem)

    @property
    def comparison(self) -> Comparison[Candidate]:
        """All that is ranked."""
        return self.found.comparison

    @cached_property
    def front(self) -> list[Candidate]:
        """The layouts that no other beats."""
        return self.comparison.front()

    @cached_property
    def shown(self) -> list[Candidate]:
        """The layouts that are shown one by one, `SHOWN` at most, the best on the first objective first."""
        return shown(self.comparison)

    @property
    def left_out(self) -> int:
        """How many layouts are not among those."""
        return len(self.comparison.results) - len(self.shown)

    def result(self, candidate: Candidate) -> TrialResult | None:
        """The first of a layout's results that tells of its ranks, else the first one."""
        known = [self.results[trial.trial_id] for trial in candidate.trials if trial.trial_id in self.results]
        return next((one for one in known if any(rank.breakdown for rank in one.ranks)), known[0] if known else None)

    def devices_of(self, candidate: Candidate) -> tuple[DeviceMeans, ...]:
        """What the devices of the first of a layout's trials did, none where that is not known."""
        return next((self.devices[t.trial_id] for t in candidate.trials if self.devices.get(t.trial_id)), ())


def shown(comparison: Comparison[Candidate]) -> list[Candidate]:
    """See `Evidence.shown`."""
    if not comparison.objectives:
        return list(comparison.results[:SHOWN])
    metric, direction = next(iter(comparison.objectives.items()))
    ordered = comparison.ordered(comparison.results, metric, direction)
    front = {id(one) for one in comparison.front()}
    chosen = sorted(ordered, key=lambda one: id(one) not in front)[:SHOWN]
    return comparison.ordered(chosen, metric, direction)


def gather(
    results: Results, search: SearchRecord, problem: Problem | None, calibration: cost.Coefficients | None
) -> Evidence:
    """All of it from the record, and predictions by a calibration, None for machines of which nothing is known.

    Raises `InputError` if the store cannot be read.
    """
    bare = foretold(search, problem, calibration)
    by_id = {trial.trial_id: trial for trial in search.trials}
    known: dict[str, TrialResult] = {}
    devices: dict[str, tuple[DeviceMeans, ...]] = {}
    trace = None
    for candidate in bare.shown:
        for trial in candidate.trials:
            result = results.result_of(by_id[trial.trial_id])
            if result is not None:
                known[trial.trial_id] = result
        first = candidate.trials[0].trial_id
        samples = results.samples_of(by_id[first]) if first in known else None
        if samples is not None and samples.num_rows:
            devices[first] = device_means(samples, known[first].windows)
            if trace is None and candidate in bare.front:
                trace = trace_of(samples, known[first])
    return replace(bare, results=known, devices=devices, trace=trace)


def foretold(search: SearchRecord, problem: Problem | None, calibration: cost.Coefficients | None) -> Evidence:
    """The record alone, with what is predicted of the layouts that it has."""
    if problem is None or problem.shape is None or calibration is None:
        return Evidence(search, problem)
    layouts = dict.fromkeys(trial.layout for trial in search.trials)
    predicted = {layout: cost.predicted_metrics(layout, problem.workload, calibration) for layout in layouts}
    return Evidence(search, problem, predicted, calibration.told)


def device_means(samples: pa.Table, windows: Sequence[NodeWindow]) -> tuple[DeviceMeans, ...]:
    """Each device over the window on its node. `samples` are by `telemetry.samples.SCHEMA`, from inside the windows."""
    found = []
    for number, name, rows in _by_device(samples, windows):
        means: dict[str, float] = {}
        peaks: dict[str, float] = {}
        time_ns = rows["time_ns"].to_numpy()
        for column in GAUGES:
            known = rows[column].is_valid().to_numpy()
            if known.sum() >= 2:
                values, times = rows[column].drop_null().to_numpy(), time_ns[known]
                means[column] = mean_over_time(times, values)
                peaks[column] = float(values.max())
        for fabric, (_, columns) in TRAFFIC.items():
            rates = [_rate(time_ns, rows[column]) for column in columns]
            if (together := [rate for rate in rates if rate is not None]) and len(together) == len(rates):
                means[fabric] = sum(together) / 1e9
        found.append(DeviceMeans(rows["device"][0].as_py(), number, name, means, peaks))
    return tuple(found)


def mean_over_time(time_ns: np.ndarray, value: np.ndarray) -> float:
    """The mean of a state between its first and its last reading, by trapezoids: [n] ascending ns, [n] values.

    Unlike the mean of the readings it does not depend on how regular they are. Where they leave a gap of over a second,
    it is that of the readings.
    """
    first, last = int(time_ns[0]), int(time_ns[-1])
    try:
        return integral(time_ns, value, first, last) / ((last - first) / 1e9)
    except ValueError:
        return float(value.mean())


def trace_of(samples: pa.Table, result: TrialResult) -> Trace:
    """A trial over time, of at most `POINTS` points a device and column."""
    from telemetry.store import thin

    thinned = thin(samples, POINTS)
    starts = {device: window.start_ns for window in result.windows for device in window.devices}
    series = {}
    for _, name, rows in _by_device(samples, result.windows):
        device = rows["device"][0].as_py()
        began = starts.get(device, rows["time_ns"][0].as_py())
        series[name] = {
            column: [((time_ns - began) / 1e9, value) for time_ns, value in points]
            for column, points in thinned[device].items()
            if column in GAUGES
        }
    steps_s = tuple(float(end) for end in np.cumsum(result.step_times_s))
    return Trace(result.layout.label, series, steps_s, result.methods.get("mean_power_w") == Method.ESTIMATED)


def _by_device(samples: pa.Table, windows: Sequence[NodeWindow]) -> Iterator[tuple[int, str, pa.Table]]:
    """Each device's node by number, its short name, and its rows in order of time; nodes in order of the windows."""
    import pyarrow.compute as pc

    nodes = {device: number for number, window in enumerate(windows) for device in window.devices}
    heads = {}
    for device in pc.unique(samples["device"]).to_pylist():
        rows = samples.filter(pc.field("device") == device).sort_by("time_ns")
        heads[device] = nodes.get(device, 0), rows["index"][0].as_py() or 0, rows
    for device, (number, index, rows) in sorted(heads.items(), key=lambda one: one[1][:2]):
        kind = rows["kind"][0].as_py()
        short = f"cpu{index}" if device.startswith("cpu:") or (kind and is_host(kind)) else f"gpu{index}"
        yield number, f"node{number} {short}" if len(windows) > 1 else short, rows


def _rate(time_ns: np.ndarray, total: pa.ChunkedArray) -> float | None:
    """By how much a running total grew a second, between its first and its last reading; None if that is not known."""
    known = total.is_valid().to_numpy()
    values, times = total.drop_null().to_numpy().astype(float), time_ns[known]
    if len(values) < 2 or values[-1] < values[0]:
        return None
    return float(values[-1] - values[0]) / (float(times[-1] - times[0]) / 1e9)
