"""How far predictions of the cost model may be off, by what those of their kind were off before.

Nine of ten of the kind were off by no more. Of what was measured here, `python -m benchmarks.judge.cost` says how far
that was; of several nodes and of machines that were never measured, the layouts of others do
(`python -m benchmarks.judge.published`), and so the figures of their kinds are wide.
"""

from __future__ import annotations

from typing import NamedTuple

from search_spaces.coefficients import Coefficients, is_fitted, is_fitted_to_gangs, is_unproven
from search_spaces.cost import Prediction
from search_spaces.engines import facts_of
from search_spaces.layout import Layout
from search_spaces.workload import Workload


class Doubt(NamedTuple):
    """Shares of a predicted step time by which it may be off: `off` in itself, and once all predictions have a factor
    in common, which is what matters to the order of two layouts, `apart`, and `faster` than is foretold."""

    off: float
    apart: float
    faster: float


MEASURED = Doubt(0.06, 0.05, 0.05)
"""159 layouts on up to four H200, by the data sheet."""

FITTED = Doubt(0.05, 0.05, 0.05)
"""Of machines on which some trials were run: layouts of the same sweeps, fitted to sixteen of them."""

WAITING = Doubt(0.10, 0.08, 0.08)
"""Context parallelism, eager tensor parallelism and products in fp8: 100 layouts on H200, and blind ones in fp8; and
asynchronous tensor parallelism, of which torchtitan published six on H100, 0 to 7% off."""

UNLAUNCHED = Doubt(0.30, 0.25, 0.10)
"""Layouts that may wait for the CPU, of a host on which no launches were measured: 100 on one to four H100 and H200, of
which nine of ten are within 25% and none is more than 8% faster. What launches take by default was set with them in
view. Where the GPU is taken to be at work `AHEAD` times as long as the CPU, few wait, of 209 at ten times none."""

LAUNCHED = Doubt(0.20, 0.15, 0.15)
"""Those of a host on which launches were measured, of their mode or of others: blind 21 on three H200 and an H100, of
which 18 were within 15%; of 61 on five hosts, not blind, nine of ten are within 11%."""

AHEAD = 4.0

SEVERAL_NODES = Doubt(0.18, 0.15, 0.15)
"""136 layouts of others on 16 to 1024 A100 and H100: of networks that no trial communicated over."""

UNPROVEN = Doubt(0.22, 0.15, 0.15)
"""94 layouts of others on A100 and B200, which Wattune itself was never measured on."""

FOREIGN = Doubt(0.25, 0.15, 0.15)
"""A program of the user's, predicted as if it were one of the engines: what programs of others are off by."""

GUESSED = Doubt(2.0, 0.5, 0.5)
"""A CPU, of which nothing is known but that it is one: right within a factor of three."""

SPREAD_EXPERTS = Doubt(0.55, 0.50, 0.50)
"""What ranks wait for the fullest one: two layouts on four H200."""


def doubt(layout: Layout, work: Workload, accelerator: str, calibration: Coefficients, prediction: Prediction) -> Doubt:
    """Of what is predicted of a layout with `calibration` for the accelerator of this name: the widest of its kinds."""
    fitted = is_fitted(accelerator, calibration)
    kinds = [FITTED if fitted else UNPROVEN if is_unproven(accelerator, calibration) else MEASURED]
    if work.accelerator.platform == "cpu" and not fitted:
        kinds.append(GUESSED)
    if work.trainer is not None and not fitted:
        kinds.append(FOREIGN)
    eager_tensor_parallel = layout.tensor_parallel_size > 1 and not layout.compile
    overlaps = eager_tensor_parallel or layout.async_tensor_parallel
    if layout.context_parallel_size > 1 or overlaps or layout.precision == "fp8":
        kinds.append(WAITING)
    if may_wait(layout, work, prediction):
        kinds.append(LAUNCHED if calibration.operators.launches else UNLAUNCHED)
    if layout.num_gpus > work.gpus_per_node and not is_fitted_to_gangs(accelerator, calibration):
        kinds.append(SEVERAL_NODES)
    if facts_of(layout, work).follows_router(layout):
        kinds.append(SPREAD_EXPERTS)
    return Doubt(*map(max, zip(*kinds, strict=True)))


def may_wait(layout: Layout, work: Workload, prediction: Prediction) -> bool:
    """Whether the step may be the CPU's."""
    return prediction.ahead < AHEAD or facts_of(layout, work).waits_for_gpu(layout, work.shape)
