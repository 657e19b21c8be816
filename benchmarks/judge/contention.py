"""By what share of the time of the messages beside them a pipeline's passes take longer in a gang than alone.

    python -m benchmarks.judge.contention SLICES.jsonl[.xz] MEASURED.jsonl[.xz] [SLICES MEASURED ...]

In pairs, files of `benchmarks.measure.blind`. Prints each pipeline of both in which messages go on beside at least
`LEAST_BESIDE` of the passes' time, by the elements of a pass's hidden states: how much longer its passes took among
all ranks, as a share of the time of products beside messages, and what `search_spaces.contention` has for that.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.judge.pairs import both, found
from benchmarks.measure.blind import Row
from search_spaces.composition import beside, compose
from search_spaces.contention import contention
from service.answers.tables import render
from service.spec import load_spec

LEAST_BESIDE, LEAST_S = 0.05, 1e-4
"""Passes that take less, as those whose work is in another one, tell nothing."""

Point = tuple[str, str, bool, float, float, float]
"""A spec, a layout, whether it has experts, millions of elements, and the two shares."""


def points(sliced: Iterable[Row], measured: Iterable[Row]) -> Iterator[Point]:
    for path, alone, gang in both(sliced, measured):
        layout, told = alone.layout, gang.ranks and all(rank.passes for rank in gang.ranks)
        if layout.pipeline_parallel_size == 1 or alone.network is None or not alone.slices or not told:
            continue
        spec = load_spec(path)
        step = compose(layout, spec.workload.run, {one.kind: one.times for one in alone.slices}, alone.network)
        longer = together = whole = 0.0
        for one in alone.slices:
            among = {(a.stage, a.step): a for a in gang.ranks[one.kind.rank].passes}
            own = {action: s for action, s in one.times.passes.items() if s >= LEAST_S}
            longer += sum(among[a.stage, a.step].of(a.microbatch) - seconds for a, seconds in own.items())
            together += one.times.products * sum(s for _, s in beside(step.played, one.kind.pipeline_rank))
            whole += sum(own.values())
        if together >= LEAST_BESIDE * whole:
            elements = layout.microbatch_tokens(spec.sequence_length) * spec.workload.shape.hidden / 1e6
            experts = spec.workload.shape.num_experts > 0
            yield (
                Path(path).stem,
                layout.label,
                experts,
                elements,
                longer / together,
                contention(layout, spec.workload.run),
            )


def table(all_points: Iterable[Point]) -> str:
    """By experts and elements, then the medians of both kinds of models."""
    rows = sorted(all_points, key=lambda point: point[2:4])
    lines = [
        [spec, label, f"{elements:.1f}", f"{seen:+.2f}", f"{now:.2f}"] for spec, label, _, elements, seen, now in rows
    ]
    for name, experts in (("without experts", False), ("with experts", True)):
        of = [point for point in rows if point[2] == experts]
        if of:
            medians = [f"{statistics.median(values):+.2f}" for values in list(zip(*of, strict=True))[4:]]
            lines.append([name, f"median of {len(of)}", "", *medians])
    return render(["model", "layout", "elements, millions", "seen", "taken"], lines)


def main(argv: list[str] | None = None) -> None:
    nothing = "there is no pipeline of both files of a pair whose messages go on beside its passes"
    print(table(found(__doc__, argv, points, nothing)))


if __name__ == "__main__":
    main()
