"""What heat, power and speed cost each other on a machine, over the layouts of a recorded search.

    python -m benchmarks.heat SEARCH|FILE.tar.xz [--json FILE.json] [--ambient-c 22]

SEARCH is one of the MLflow store in use, FILE one of `benchmarks.convert.archive`. Printed are, of each layout that was
measured, speed, power, energy, how warm its GPUs got and how fast they ran, the time in which something held their
clocks down, by cause, and what the hottest of them costs; which layouts no other beats on speed, power and heat at
once; and how cool and frugal a layout can be had for so much less speed. `--json` writes all of it, GPU by GPU, with
what must be known of the machine, in a form that benchmarks/data/README.md describes and `wattune compare` reads.
"""

from __future__ import annotations

import argparse
import json
import math
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.convert.archive import UUID, unpack
from service.answers.candidates import Candidate
from service.answers.page.devices import cost_of_slowest
from service.answers.page.evidence import device_means
from service.answers.ranking import compared
from service.answers.tables import render
from service.errors import InputError
from service.goals import Comparison
from service.home import Home, tracking_uri
from service.metrics import Doubt, Method
from service.pareto import pareto_front
from service.record.exported import document
from service.record.results import Results, SearchRecord, TrialRecord
from service.result import DeviceRecord, TrialResult
from telemetry.samples import THROTTLE_CAUSES

FORMAT = "wattune-heat/1"

SPEED, POWER, ENERGY, HOTTEST = "tokens_per_s", "mean_power_w", "joules_per_token", "hottest_gpu_c"
BEATEN_ON = (SPEED, POWER, HOTTEST)
FIGURES = (SPEED, "tokens_per_s_per_gpu", POWER, ENERGY, "throttle_ratio", "power_cap_ratio", "gpu_temp_rise_c")
"""Of the record, that each layout has."""

