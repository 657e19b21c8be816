"""The cost model's coefficients from trials of the hardware at hand; see docs/cost.md."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from search_spaces import memory
from search_spaces.coefficients import BY_SLICES, LINK_SHARE, NETWORK_SHARE
from search_spaces.cost import Coefficients, Prediction, data_sheet, predict
from search_spaces.doubt import may_wait
from search_spaces.hardware import ACCELERATORS
from search_spaces.layout import Layout
from search_spaces.network import Curve, Curves, Network
from search_spaces.operators import OperatorTiming, Timings
from search_spaces.workload import Workload
from service.errors import InputError
from service.history import slowest_flops
from service.home import Home
from service.problem import Cluster, Interconnect
from service.record.results import SearchRecord

SPREADS = {
    "matmul_flops": 0.15,
    "attention_flops": 0.25,
    "fp32_speed": 0.3,
    "fp8_speed": 0.3,
    "memory_bytes_per_s": 0.25,
    "eager_bytes_per_s": 0.4,
    "states_bytes_per_s": 0.4,
    "link_bytes_per_s": 0.4,
    "network_bytes_per_s": 0.4,
    "idle_w": 0.25,
    "power_limit_w": 0.02,
    "joules_per_flop": 0.2,
    "joules_per_byte": 0.5,
    "joules_per_link_byte": 0.7,
    "matmul_half": 0.7,
    "host_time": 0.3,
    "fp8_launch_s": 0.7,
    "step_s": 0.7,
    "link_latency_s": 0.7,
    "network_latency_s": 0.7,
    "contention": 0.7,
    "expert_imbalance": 0.3,
    "offloaded_per_s": 1.0,
    "unlaunched_share": 0.2,
    "operators_in_step": 0.05,
    "launches_in_step": 0.1,
}
"""By how much a coefficient may be off, as standard deviation of its logarithm, before anything was measured."""

KEPT = ("source", *SPREADS)
"""What is kept of coefficients in the file of a calibration. Operators have a file of their own."""

MISFIT, MISFIT_WAITING = 0.025, 0.05
"""By how much the model itself is taken to be off a measurement, likewise, and where the step may be the CPU's: fitted
to all layouts of a machine, 252 on H100 and H200 are 2.6% off by root mean square, and 51 that may wait for the CPU,
all those in fp8 among them, 5.0%."""

NORMAL = 0.6745
"""The median distance from the median of a normal distribution, in its standard deviation."""

CANDIDATES = 400
"""Layouts that a calibration chooses among, at most."""

TRIAL_S, TRIAL_STEPS = 15.0, 8
"""What a trial takes: the time to start it, and the steps that it runs."""


@dataclass(frozen=True)
class Observation:
    """What a layout took: seconds a step, and watts of one of its GPUs, None where power was not measured."""

    layout: Layout
    work: Workload
    step_time_s: float
    power_w: float | None


def observations(search: SearchRecord, work: Workload) -> list[Observation]:
    """What the trials of a search took, whose workload is `work`.

    Power that is estimated, or of a model of fewer layers, is left out.
    """
    observed = []
    for trial in search.trials:
        if trial.status != "ok" or "step_time_s" not in trial.metrics:
            continue
        layout, total = trial.layout, trial.metrics.get("mean_power_w")
        methods = trial.methods
        doubtful = methods.get("mean_power_w") == "estimated" or methods.get("step_time_s") == "extrapolated"
        power = None if total is None or doubtful else total / layout.num_gpus
        observed.append(Observation(layout, work, trial.metrics["step_time_s"], power))
    return observed


def ratios(observed: Observation, calibration: Coefficients) -> tuple[float, float | None]:
    """Step time and power as predicted over those measured; None for power that was not."""
    prediction = predict(observed.layout, observed.work, calibration)
    power = None if observed.power_w is None else prediction.power_w / observed.power_w
    return prediction.step_time_s / observed.step_time_s, power


def fit(observed: Sequence[Observation], start: Coefficients, sliced: bool = False) -> Coefficients:
    """The coefficients that explain `observed` best, drawn towards those of `start` by `SPREADS`.

    Without observations, `start`. `sliced`: whether they are of ranks that ran without the others.
    """
    if not observed:
        return start
    source = f"{len(observed)} trials{BY_SLICES * sliced}, from {start.source}"
    return replace(shifted(start, shifts([(one, start) for one in observed])), source=source)


def shifts(observed: Sequence[tuple[Observation, Coefficients]]) -> dict[str, float]:
    """By how much the logarithm of each coefficient is off, by what was observed on machines of which these
    coefficients were expected.

    Least squares of logarithms, which what is far off hardly moves (Cauchy), each coefficient drawn to its default
    (soft L1). The model is taken to be off by its `_misfit`, or by as many times that as it was off these step times,
    but for a factor that they have in common.
    """
    from scipy.optimize import least_squares  # a second, which no other command waits for

    names = list(SPREADS)
    spreads = np.array([SPREADS[name] for name in names])
    found = [_off(one, start) for one, start in observed]
    expected = [_misfit(one.layout, one.work, predict(one.layout, one.work, start)) for one, start in observed]
    times = np.array([each[0] for each in found])
    more = max(1.0, float(np.median(np.abs(times - np.median(times)) / expected)) / NORMAL)
    scales = more * np.repeat(expected, [len(each) for each in found])

    def misfits(off: np.ndarray) -> np.ndarray:
        by = dict(zip(names, off * spreads, strict=True))
        found = np.concatenate([_off(one, shifted(start, by)) for one, start in observed])
        return np.concatenate([found / scales, off])

    def loss(squares: np.ndarray) -> np.ndarray:
        """Of each square, with its two derivatives, (3, squares): the last ones are of how far coefficients moved."""
        more = 1 + squares
        cauchy = np.array([np.log(more), 1 / more, -1 / more**2])
        soft_l1 = np.array([2 * np.sqrt(more) - 2, more**-0.5, -0.5 * more**-1.5])
        return np.where(np.arange(len(squares)) < len(squares) - len(names), cauchy, soft_l1)

    best = least_squares(misfits, np.zeros(len(names)), loss=loss, method="trf", max_nfev=20)
    return dict(zip(names, best.x * spreads, strict=True))


def _misfit(layout: Layout, work: Workload, prediction: Prediction) -> float:
    """By how much the model is taken to be off a measurement of a layout, whatever the coefficients."""
    return MISFIT_WAITING if may_wait(layout, work, prediction) else MISFIT


def _off(observed: Observation, calibration: Coefficients) -> np.ndarray:
    """Logarithms of what is predicted over what was measured: of step time, and of power if that was."""
    return np.log([ratio for ratio in ratios(observed, calibration) if ratio is not None])


def shifted(calibration: Coefficients, logarithms: Mapping[str, float]) -> Coefficients:
    """`calibration` with the logarithms of some coefficients moved by so much."""
    return replace(
        calibration, **{name: getattr(calibration, name) * float(np.exp(by)) for name, by in logarithms.items()}
    )


def design(layouts: Sequence[Layout], work: Workload, calibration: Coefficients, count: int = 16) -> list[Layout]:
    """The layouts that leave predictions of all least in doubt for the time they take, at most `count`, the best first.

    Greedy I-optimal design (Box and Draper 1959; Cohn et al. 1996): each takes most off the variance, by the second, of
    the logarithms of step time and power of all `layouts`, which the coefficients have by `SPREADS`, and the model by
    its `_misfit`. Layouts that may run out of memory are left out.
    """
    drawn = random.Random(0).sample(list(layouts), len(layouts))
    safe = (layout for layout in drawn if memory.band(layout, work) in ("fits", None))
    candidates = list(itertools.islice(safe, CANDIDATES))
    predictions = [predict(layout, work, calibration) for layout in candidates]
    seconds = [TRIAL_S + TRIAL_STEPS * prediction.step_time_s for prediction in predictions]
    slopes = np.array([_slopes(layout, work, calibration) for layout in candidates]).reshape(-1, len(SPREADS))
    off = slopes * list(SPREADS.values())
    of_each = [_misfit(layout, work, found) for layout, found in zip(candidates, predictions, strict=True)]
    misfits = np.repeat(of_each, 2)
    unknown = off @ off.T + np.diag(misfits**2)  # covariance; of each layout a row for step time, and one for power

    def told(index: int) -> tuple[np.ndarray, np.ndarray]:
        """Two factors of what a trial takes off the covariance."""
        both = slice(2 * index, 2 * index + 2)
        return unknown[:, both], np.linalg.solve(unknown[both, both], unknown[both])

    def gain(index: int) -> float:
        left, right = told(index)
        return float(np.sum(left * right.T)) / seconds[index]

    chosen: list[int] = []
    while len(chosen) < min(count, len(candidates)):
        chosen.append(max(set(range(len(candidates))).difference(chosen), key=gain))
        left, right = told(chosen[-1])
        unknown = unknown - left @ right
    return [candidates[index] for index in chosen]


def expected(cluster: Cluster) -> Coefficients | None:
    """What is to be expected of a cluster before anything was measured on it."""
    sheet = data_sheet(cluster.accelerator)
    return None if sheet is None else cluster.as_stated(sheet)


def save(home: Home, accelerator: str, calibration: Coefficients) -> None:
    """Keep `calibration` for all later searches on `accelerator`."""
    file = home.calibration(accelerator)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({name: getattr(calibration, name) for name in KEPT}, indent=2) + "\n")


def load(home: Home, cluster: Cluster) -> Coefficients | None:
    """What is known of a cluster: the accelerator's calibration, else its data sheet, as far as the doctor did not find
    its GPUs slower or faster, else nothing; what was measured of operators and collectives there, and what is stated.

    Raises `InputError` if there is a calibration that cannot be read.
    """
    known = _fitted(home.calibration(cluster.accelerator)) or _examined(home, cluster.accelerator)
    return None if known is None else as_measured(cluster.as_stated(known), home, cluster)


def _examined(home: Home, accelerator: str) -> Coefficients | None:
    """An accelerator's data sheet for the GPUs of it that were examined: all wait for the slowest."""
    sheet, device = data_sheet(accelerator), ACCELERATORS.get(accelerator)
    if sheet is None or device is None or device.examined_flops is None or device.power_limit_w is None:
        return sheet
    flops = slowest_flops(home, accelerator, device.power_limit_w)
    return sheet if flops is None else sheet.examined(flops, device.examined_flops)


