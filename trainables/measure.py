"""Timing of optimizer steps: warm up until they are steady, then time a window of whole steps.

A step is a full optimizer step at the fixed global batch: all microbatches, gradient reduction, clipping, optimizer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIKE = 0.005
"""The standard error of the mean of steps that are alike, over that mean: two of them differ by twice as much."""

AHEAD_S = 0.02
"""How much work a device must have ahead for it not to wait for its host soon."""

PATIENCE = 2
"""How many times as long as they must last the first steps may take to turn out alike."""


@dataclass(frozen=True)
class Procedure:
    """When warm-up ends, how long the window is, and whether one more step is profiled after it.

    The fields are those of the spec's `measurement` section, but for `alike_s`: a window whose steps are alike need
    last no longer than that, and the steps right after the first are such a window if they can be. One step that lasts
    so long needs no like if the device did not wait for its host in it.
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


class Step(NamedTuple):
    """One optimizer step.

    `seconds` are the slowest rank's, `ended_ns` is this node's `time.monotonic_ns()` after it. `ahead_s` tells, before
    the next step, the least work that the device had ahead at any time it is known of. `sequences` is the work that it
    was, of which steps of a window have equally much.
    """

    seconds: float
    ended_ns: int
    ahead_s: Callable[[], float] = float
    sequences: int = 1


@dataclass(frozen=True)
class Stretch:
    """Whole steps in a row: the seconds of each, and the stamps in ns at their ends on this node's monotonic clock."""

    steps_s: tuple[float, ...]
    start_ns: int
    end_ns: int


def is_steady(steps: Sequence[Step], procedure: Procedure) -> bool:
    """Whether the last `steady_steps` steps, the very first never counted, agree within the tolerance."""
    recent = [step.seconds for step in steps[1:]][-procedure.steady_steps :]
    return len(recent) == procedure.steady_steps and max(recent) <= min(recent) * (1 + procedure.warmup_tolerance)


def is_over(window: Sequence[Step], procedure: Procedure) -> bool:
    """Whether these steps are a whole window, or enough of one."""
    whole = len(window) >= procedure.window_min_steps and lasted(window) >= procedure.window_s
    return whole or are_alike(window, procedure)


def are_alike(window: Sequence[Step], procedure: Procedure) -> bool:
    """Whether steps last as long as they must, and are known well enough by then."""
    seconds = [step.seconds for step in window]
    if not window or lasted(window) < procedure.alike_s:
        return False
    if len(window) == 1:
        return window[0].ahead_s() >= AHEAD_S
    return statistics.stdev(seconds) / math.sqrt(len(seconds)) <= ALIKE * statistics.fmean(seconds)


def time_steps(
    step: Callable[[], Step],
    procedure: Procedure,
    compiled: bool,
    on_phase: Callable[[str], None] = lambda phase: None,
    on_steady: Callable[[Stretch], None] = lambda steps: None,
    apart: Sequence[Callable[[], Step]] | None = None,
    began_ns: int = 0,
) -> Timing:
    """Run `step` through warm-up and window. `on_steady` is given the steps that agreed, if any did, before the window.

    `step` trains one optimizer step, and says the same seconds on every rank so that all ranks take the same decisions.
    The steps of `apart`, of which there is one by default, come first and are unlike the others, as are all before one
    of other work: no window has them. `began_ns` is the stamp at the begin of what comes first, which counts where
    nothing is apart.
    """
    on_phase("warmup")
    steps = [take() for take in ((step,) if apart is None else apart)]
    unlike = len(steps)

    def timing(begin: int) -> Timing:
        window = tuple(one.seconds for one in steps[begin:])
        usual = statistics.median(window)
        early = steps[: max(min(1, begin), begin - 1)]
        return Timing(
            warmup_steps_s=tuple(one.seconds for one in steps[:begin]),
            window_steps_s=window,
            start_ns=steps[begin - 1].ended_ns if begin else began_ns,
            end_ns=steps[-1].ended_ns,
            compile_s=sum(max(0.0, one.seconds - usual * one.sequences / steps[-1].sequences) for one in early)
            if compiled
            else 0.0,
        )

    if math.isfinite(procedure.alike_s):
        on_phase("window")
        while len(steps) < unlike + 2 or lasted(steps[unlike:]) < PATIENCE * procedure.alike_s:
            steps.append(step())
            if len(steps) > 1 and steps[-1].sequences != steps[-2].sequences:
                unlike = len(steps) - 1
            if are_alike(steps[unlike:], procedure):
                return timing(unlike)
        on_phase("warmup")
    while not (steady := is_steady(steps, procedure)):
        # The first step carries compilation and the creation of communicators: it has no say in the limit.
        if len(steps) > procedure.steady_steps and lasted(steps[1:]) >= procedure.warmup_max_s:
            break
        steps.append(step())
    if steady:
        agreed = steps[-procedure.steady_steps :]
        before = steps[-procedure.steady_steps - 1]
        on_steady(Stretch(tuple(one.seconds for one in agreed), before.ended_ns, agreed[-1].ended_ns))
    on_phase("window")
    begin = len(steps)
    while not is_over(steps[begin:], procedure):
        steps.append(step())
    return timing(begin)


def lasted(steps: Sequence[Step]) -> float:
    """Seconds of some steps."""
    return math.fsum(step.seconds for step in steps)
