"""What each rank of a layout asks torch's allocator of its GPU for, in order, from an empty process to the third step.

    python -m benchmarks.measure.allocations FILE.jsonl --out OUT.jsonl [--only TEXT...] [--alone] [--unnamed]
        [--steps N] [--seconds S]

runs layouts of a file of `benchmarks.measure.blind`, those whose label has one of the texts if any is given, among all
their ranks, or rank after rank `--alone`, as slices run. To find the functions that ask takes the host time, and it is
then less far ahead of its GPU: `--unnamed` goes without. A line of OUT is one layout: its spec, and of each rank what
was `reserved` at most by then, in bytes, and `events`, by torch's own record of its allocations:

- [bytes, stream, where]: a request; `where` is an index of the rank's `places`, which name the innermost functions;
- [i]: what event i asked for is given back, by whoever had it;
- [i, "late"]: only now, as another stream was still using it;
- [bytes, stream]: a segment is reserved, or given back to the driver, where that is negative.

`addresses` are those of the segments, in the order in which they were reserved. It is what replays
(`search_spaces.replay`) are compared with. After S seconds no other layout begins.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure.blind import chosen, layout_of, parser_of
from benchmarks.measure.gang import one_bench
from benchmarks.measure.tracing import Traced, TracedSlice
from search_spaces.layout import Layout
from search_spaces.replay import STEPS
from service.problem import Problem
from service.spec import load_spec
from service.trials.bench import Alone, Bench
from service.trials.evaluate import make_request
from service.trials.slices import network_of
from trainables.measure import Procedure
from trainables.program import TrialRequest


def trace(
    rows: Sequence[tuple[str, Layout]], steps: int, alone: bool, named: bool, until: float
) -> Iterator[dict[str, Any]]:
    """A line for each layout of a spec, which has its path; all of one cluster."""
    specs = {path: load_spec(Path(path)).located() for path in dict.fromkeys(path for path, _ in rows)}
    first = next(iter(specs.values()))
    with one_bench(first, 1 if alone else first.cluster.size) as bench:
        for number, (path, layout) in enumerate(rows):
            if time.monotonic() > until:
                break
            with tempfile.TemporaryDirectory() as folder:
                request = traced(f"traced-{number}", layout, specs[path], steps, folder, named)
                for one in each_alone(bench, request) if alone else [request]:
                    came = bench.alone(one) if alone else bench.run(one)
                    result = came.whole if isinstance(came, Alone) else came
                    print(f"{path}: {layout.label}: {result.status} {result.cause or ''}", flush=True)
                told = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
            if len(told) == layout.num_gpus:
                yield {"spec": path, "layout": layout.label, "config": layout.to_dict(), "ranks": told}


def traced(name: str, layout: Layout, spec: Problem, steps: int, folder: str, named: bool) -> TrialRequest:
    """A layout's trial, whose ranks tell in `folder` what they allocate in their first steps."""
    request = make_request(name, layout, spec)
    procedure = Procedure(steady_steps=1, warmup_tolerance=1.0, warmup_max_s=0.0, window_s=0.0, window_min_steps=steps)
    program = Traced(**vars(request.program), steps=steps, folder=folder, named=named)
    return replace(request, program=program, procedure=procedure, batches=())


def each_alone(bench: Bench, request: TrialRequest) -> Iterator[TrialRequest]:
    """Of a traced layout, a trial of each rank without the others."""
    training, network = request.program, network_of(bench, request.layout)
    assert isinstance(training, Traced)
    for rank in range(request.layout.num_gpus):
        program = TracedSlice(training, rank, network)
        yield replace(request, trial_id=f"{request.trial_id}-rank{rank}", program=program)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--alone", action="store_true", help="each rank without the others")
    parser.add_argument("--unnamed", action="store_true", help="without the functions that ask")
    parser.add_argument("--steps", type=int, default=STEPS, help="that are recorded")
    given = parser.parse_args(argv)
    rows = [(row["spec"], layout_of(row)) for row in chosen(parser, given)]
    with given.out.open("a", buffering=1) as out:
        for line in trace(rows, given.steps, given.alone, not given.unnamed, time.monotonic() + given.seconds):
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
