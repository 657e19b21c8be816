"""The memory model of `search_spaces.memory` against every committed measurement, or against tables of them.

    python -m benchmarks.judge.memory [TABLE.csv...]

Prints each measured point, the GPUs of each pipeline rank apart where they were recorded, with what is predicted and
the error; then the mean and the largest error by engine, for points by which a constant was set and for the others.
What engines held when they were measured, and hold no more, is added to what is predicted. Left out are layouts of
DeepSpeed without ZeRO that summed in bf16: it ran them with an optimizer that the engine has not used since.
Points that ran out of memory have the share of what a GPU can hold that the model says they need.

A table is one of benchmarks/data, with a search spec of the same name beside it. Of tables there is also how many of
the layouts that ran, and that ran out, are in each band; and how far off the model is once trials have corrected it.
A table without `peak_memory_gib` has the bands alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from benchmarks import DATA
from benchmarks.judge.committed import FAULTS, RECORDS, Measurement, as_it_ran, measurements
from benchmarks.judge.earlier import reserved_then
from benchmarks.judge.search import Table
from search_spaces.engines.deepspeed import sums_apart
from search_spaces.layout import Layout
from search_spaces.memory import (
    Band,
    MemoryEstimate,
    MemoryModel,
    band,
    estimate,
    hidden_between,
    passes_in_flight,
)
from search_spaces.parameters import held
from search_spaces.replay import replayed
from search_spaces.workload import Workload
from service.answers.tables import render
from service.spec import load_spec

FITTED = (FAULTS, "layouts_4xh200.jsonl")
"""Records by which a constant of the model was set."""

FITTED_TABLE = DATA / "llama3_12l_4xh200.csv"
"""The table by whose layouts one was set."""


@dataclass(frozen=True)
class MeasuredMemory:
    """One layout as it was measured.

    `pipeline_rank`: whose GPUs `reserved_gib` is of, the largest of theirs; None for all GPUs. `reserved_gib` is None
    where memory ran out, and where it was not measured.
    """

    layout: Layout
    work: Workload
    pipeline_rank: int | None
    reserved_gib: float | None
    fitted: bool = field(compare=False)
    ran_out: bool = False

    @property
    def estimate(self) -> MemoryEstimate:
        return estimate(self.layout, self.work, range(self.layout.pipeline_parallel_size))

    @property
    def predicted_gib(self) -> float:
        estimated = self.estimate
        ranks = range(self.layout.pipeline_parallel_size) if self.pipeline_rank is None else [self.pipeline_rank]
        return max(estimated.reserved(rank) + held_then(self.layout, self.work, rank) for rank in ranks) / 2**30

    @property
    def reserved_now_gib(self) -> float | None:
        """What was measured, less what engines hold no more."""
        if self.reserved_gib is None:
            return None
        return self.reserved_gib - self.predicted_gib + self.estimate.peak_bytes / 2**30

    @property
    def share(self) -> float:
        """Of what a GPU can hold."""
        share = self.estimate.share
        assert share is not None
        return share

    @property
    def error(self) -> float | None:
        """Relative to what was measured."""
        return None if self.reserved_gib is None else self.predicted_gib / self.reserved_gib - 1

    @property
    def spread_experts(self) -> bool:
        """Whether memory depends on how many tokens a young router sends where."""
        return self.layout.expert_parallel_size > 1


def held_then(layout: Layout, work: Workload, rank: int) -> float:
    """Bytes that engines had when these points were measured, and have no more: `megatron` receive buffers of
    microbatches not in flight, and DeepSpeed, where it sums gradients apart, those in bf16 of the microbatch before;
    its ranks, where they are replayed, what `benchmarks.judge.earlier` has."""
    stages, rounds = layout.pipeline_parallel_size, layout.gradient_accumulation_steps
    if layout.engine == "deepspeed":
        now = None if work.shape.num_experts else replayed(layout, work, rank)
        if now is not None:
            return reserved_then(layout, work, rank) - now.reserved
        return 2 * held(layout, work.shape, rank, False).whole if sums_apart(layout) and rounds > 1 else 0.0
    if stages == 1:
        return 0.0
    hidden = 2 * layout.micro_batch_size * work.sequence_length * hidden_between(layout, work.shape)
    activations = 0 if rank == 0 else rounds - passes_in_flight(layout, rank)
    gradients = 0 if rank == stages - 1 else rounds - 1
    return (activations + gradients) * hidden


def measured_memory() -> list[MeasuredMemory]:
    """All measured points, each once."""
    return list(dict.fromkeys(point for one in measurements((FAULTS, *RECORDS)) for point in _by_rank(one)))


def tabled(path: Path) -> list[MeasuredMemory]:
    """The points of a table that ran or ran out of memory."""
    work = load_spec(path.with_suffix(".yaml")).workload
    results = {_as_it_held(layout): result for layout, result in Table(path).results.items()}
    fitted = Table(FITTED_TABLE).results if load_spec(FITTED_TABLE.with_suffix(".yaml")).shape == work.shape else {}
    ran = {layout: result.metrics.get("peak_memory_gib") for layout, result in results.items() if result.status == "ok"}
    fitting = [MeasuredMemory(layout, work, None, gib, layout in fitted) for layout, gib in ran.items()]
    out = [layout for layout, result in results.items() if result.status == "oom"]
    return fitting + [MeasuredMemory(layout, work, None, None, layout in fitted, ran_out=True) for layout in out]


def _as_it_held(layout: Layout) -> Layout:
    """Blocks that ranks split hold what they held, where they are not recomputed in part, as none of a table is."""
    return as_it_ran(layout) if layout.context_parallel_size > 1 else layout


def _by_rank(measured: Measurement) -> Iterator[MeasuredMemory]:
    """One for each pipeline rank, where the record has the ranks."""
    layout, work, result, fitted = measured.layout, measured.work, measured.result, measured.file in FITTED
    if layout.engine == "deepspeed" and layout.reduce_precision == "bf16" and not layout.zero_stage:
        return
    if result["status"] == "oom":
        yield MeasuredMemory(layout, work, None, None, fitted, ran_out=True)
    elif result["status"] == "ok" and "ranks" not in result:
        yield MeasuredMemory(layout, work, None, result["metrics"]["peak_memory_gib"], fitted)
    elif result["status"] == "ok":
        for stage in range(layout.pipeline_parallel_size):
            here = [rank["peak_memory_gib"] for rank in result["ranks"] if rank["coordinates"]["pp"] == stage]
            yield MeasuredMemory(layout, work, stage, max(here), fitted)


def table(measured: Iterable[MeasuredMemory]) -> str:
    """One row a point."""
    rows = []
    for point in measured:
        model, stage, error = point.work.shape, point.pipeline_rank, point.error
        shape = f"{model.layers} x {model.hidden}" + (" moe" if model.num_experts else "")
        rows.append(
            [
                point.layout.label,
                shape,
                "" if stage is None or point.layout.pipeline_parallel_size == 1 else str(stage),
                str(point.layout.gradient_accumulation_steps),
                "ran out" if point.ran_out else "ran" if point.reserved_gib is None else f"{point.reserved_gib:.1f}",
                f"{point.predicted_gib:.1f}",
                "" if error is None else f"{error:+.1%}",
                f"{point.share:.0%}",
                "set by" if point.fitted else "",
            ]
        )
    headings = ["layout", "layers x width", "stage", "microbatches", "GiB", "predicted", "error", "needs", ""]
    return render(headings, rows)


def summary(measured: Iterable[MeasuredMemory]) -> str:
    """Mean and largest error by engine; layouts that spread experts, which no formula foretells, apart."""
    groups: dict[tuple[str, str], list[float]] = {}
    for point in measured:
        if point.error is not None:
            name = "spread experts" if point.spread_experts else point.layout.engine
            kinds = ("all",) if point.spread_experts else ("set by" if point.fitted else "held out", "all")
            for kind in kinds:
                groups.setdefault((name, kind), []).append(abs(point.error))
                if not point.spread_experts:
                    groups.setdefault(("both engines", kind), []).append(abs(point.error))
    rows = [
        [name, kind, str(len(errors)), f"{statistics.mean(errors):.2%}", f"{max(errors):.2%}"]
        for (name, kind), errors in sorted(groups.items())
    ]
    return render(["", "", "points", "mean error", "largest"], rows)


def outcomes(measured: Iterable[MeasuredMemory]) -> str:
    """How many layouts of each band ran and ran out."""
    counts = Counter((band(point.layout, point.work), point.ran_out) for point in measured)
    rows = [[name, str(counts[name, False]), str(counts[name, True])] for name in get_args(Band)]
    return render(["band", "ran", "ran out"], rows)


def corrected(measured: Sequence[MeasuredMemory], seeds: int = 20) -> str:
    """Errors on the rest of a table once the model has seen some of it, drawn at random: means over `seeds` draws."""
    rows = []
    for trials in (0, 4, 8, 16, 32):
        if 2 * trials >= len(measured):
            break
        errors = [_errors_after(random.Random(seed).sample(measured, len(measured)), trials) for seed in range(seeds)]
        mean, largest = statistics.mean(map(statistics.mean, errors)), statistics.mean(map(max, errors))
        rows.append([str(trials), f"{mean:.2%}", f"{largest:.2%}"])
    return render(["trials seen", "mean error", "largest"], rows)


def _errors_after(measured: Sequence[MeasuredMemory], trials: int) -> list[float]:
    model = MemoryModel(measured[0].work)
    for point in measured[:trials]:
        model.observe(point.layout, point.reserved_now_gib, fits=not point.ran_out)
    errors = []
    for point in measured[trials:]:
        share = model.share(point.layout)
        assert share is not None
        if point.reserved_gib is not None and not point.spread_experts:
            errors.append(abs(point.predicted_gib * share / point.share / point.reserved_gib - 1))
    return errors


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path)
    tables = parser.parse_args(argv).tables
    if not tables:
        measured = measured_memory()
        print(f"{table(measured)}\n\n{summary(measured)}")
    for path in tables:
        measured = tabled(path)
        parts = [path.name, table(measured), outcomes(measured)]
        if all(point.ran_out or point.reserved_gib is not None for point in measured):
            parts[2:] = [summary(measured), outcomes(measured), corrected(measured)]
        print("\n\n".join(parts))


if __name__ == "__main__":
    main()
