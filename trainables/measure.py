"""Timing of optimizer steps: warm up until they are steady, then time a window of whole steps.

A step is a full optimizer step at the fixed global batch: all microbatches, gradient reduction, clipping, optimizer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

ALIKE = 0.005
"""By how much steps may differ that are alike."""


@dataclass(frozen=True)
class Procedure:
    """When warm-up ends, how long the window is, and whether one more step is profiled after it.

    The fields are those of the spec's `measurement` section, but for `alike_s`: a window whose steps are alike need
    last no longer than that.
    """

    steady_steps: int
    warmup_tolerance: float
    warmup_max_s: float
    window_s: float
    window_min_steps: int
    breakdown: bool = False
    alike_s: float = math.inf


@dataclass(frozen=True)
class Timing:
    """Seconds of every step, and the stamps in ns at the window's edges, on this node's monotonic clock.

    `compile_s` is what the first steps took longer than a steady one, where the layout is compiled; else 0.
    """

    warmup_steps_s: tuple[float, ...]
    window_steps_s: tuple[float, ...]
    start_ns: int
    end_ns: int
    compile_s: float


@dataclass(frozen=True)
class Stretch:
    """Whole steps in a row: the seconds of each, and the stamps in ns at their ends on this node's monotonic clock."""

    steps_s: tuple[float, ...]
    start_ns: int
    end_ns: int


def is_steady(steps: list[float], procedure: Procedure) -> bool:
    """Whether the last `steady_steps` steps, the very first never counted, agree within the tolerance."""
    recent = steps[1:][-procedure.steady_steps :]
    return len(recent) == procedure.steady_steps and max(recent) <= min(recent) * (1 + procedure.warmup_tolerance)


def is_over(window: list[float], procedure: Procedure) -> bool:
    """Whether steps so long are a whole window, or two or more that are alike enough of one."""
    length = sum(window)
    if len(window) >= procedure.window_min_steps and length >= procedure.window_s:
        return True
    return len(window) > 1 and length >= procedure.alike_s and max(window) <= min(window) * (1 + ALIKE)


def time_steps(
    step: Callable[[], tuple[float, int]],
    procedure: Procedure,
    compiled: bool,
    on_phase: Callable[[str], None] = lambda phase: None,
    on_steady: Callable[[Stretch], None] = lambda steps: None,
) -> Timing:
    """Run `step` through warm-up and window. `on_steady` is given the steps that agreed, if any did, before the window.

    `step` trains one optimizer step and returns its seconds, the same number on every rank so that all ranks take the
    same decisions, and this node's `time.monotonic_ns()` after it.
    """
    on_phase("warmup")
    warmup: list[float] = []
    stamps: list[int] = []
    steady = False
    while not steady:
        seconds, now = step()
        warmup.append(seconds)
        stamps.append(now)
        steady = is_steady(warmup, procedure)
        # The first step carries compilation and the creation of communicators: it has no say in the limit.
        if len(warmup) > procedure.steady_steps and sum(warmup[1:]) >= procedure.warmup_max_s:
            break
    if steady:
        agreed = procedure.steady_steps
        on_steady(Stretch(tuple(warmup[-agreed:]), stamps[-agreed - 1], stamps[-1]))
    on_phase("window")
    start = now
    window: list[float] = []
    while not is_over(window, procedure):
        seconds, now = step()
        window.append(seconds)
    usual = statistics.median(window)
    compile_s = sum(max(0.0, seconds - usual) for seconds in warmup[:-1]) if compiled else 0.0
    return Timing(tuple(warmup), tuple(window), start, now, compile_s)
