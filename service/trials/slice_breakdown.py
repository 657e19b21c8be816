"""Where the time of a step goes that is put together from ranks that ran alone, of which each profiled a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from search_spaces.composition import Composed, RankTimes
from search_spaces.kinds import RankKind
from trainables.breakdown import COLLECTIVES, Breakdown

USUAL_PRODUCTS = 0.65
"""Of a rank's seconds, the share in which it does matrix products and attention, where that was not profiled: 0.57 to
0.82 of eight pipelines on two H100."""

WAITING = ("send_recv", "exposed_send_recv", "communication", "exposed_communication", "span")
"""The times of a breakdown in which waiting for another stage counts."""


def unprofiled(breakdown: Breakdown, span_s: float) -> Breakdown:
    """A profiled step's breakdown as far as it is the step's own, which took `span_s` without the profiler.

    That has the host launch more slowly, and no kernel take longer: what a profiled step took more, the GPU was idle.
    """
    longer_s = min(max(0.0, breakdown.span_s - span_s), breakdown.idle_s)
    return replace(breakdown, span_s=breakdown.span_s - longer_s, idle_s=breakdown.idle_s - longer_s)


def exposed_s(breakdown: Breakdown | None, busy_s: float) -> dict[str, float]:
    """Of a rank's seconds those in which it does nothing but communicate, by kind of collective.

    They are as much of `busy_s` as they were of the step that was profiled, which may have taken longer. Empty if none
    was.
    """
    if breakdown is None:
        return {}
    times = asdict(scaled(breakdown, busy_s))
    return {name: times[f"exposed_{name}_s"] for name in COLLECTIVES}


def products(breakdown: Breakdown | None) -> float:
    """Of a rank's seconds the share in which it does matrix products and attention; the usual one if none was
    profiled."""
    return USUAL_PRODUCTS if breakdown is None else (breakdown.matmul_s + breakdown.attention_s) / breakdown.span_s


def by_pipeline_rank(
    step: Composed, times: Mapping[RankKind, RankTimes], profiled: Mapping[RankKind, Breakdown | None]
) -> list[Breakdown]:
    """The step's breakdown on a rank of each pipeline rank, by rank; empty if a kind lacks its own.

    Waiting for other pipeline ranks counts as `send_recv`, as NCCL's kernels have it, which wait for them. What passes
    beside messages take longer, products do.
    """
    ranks = []
    for rank, (waiting_s, slowed_s) in enumerate(zip(step.waiting_s, step.slowed_s, strict=True)):
        kind = next(kind for kind in times if rank in kind.stands_for)
        if (own := profiled[kind]) is None:
            return []
        waiting = _longer(scaled(own, times[kind].busy_s), waiting_s, *WAITING)
        ranks.append(_longer(waiting, slowed_s, "matmul", "compute", "span"))
    return ranks


def scaled(breakdown: Breakdown, span_s: float) -> Breakdown:
    """The same shares of a step that took `span_s`."""
    return Breakdown(**{name: seconds * span_s / breakdown.span_s for name, seconds in asdict(breakdown).items()})


def _longer(breakdown: Breakdown, seconds: float, *names: str) -> Breakdown:
    """With so many seconds more in each of some times, by their names without the unit."""
    return replace(breakdown, **{f"{name}_s": getattr(breakdown, f"{name}_s") + seconds for name in names})