SLOWER = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Shares of the best speed that are given up."""


@dataclass(frozen=True)
class Hottest:
    """The GPU that was warmest on average, of two or more.

    `warmer_c`: than the mean of the others. `slower_mhz`: its mean SM clock below that of the others, negative if it
    was faster. `cost`: the share by which the layout would be faster if this GPU had the mean clock of the others and
    speed followed the clock of the slowest: an upper bound, and 0 where it was no slower.
    """

    device: str
    warmer_c: float
    slower_mhz: float | None
    cost: float | None


@dataclass(frozen=True)
class LayoutHeat:
    """A layout as it was measured, by the means of its trials, and each of its GPUs over all of their windows.

    `figures` are of the record, by name, `methods` how they came about where that is not plain. `gpus` is empty where
    the record has nothing of single GPUs. `front`: whether none beats it on all of `BEATEN_ON`.
    """

    layout: Candidate
    figures: dict[str, float]
    gpus: tuple[DeviceRecord, ...]
    front: bool = False

    @property
    def hottest_gpu_c(self) -> float | None:
        """The mean temperature of the GPU that was warmest on average."""
        return max(_known(gpu.mean_gpu_temp_c for gpu in self.gpus), default=None)

    @property
    def peak_gpu_c(self) -> float | None:
        """The hottest reading of any GPU."""
        return max(_known(gpu.peak_gpu_temp_c for gpu in self.gpus), default=None)

    @property
    def mean_gpu_c(self) -> float | None:
        return _mean(gpu.mean_gpu_temp_c for gpu in self.gpus)

    @property
    def spread_c(self) -> float | None:
        """Between the means of the warmest and the coolest GPU."""
        return _spread(gpu.mean_gpu_temp_c for gpu in self.gpus)

    @property
    def clock_mhz(self) -> float | None:
        """The mean SM clock of all GPUs."""
        return _mean(gpu.mean_sm_clock_mhz for gpu in self.gpus)

    @property
    def clock_spread_mhz(self) -> float | None:
        return _spread(gpu.mean_sm_clock_mhz for gpu in self.gpus)

    @property
    def throttle_s(self) -> dict[str, float | None]:
        """GPU-seconds by cause; None where it is not known of a GPU."""
        return {cause: _total([gpu.throttle_s.get(cause) for gpu in self.gpus]) for cause in THROTTLE_CAUSES}

    @property
    def hottest(self) -> Hottest | None:
        """None unless the temperatures of two GPUs or more are known."""
        temperatures = [gpu.mean_gpu_temp_c for gpu in self.gpus]
        known = _known(temperatures)
        if len(known) < 2 or len(known) < len(temperatures):
            return None
        place = known.index(max(known))
        gpu, others = self.gpus[place], [one for one in self.gpus if one is not self.gpus[place]]
        warm, clock = _mean(one.mean_gpu_temp_c for one in others), _mean(one.mean_sm_clock_mhz for one in others)
        assert warm is not None
        mine = gpu.mean_sm_clock_mhz
        if clock is None or mine is None:
            return Hottest(gpu.device, known[place] - warm, None, None)
        return Hottest(gpu.device, known[place] - warm, clock - mine, max(0.0, clock / mine - 1) if mine else None)

    def value(self, name: str) -> float | None:
        """A figure of the record, or `HOTTEST`."""
        return self.hottest_gpu_c if name == HOTTEST else self.figures.get(name)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        temperatures = {"mean": self.mean_gpu_c, "hottest_gpu_mean": self.hottest_gpu_c, "peak": self.peak_gpu_c}
        clocks = [gpu.mean_sm_clock_mhz for gpu in self.gpus]
        methods = {name: self.layout.methods[name] for name in self.figures if name in self.layout.methods}
        return {
            "layout": self.layout.label,
            "config": self.layout.layout.to_dict(),
            "trials": [trial.trial_id for trial in self.layout.trials],
            **{name: self.figures.get(name) for name in FIGURES},
            "half_widths": {name: self.layout.intervals[name] for name in FIGURES if name in self.layout.intervals},
            "methods": methods,
            "gpu_temp_c": temperatures | {"spread": self.spread_c},
            "sm_clock_mhz": {"mean": self.clock_mhz, "spread": self.clock_spread_mhz},
            "slowest_gpu_cost": cost_of_slowest(clocks) if len(clocks) > 1 else None,
            "throttle_s": self.throttle_s,
            "hottest": self.hottest and asdict(self.hottest),
            "gpus": [asdict(gpu) | {"mean_power_w": gpu.mean_power_w} for gpu in self.gpus],
            "front": self.front,
        }


@dataclass(frozen=True)
class Heat:
    """A search's layouts, the fastest first, and what must be known of the machine; `unknown` says what is not."""

    search: SearchRecord
    layouts: tuple[LayoutHeat, ...]
    ambient_c: float | None
    unknown: tuple[str, ...]

    def trade(self) -> list[dict[str, Any]]:
        """For each of `SLOWER`, the coolest and the most frugal of the layouts that are at most so much slower than the
        fastest, and how far that is off the fastest itself; of those whose figures are known."""
        fastest, found = self.layouts[0], []
        for slower in SLOWER:
            among = [one for one in self.layouts if one.figures[SPEED] >= (1 - slower) * fastest.figures[SPEED]]
            row: dict[str, Any] = {"slower": slower}
            for name in (HOTTEST, POWER, ENERGY):
                known = [(value, one) for one in among if (value := one.value(name)) is not None]
                if not known:
                    continue
                value, least = min(known, key=lambda pair: pair[0])
                base = fastest.value(name)
                row[name] = {
                    "layout": least.layout.label,
                    "value": value,
                    "off_fastest": None if base is None else value - base,
                }
            found.append(row)
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, with GPUs by the first eight digits of their UUIDs; `wattune compare` reads it as a search."""
        environment, params = self.search.environment, self.search.params
        whole = {
            "format": FORMAT,
            "machine": {
                "gpus": environment.get("devices"),
                "accelerator": params.get("accelerator"),
                "nodes": params.get("nodes"),
                "gpus_per_node": params.get("gpus_per_node"),
                "driver": environment.get("driver"),
                "power_limit_w": environment.get("power_limit_w"),
                "ambient_c": self.ambient_c,
            },
            "unknown": list(self.unknown),
            "layouts": [one.to_dict() for one in self.layouts],
            "trade": self.trade(),
            **document(self.search),
        }
        shortened: dict[str, Any] = json.loads(UUID.sub(r"\1", json.dumps(whole)))
        return shortened


def heat(results: Results, key: str, ambient_c: float | None = None) -> Heat:
    """What a search's record says. Raises `InputError` for one that has no measured speed of any layout."""
    search = results.search(key)
    comparison = compared(search)
    by_id = {trial.trial_id: trial for trial in search.trials}
    layouts = [
        LayoutHeat(one, figures, _gpus(results, [by_id[trial.trial_id] for trial in one.trials]))
        for one in comparison.results
        if SPEED in (figures := _figures(comparison, one))
    ]
    if not layouts or comparison.doubt(SPEED) is not Doubt.MEASURED:
        raise InputError(f"search {search.id}: no trial of it was measured in full")
    layouts.sort(key=lambda one: -one.figures[SPEED])
    return Heat(search, tuple(_with_front(layouts)), ambient_c, tuple(_unknown(search, layouts, ambient_c)))