def as_measured(known: Coefficients, home: Home, cluster: Cluster) -> Coefficients:
    """What is known of a cluster, with what was measured of operators and collectives on its accelerator.

    Raises `InputError` if what was measured cannot be read.
    """
    curves, operators = curves_of(home, cluster), timings(home, cluster.accelerator)
    links = known.network(cluster.gpus_per_node).informed(curves).link_bytes_per_s
    return replace(known, operators=operators, collectives=Curves(curves), link_bytes_per_s=links)


def _fitted(file: Path) -> Coefficients | None:
    if not file.exists():
        return None
    try:
        values = json.loads(file.read_text())
        return Coefficients(**{name: values[name] for name in KEPT if name in values})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(file, error) from None


def save_timings(home: Home, accelerator: str, measured: Iterable[OperatorTiming]) -> None:
    """Keep what operators take for all later searches on `accelerator`, in place of what was measured of them before.

    Raises `InputError` if what there is cannot be read.
    """
    file, kept = home.operators(accelerator), timings(home, accelerator).updated(measured)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([row.to_dict() for row in kept.rows], indent=1) + "\n")


def timings(home: Home, accelerator: str) -> Timings:
    """What operators were measured to take on `accelerator`.

    Raises `InputError` if what there is cannot be read.
    """
    file = home.operators(accelerator)
    if not file.exists():
        return Timings()
    try:
        return Timings(tuple(map(OperatorTiming.from_dict, json.loads(file.read_text()))))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> InputError:
    return InputError(f"{file}: not a calibration ({error!r}); delete it and calibrate again")


