"""Whether a layout on the edge of memory fits: by a few steps of its fullest rank, alone and at full depth.

Where ranks cannot be alone, by what a few steps of all of them take at two smaller depths, followed to the full one:
the memory of a GPU is a constant and a share for every layer (docs/memory.md), each rank's another.
"""

from __future__ import annotations

from dataclasses import replace

from search_spaces.kinds import RankKind, kinds
from search_spaces.layout import Layout
from search_spaces.memory import band, estimate
from search_spaces.workload import Workload
from service.problem import Problem
from service.result import Proxy
from service.trials.extrapolation import line
from trainables.measure import Procedure
from trainables.program import RankReport, TrialRequest

LAYERS_PER_STAGE = (4, 8)
"""With fewer, blocks still fit in what the loss has given back, and a line through them is too steep: by two and four
layers, twelve that took 134 GiB were foretold 148 (H200)."""

STEPS = Procedure(steady_steps=1, warmup_tolerance=1.0, warmup_max_s=1.0, window_s=1e-9, window_min_steps=1)
"""Three steps: the first makes the optimizer's states, without which the peak of those after it is not reached."""


def due(layout: Layout, problem: Problem) -> bool:
    """Whether a layout is to be probed before it is tried."""
    return problem.borderline == "probe" and band(layout, problem.workload) == "borderline"


def depths(layout: Layout, problem: Problem) -> tuple[int, int] | None:
    """The depths at which to probe a layout; None where there are none such below the model's own."""
    if layout.stage_layers is not None:
        return None
    shallow, deep = (layers * layout.pipeline_stages for layers in LAYERS_PER_STAGE)
    return (shallow, deep) if deep < problem.workload.run.shape.layers else None


def fullest(layout: Layout, work: Workload) -> RankKind:
    """The kind of a layout's ranks that needs most by the memory model."""
    memory = estimate(layout, work, range(layout.pipeline_parallel_size)).ranks
    return max(kinds(layout, work), key=lambda kind: memory[kind.pipeline_rank].needed)


def probing(request: TrialRequest, sizes: tuple[int, ...]) -> TrialRequest:
    """The trial cut down to a few steps, of the smallest of the global batch `sizes` that may stand for its own."""
    return replace(request, procedure=STEPS, batches=sizes[-1:])


def unsettled(report: RankReport) -> str | None:
    """Why a rank that came through its steps may yet run out of memory; None where there is no sign of it.

    What torch keeps unused falls into pieces by and by, and pieces of which some is in use cannot be given back. A rank
    that still had to give back others in its window is at the mercy of these pieces: of 36 layouts on H100, one came
    through its probe and ran out of memory in the window, for 11.7 GiB with 25 GiB unused; on H200, with as much memory
    as an H100 has, the same one gave back memory in its second and third steps, and went on.
    """
    if not report.reclaims:
        return None
    return (
        f"rank {report.rank}: in its last steps torch found memory full {report.reclaims} times and gave back what it "
        f"kept unused: with {report.peak_memory_gib:.1f} GiB reserved it may run out in any step"
    )


def overflow(layout: Layout, problem: Problem, shallow: Proxy, deep: Proxy) -> str | None:
    """Why a layout does not fit, by two probes of all its ranks that ended well; None if it may.

    What torch reserves and does not use it gives back where memory is short, so that it does not count.
    """
    work = problem.workload.run
    estimated = estimate(layout, work, range(layout.pipeline_parallel_size))
    if estimated.usable_bytes is None:
        return None
    places, usable_gib = (shallow.layers, deep.layers), estimated.usable_bytes / 2**30
    for before, after in zip(shallow.result.ranks, deep.result.ranks, strict=True):
        if before.peak_memory_gib is None or after.peak_memory_gib is None:
            continue
        reserved_gib = line(places, (before.peak_memory_gib, after.peak_memory_gib), work.shape.layers)
        needed_gib = reserved_gib - estimated.ranks[after.coordinates["pp"]].slack / 2**30
        if needed_gib > usable_gib:
            return (
                f"probe: rank {after.rank} takes {before.peak_memory_gib:.1f} GiB with {places[0]} layers and "
                f"{after.peak_memory_gib:.1f} with {places[1]}: with {work.shape.layers} it needs {needed_gib:.0f} GiB "
                f"of {usable_gib:.0f}"
            )
    return None
