"""Which layouts are tried at the edge of memory, and what is told of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from benchmarks import SPECS
from benchmarks.measure.edge import RAN_OUT, REFUSED, at_the_edge, table, verdict
from search_spaces.layout import Layout
from search_spaces.memory import estimate
from service.result import TrialResult
from service.spec import load_spec
from trainables.status import Status

LAYOUT = Layout("megatron", 8, 8)


@pytest.mark.parametrize(
    ("status", "cause", "told"),
    [
        (Status.OK, None, "ok"),
        (Status.OOM, "probe: rank 0: warmup: OutOfMemoryError", REFUSED),
        (Status.OOM, "rank 0: warmup: OutOfMemoryError", RAN_OUT),
        (Status.CRASH, "rank 0: setup: ValueError", "crash"),
    ],
)
def test_only_a_launch_can_run_out(status: Status, cause: str | None, told: str) -> None:
    assert verdict(TrialResult("t", LAYOUT, status, cause)) == told


@pytest.mark.slow
def test_layouts_are_near_the_edge_and_of_each_spec_in_turns() -> None:
    specs = {name: load_spec(SPECS / f"edge_{name}.yaml") for name in ("llama", "moe")}
    drawn = list(itertools.islice(at_the_edge(specs, seed=3), 40))
    assert [path for path, _, _ in drawn] == ["llama", "moe"] * 20
    shares = [estimate(layout, spec.workload.run).share or 0.0 for _, spec, layout in drawn]
    assert min(shares) >= 0.8
    assert {spec.borderline for _, spec, _ in drawn} == {"probe"}
    assert {layout.engine for _, _, layout in drawn} == {"megatron", "deepspeed"}


def test_what_ran_out_comes_first_and_is_counted_among_launches_alone() -> None:
    def row(share: float, status: Status, cause: str | None = None, **metrics: float) -> dict[str, Any]:
        result = TrialResult("t", LAYOUT, status, cause, dict(metrics)).to_dict()
        return {"spec": "edge.yaml", "layout": f"layout {share}", "config": {}, "share": share, "result": result}

    told = table(
        [
            row(0.9, Status.OK, peak_memory_gib=70.0),
            row(0.99, Status.OOM, "probe: no room"),
            row(0.85, Status.OOM, "rank 1: no room"),
        ]
    ).splitlines()
    assert [line.split()[2] for line in told if line.startswith("edge")] == ["0.85", "0.99", "0.9"]
    assert told[-1] == (
        "2 launches, 1 of them ran out of memory; 1 refused by a probe; 1 ok; "
        "70.0 GiB reserved in the median, 70.0 at most"
    )
