"""Whether a trial was measured at thermal steady state, by its own samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from service.result import TrialResult

STEADY_C = 3.0
"""By how many degC a GPU's temperature may change over a window that counts as steady; it is read in whole degrees."""


def rise_c(samples: pa.Table) -> float | None:
    """By how many degC the GPU whose temperature changed most got warmer, from the first to the last quarter of its
    samples; negative if it cooled, None without temperatures. `samples` are of `telemetry.samples.SCHEMA`.
    """
    known = samples.select(["device", "time_ns", "gpu_temp_c"]).drop_null().sort_by("time_ns").to_pandas()
    rises = []
    for _, temperatures in known.groupby("device")["gpu_temp_c"]:
        quarter = -(-len(temperatures) // 4)
        rises.append(float(np.mean(temperatures[-quarter:]) - np.mean(temperatures[:quarter])))
    return max(rises, key=abs, default=None)


def judged(result: TrialResult, samples: pa.Table) -> TrialResult:
    """The result with `gpu_temp_rise_c` among its metrics, and a word in its cause if that is not steady."""
    rise = rise_c(samples)
    if rise is None:
        return result
    cause = result.cause
    if abs(rise) > STEADY_C:
        moved = "warmed" if rise > 0 else "cooled"
        notice = f"not at thermal steady state: a GPU {moved} by {abs(rise):.1f} degC in the window"
        cause = f"{cause}; {notice}" if cause else notice
    return replace(result, metrics=result.metrics | {"gpu_temp_rise_c": rise}, cause=cause)
