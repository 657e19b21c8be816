"""Timing of optimizer steps: warm up until they are steady, then time a window of whole steps.

A step is a full optimizer step at the fixed global batch: all microbatches, gradient reduction, clipping, optimizer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ALIKE = 0.005
"""The standard error of the mean of steps that are alike, over that mean: two of them differ by twice as much."""

PATIENCE = 2
"""How many times as long as they must last the first steps may take to turn out alike."""


@dataclass(frozen=True)
class Procedure:
    """When warm-up ends, how long the window is, and whether one more step is profiled after it.

    The fields are those of the spec's `measurement` section, but for `alike_s`: a window whose steps are alike need
    last no longer than that, and the steps right after the first are such a window if they can be.
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


def is_over(window: Sequence[float], procedure: Procedure) -> bool:
    """Whether steps so long are a whole window, or enough of one."""
    whole = len(window) >= procedure.window_min_steps and sum(window) >= procedure.window_s
    return whole or are_alike(window, procedure)


def are_alike(window: Sequence[float], procedure: Procedure) -> bool:
    """Whether steps last as long as they must, and are known well enough by then."""
    if len(window) < 2 or sum(window) < procedure.alike_s:
        return False
    return statistics.stdev(window) / math.sqrt(len(window)) <= ALIKE * statistics.fmean(window)


def time_steps(
    step: Callable[[], tuple[float, int]],
    procedure: Procedure,
    compiled: bool,
    on_phase: Callable[[str], None] = lambda phase: None,
    on_steady: Callable[[Stretch], None] = lambda steps: None,
    apart: int = 1,
) -> Timing:
    """Run `step` through warm-up and window. `on_steady` is given the steps that agreed, if any did, before the window.

    `step` trains one optimizer step and returns its seconds, the same number on every rank so that all ranks take the
    same decisions, and this node's `time.monotonic_ns()` after it. The first `apart` steps are unlike the others.
    """
    on_phase("warmup")
    steps: list[float] = []
    stamps: list[int] = []

    def take() -> None:
        seconds, now = step()
        steps.append(seconds)
        stamps.append(now)

    def timing(begin: int) -> Timing:
        window = tuple(steps[begin:])
        usual = statistics.median(window)
        first = steps[: max(1, begin - 1)]
        compile_s = sum(max(0.0, seconds - usual) for seconds in first) if compiled else 0.0
        return Timing(tuple(steps[:begin]), window, stamps[begin - 1], stamps[-1], compile_s)

    while len(steps) < apart:
        take()
    if math.isfinite(procedure.alike_s):
        on_phase("window")
        while len(steps) < apart + 2 or sum(steps[apart:]) < PATIENCE * procedure.alike_s:
            take()
            if are_alike(steps[apart:], procedure):
                return timing(apart)
        on_phase("warmup")
    while not (steady := is_steady(steps, procedure)):
        # The first step carries compilation and the creation of communicators: it has no say in the limit.
        if len(steps) > procedure.steady_steps and sum(steps[1:]) >= procedure.warmup_max_s:
            break
        take()
    if steady:
        agreed = procedure.steady_steps
        on_steady(Stretch(tuple(steps[-agreed:]), stamps[-agreed - 1], stamps[-1]))
    on_phase("window")
    begin = len(steps)
    while not is_over(steps[begin:], procedure):
        take()
    return timing(begin)