def save_curves(home: Home, accelerator: str, curves: Sequence[Curve]) -> None:
    """Keep what collectives take for all later searches on `accelerator`, in place of what was measured before of the
    same kinds in groups alike.

    Raises `InputError` if what there is cannot be read.
    """
    file = home.collectives(accelerator)
    kept = {(curve.kind, curve.ranks, curve.together): curve for curve in (*_curves(file), *curves)}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([asdict(curve) for curve in kept.values()], indent=1) + "\n")


def network(home: Home, cluster: Cluster) -> Network | None:
    """The network of a cluster, by what is known of it (`load`). None if neither the accelerator's is known nor both
    bandwidths are stated.

    Raises `InputError` if there is a calibration that cannot be read.
    """
    known = load(home, cluster)
    return _stated_alone(cluster, cluster.network or Interconnect()) if known is None else network_by(known, cluster)


def network_by(known: Coefficients, cluster: Cluster) -> Network:
    """The network of a cluster of which so much is known."""
    stated = cluster.network or Interconnect()
    return known.network(cluster.gpus_per_node, stated.gpus_per_switch, stated.oversubscription)


def curves_of(home: Home, cluster: Cluster) -> tuple[Curve, ...]:
    """What collectives were measured to take on a cluster's accelerator, but where the spec states other links or
    another network.

    Raises `InputError` if what there is cannot be read.
    """
    stated = cluster.network or Interconnect()
    links, between = "link_bytes_per_s" not in cluster.stated, replace(stated, gpu_gb_per_s=None) == Interconnect()
    curves = _curves(home.collectives(cluster.accelerator))
    return tuple(curve for curve in curves if (links if curve.together == curve.ranks else between))


def _stated_alone(cluster: Cluster, stated: Interconnect) -> Network | None:
    """The network of an accelerator of which nothing else is known."""
    link, between = cluster.device.link_bytes_per_s, cluster.device.network_bytes_per_s
    if link is None or between is None:
        return None
    return Network(
        "as the spec states",
        cluster.gpus_per_node,
        LINK_SHARE * link,
        NETWORK_SHARE * between,
        Coefficients.link_latency_s,
        Coefficients.network_latency_s if stated.latency_us is None else 1e-6 * stated.latency_us,
        stated.gpus_per_switch,
        stated.oversubscription,
    )


def _curves(file: Path) -> list[Curve]:
    if not file.exists():
        return []
    try:
        return [Curve.from_dict(each) for each in json.loads(file.read_text())]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(file, error) from None


def _slopes(layout: Layout, work: Workload, calibration: Coefficients) -> np.ndarray:
    """Derivatives of the logarithms of step time and power by those of the coefficients, (2, coefficients)."""
    step = 0.05

    def at(name: str, by: float) -> np.ndarray:
        prediction = predict(layout, work, shifted(calibration, {name: by}))
        return np.log([prediction.step_time_s, prediction.power_w])

    return np.array([(at(name, step) - at(name, -step)) / (2 * step) for name in SPREADS]).T