def _figures(comparison: Comparison[Candidate], one: Candidate) -> dict[str, float]:
    values = {name: comparison.value(one, name) for name in FIGURES}
    return {name: value for name, value in values.items() if value is not None}


def _gpus(results: Results, trials: Sequence[TrialRecord]) -> tuple[DeviceRecord, ...]:
    """Each GPU of some trials over all of their windows, by node and name."""
    found: dict[str, list[DeviceRecord]] = {}
    for trial in trials:
        for device in _devices(results, trial):
            found.setdefault(device.device, []).append(device)
    return tuple(_together(windows) for _, windows in sorted(found.items()))


def _devices(results: Results, trial: TrialRecord) -> Sequence[DeviceRecord]:
    """What the devices of a trial did: as it was recorded, or by the samples of records made before that was kept."""
    result = results.result_of(trial)
    if result is None or result.devices:
        return result.devices if result else ()
    samples = results.samples_of(trial)
    return [] if samples is None or not samples.num_rows else list(_of_samples(samples, result))


def _of_samples(samples: pa.Table, result: TrialResult) -> Iterator[DeviceRecord]:
    """By readings inside the windows. Counters that were read but once there tell nothing."""
    windows = {device: window for window in result.windows for device in window.devices}
    for device in device_means(samples, result.windows):
        window = windows.get(device.device)
        if window is None:
            continue
        rows = samples.filter(pc.field("device") == device.device).sort_by("time_ns")
        seconds, power_w = (window.end_ns - window.start_ns) / 1e9, device.means.get("power_w")
        clocks = rows["sm_clock_mhz"].drop_null().to_numpy()
        yield DeviceRecord(
            device=device.device,
            node_id=window.node_id,
            duration_s=seconds,
            energy_j=None if power_w is None else power_w * seconds,
            mean_sm_clock_mhz=device.means.get("sm_clock_mhz"),
            min_sm_clock_mhz=float(clocks.min()) if len(clocks) else None,
            mean_gpu_temp_c=device.means.get("gpu_temp_c"),
            peak_gpu_temp_c=device.peaks.get("gpu_temp_c"),
            peak_hbm_temp_c=device.peaks.get("hbm_temp_c"),
            throttle_s={cause: _grown_s(rows, f"throttle_{cause}_ns", seconds) for cause in THROTTLE_CAUSES},
        )


def _grown_s(rows: pa.Table, column: str, seconds: float) -> float | None:
    """What a counter of ns grew by in a window of so many seconds, at the rate between its first and last reading."""
    known = rows.select(["time_ns", column]).drop_null()
    times, values = known["time_ns"].to_numpy(), known[column].to_numpy()
    if len(times) < 2 or np.any(values[1:] < values[:-1]):
        return None
    return float(values[-1] - values[0]) / float(times[-1] - times[0]) * seconds


