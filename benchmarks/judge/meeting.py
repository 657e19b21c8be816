"""What a gang's slowest rank does for longer than its slice says, of replicas and where ranks meet in every block.

    python -m benchmarks.judge.meeting SLICES.jsonl[.xz] MEASURED.jsonl[.xz] [SLICES MEASURED ...]

In pairs, files of `benchmarks.measure.blind`. Prints each layout without a pipeline of both whose GPUs are idle for
less than `IDLE` of the step: by how much the step by slices is off, and by how much that of the rank which computes the
longest differs from its slice, in products and attention, in other kernels, in exposed communication, which has what it
waits for others, and idle, all of the measured step. Then means of replicas alone, which meet once a step or, with
ZeRO-3, beside their work, and of those that meet in every block.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.judge.pairs import both, found
from benchmarks.measure.blind import Row
from benchmarks.measure.company import KERNELS
from benchmarks.measure.off import percent
from search_spaces.layout import Layout
from search_spaces.wander import meeting
from service.answers.tables import render

IDLE = 0.08
"""From this share of the step on, the host tells more than the ranks."""


@dataclass(frozen=True)
class Point:
    """A layout, and what is off of its step, as shares: the whole of it, and what its slowest rank does for longer."""

    spec: str
    layout: Layout
    step: float
    parts: tuple[float, float, float, float]

    @property
    def meets(self) -> bool:
        return meeting(self.layout) > 1


def points(sliced: Iterable[Row], measured: Iterable[Row]) -> Iterator[Point]:
    for path, alone, gang in both(sliced, measured):
        ranks = [one.breakdown for one in gang.ranks if one.breakdown is not None]
        if alone.layout.pipeline_parallel_size > 1 or "breakdown_compute_s" not in alone.metrics or not ranks:
            continue
        step_s, taken = gang.metrics["step_time_s"], alone.metrics["step_time_s"]
        slowest = max(ranks, key=lambda one: one.compute_s)
        if step_s is None or taken is None or (gang.metrics["breakdown_idle_s"] or 0.0) > IDLE * step_s:
            continue
        products, attention, other, exposed, idle = (
            (getattr(slowest, name) - (alone.metrics[f"breakdown_{name}"] or 0.0)) / step_s for name in KERNELS
        )
        parts = products + attention, other, exposed, idle
        yield Point(Path(path).stem, alone.layout, taken / step_s - 1, parts)


def table(all_points: Iterable[Point]) -> str:
    """Those that meet last, by spec and label."""
    rows = sorted(all_points, key=lambda one: (one.meets, one.spec, one.layout.label))
    lines = [[one.spec, one.layout.label, *map(percent, (one.step, *one.parts))] for one in rows]
    for name, meets in (("replicas", False), ("ranks that meet in every block", True)):
        of = [(one.step, *one.parts) for one in rows if one.meets == meets]
        if of:
            means = [percent(statistics.fmean(part)) for part in zip(*of, strict=True)]
            lines.append([name, f"mean of {len(of)}", *means])
    return render(["model", "layout", "step off", "products, attention", "other", "exposed", "idle"], lines)


def main(argv: list[str] | None = None) -> None:
    print(table(found(__doc__, argv, points, "no layout without a pipeline is in both files of a pair")))


if __name__ == "__main__":
    main()
