"""A window whose GPUs still got warmer is told from one at steady state."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from search_spaces.layout import Layout
from service.result import TrialResult
from service.trials.thermal import STEADY_C, judged, rise_c
from telemetry.samples import SCHEMA
from trainables.status import Status


def samples(**temperatures: Sequence[float | None]) -> pa.Table:
    rows = [
        {"time_ns": tick, "node": "node", "device": device, "gpu_temp_c": temperature}
        for device, series in temperatures.items()
        for tick, temperature in enumerate(series)
    ]
    return pa.Table.from_pylist(rows[::-1], schema=SCHEMA)


def test_the_rise_is_that_of_the_gpu_that_changed_most() -> None:
    steady, warming, cooling = [60.0, 61.0] * 4, [50.0, 50, 52, 53, 54, 55, 56, 56], [70.0, 70, 66, 64, 62, 60, 60, 60]
    assert rise_c(samples(a=steady)) == 0.0
    assert rise_c(samples(a=steady, b=warming)) == pytest.approx(6.0)
    assert rise_c(samples(a=steady, b=warming, c=cooling)) == pytest.approx(-10.0)
    assert rise_c(samples(a=[None, 50.0, None])) == 0.0


def test_without_temperatures_nothing_is_said() -> None:
    result = TrialResult("t", Layout("megatron", 1, 8), Status.OK, metrics={"tokens_per_s": 1.0})
    assert rise_c(samples()) is None
    assert judged(result, samples(a=[None, None])) == result


@pytest.mark.parametrize("cause", [None, "memory errors"])
def test_what_is_not_steady_is_named(cause: str | None) -> None:
    result = TrialResult("t", Layout("megatron", 1, 8), Status.OK, cause, {"tokens_per_s": 1.0})
    warm, still = judged(result, samples(a=[60.0, 60 + 2 * STEADY_C])), judged(result, samples(a=[60.0, 60 + STEADY_C]))
    assert warm.metrics == {"tokens_per_s": 1.0, "gpu_temp_rise_c": 2 * STEADY_C}
    told = "not at thermal steady state: a GPU warmed by 6.0 degC in the window"
    assert warm.cause == (f"{cause}; {told}" if cause else told)
    assert still.cause == cause