def _together(windows: Sequence[DeviceRecord]) -> DeviceRecord:
    """One GPU over several windows: means weighted by time, sums, and extremes."""
    lengths_s = [one.duration_s or 0.0 for one in windows]
    seconds = math.fsum(lengths_s)

    def mean(of: Callable[[DeviceRecord], float | None]) -> float | None:
        values = zip(windows, lengths_s, strict=True)
        total = _total([None if (value := of(one)) is None else value * length_s for one, length_s in values])
        return None if total is None else total / seconds

    return replace(
        windows[0],
        duration_s=seconds,
        energy_j=_total([one.energy_j for one in windows]),
        mean_sm_clock_mhz=mean(lambda one: one.mean_sm_clock_mhz),
        min_sm_clock_mhz=min(_known(one.min_sm_clock_mhz for one in windows), default=None),
        mean_gpu_temp_c=mean(lambda one: one.mean_gpu_temp_c),
        peak_gpu_temp_c=max(_known(one.peak_gpu_temp_c for one in windows), default=None),
        peak_hbm_temp_c=max(_known(one.peak_hbm_temp_c for one in windows), default=None),
        throttle_s={cause: _total([one.throttle_s.get(cause) for one in windows]) for cause in THROTTLE_CAUSES},
    )


def _with_front(layouts: Sequence[LayoutHeat]) -> Iterator[LayoutHeat]:
    """The layouts, those marked that none beats on all of `BEATEN_ON`; of what none has, on the others."""
    names = [name for name in BEATEN_ON if any(one.value(name) is not None for one in layouts)]
    whole = [one for one in layouts if all(one.value(name) is not None for name in names)]
    costs = np.array([[(-1 if name == SPEED else 1) * (one.value(name) or 0.0) for name in names] for one in whole])
    front = {id(whole[place]) for place in pareto_front(costs)}
    return (replace(one, front=id(one) in front) for one in layouts)


def _unknown(search: SearchRecord, layouts: Sequence[LayoutHeat], ambient_c: float | None) -> Iterator[str]:
    """What a reader who compares machines would have to know, and the record does not say."""
    if ambient_c is None:
        yield "ambient temperature: no sensor of a GPU tells it; give --ambient-c if you measured it at the inlet"
    yield "cooling, case and airflow: not recorded"
    for name, what in (("driver", "driver"), ("power_limit_w", "power limit"), ("git_commit", "commit of Wattune")):
        if name not in search.environment:
            yield f"{what}: not recorded"
    without = [one for one in layouts if not one.gpus]
    if without:
        yield f"single GPUs: not recorded for {len(without)} of {len(layouts)} layouts"
    told = [one for one in layouts if one.gpus]
    lacking = [cause for cause in THROTTLE_CAUSES if told and all(one.throttle_s[cause] is None for one in told)]
    if lacking:
        yield f"seconds of throttling for {', '.join(lacking)}: no counter, or read too seldom in the windows"
    unsteady = [one for one in layouts if "gpu_temp_rise_c" not in one.figures]
    if unsteady:
        yield (
            f"thermal steady state: looked at in finalists alone, not in {len(unsteady)} of {len(layouts)} layouts, "
            "whose temperatures are of short windows"
        )
    if any(one.layout.methods.get(POWER) == Method.ESTIMATED for one in layouts):
        yield "power and energy: estimated, not measured"


def text(found: Heat) -> str:
    """For a terminal."""
    search = found.search
    environment = search.environment
    facts = [environment.get("devices"), environment.get("driver") and f"driver {environment['driver']}"]
    limit = environment.get("power_limit_w")
    facts += [limit and f"power limit {limit} W", f"search {search.id} ({search.name})"]
    ambient = "not known" if found.ambient_c is None else f"{found.ambient_c:g} degC, by who ran this"
    lines = [", ".join(filter(None, facts)), f"ambient: {ambient}", "", _layouts_table(found), ""]
    lines += [
        "* no other layout is faster, cooler and draws less at once; throttled: GPU-seconds of all GPUs, by cause"
    ]
    lines += ["", _trade_table(found), "", *(f"not known: {one}" for one in found.unknown)]
    return "\n".join(lines)


def _layouts_table(found: Heat) -> str:
    headings = ["layout", "tokens/s", "W", "J/token", "degC mean", "hottest", "peak", "spread", "SM MHz", "spread"]
    rows = []
    for one in found.layouts:
        hottest = one.hottest
        throttled = {cause: seconds for cause, seconds in one.throttle_s.items() if seconds}
        rows.append(
            [
                f"{one.layout.label}{' *' if one.front else ''}",
                _written(one.figures.get(SPEED), ",.0f"),
                _written(one.figures.get(POWER), ",.0f"),
                _written(one.figures.get(ENERGY), ".4g"),
                *(_written(value, ".1f") for value in (one.mean_gpu_c, one.hottest_gpu_c, one.peak_gpu_c)),
                _written(one.spread_c, ".1f"),
                _written(one.clock_mhz, ",.0f"),
                _written(one.clock_spread_mhz, ",.0f"),
                _written(None if hottest is None else hottest.cost, ".1%"),
                ", ".join(f"{cause} {seconds:.3g} s" for cause, seconds in throttled.items()) or "-",
            ]
        )
    return render([*headings, "hottest costs up to", "throttled"], rows)


def _trade_table(found: Heat) -> str:
    rows = []
    for row in found.trade():
        cells = [f"{row['slower']:.0%}"]
        for name, unit, style in ((HOTTEST, "degC", ".1f"), (POWER, "W", ",.0f"), (ENERGY, "J/token", ".4g")):
            least = row.get(name)
            off = None if least is None else least["off_fastest"]
            told = "" if off is None else f" ({off:+{style}})"
            cells.append("-" if least is None else f"{least['value']:{style}} {unit}{told}")
        rows.append(cells)
    return render(["slower by up to", "hottest GPU, at least", "power, at least", "energy, at least"], rows)


def _written(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def _known(values: Any) -> list[float]:
    return [value for value in values if value is not None]


def _total(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return math.fsum(known) if known and len(known) == len(values) else None


def _mean(values: Any) -> float | None:
    every = list(values)
    total = _total(every)
    return None if total is None else total / len(every)


def _spread(values: Any) -> float | None:
    every = list(values)
    known = _known(every)
    return max(known) - min(known) if known and len(known) == len(every) else None


@contextmanager
def _recorded(target: str, uri: str | None) -> Iterator[tuple[Results, str]]:
    """The store that has a search, and its id: that in use, or one made for a file."""
    if not Path(target).is_file():
        yield Results(tracking_uri(uri)), target
        return
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder, "home")).create()
        try:
            search = unpack(Path(target), home.tracking_uri, home, Path(folder, "unpacked"))
        except (OSError, tarfile.TarError, KeyError, ValueError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(f"{target}: is no file of benchmarks.convert.archive: {said}") from None
        yield Results(home.tracking_uri), search


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search", metavar="SEARCH|FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there")
    parser.add_argument("--ambient-c", type=float, help="degC of the air at the inlet while the search ran")
    parser.add_argument("--tracking-uri", help="MLflow store; default: MLFLOW_TRACKING_URI, else that of WATTUNE_HOME")
    arguments = parser.parse_args(argv)
    try:
        with _recorded(arguments.search, arguments.tracking_uri) as (results, search):
            found = heat(results, search, arguments.ambient_c)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
    except InputError as error:
        parser.exit(2, f"heat: {error}\n")
    except OSError as error:
        parser.exit(2, f"heat: {arguments.json}: cannot be written: {error.strerror}\n")
    print(text(found))


if __name__ == "__main__":
    main()
