"""Sweeps as those of a trainer never seen: what of them is hidden, and how few launches run out of memory."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import DATA
from benchmarks.judge.unseen import HIDDEN, KNOWN, TABLES, Case, Sweep, search, sweep
from search_spaces.memory import MemoryModel
from trainables.status import Status

TABLE = DATA / TABLES[0]
TRIALS = 30


def out_of_memory(played: Sweep, seeds: int) -> float:
    """Share of the launches of so many searches."""
    searches = [search(played, seed, TRIALS) for seed in range(seeds)]
    return statistics.fmean(played.results[one].status == Status.OOM for tried in searches for one in tried)


def test_a_smaller_gpu_runs_out_of_what_a_larger_one_had() -> None:
    large, small = (sweep(Case(TABLE, gib, "model")) for gib in (None, 80.0))
    assert 0 < large.out_of_memory < small.out_of_memory < 0.5
    for layout, result in small.results.items():
        fits = (large.results[layout].metrics.get("peak_memory_gib") or 1e9) <= 78.2
        assert (result.status == Status.OK) == fits


def test_what_is_not_known_is_hidden() -> None:
    nothing, own = (sweep(Case(TABLE, 80.0, known)) for known in ("nothing", "own axes"))
    memory = MemoryModel(nothing.problem.workload)
    assert {memory.share(layout) for layout in nothing.results} == {None}
    for layout in own.results:
        assert (layout.engine, layout.zero_stage, layout.recompute) == ("unseen", 0, "none")
        assert set(dict(layout.own)) == set(HIDDEN.values())
    assert len(own.results) == len(own.table.results)


@pytest.mark.parametrize("known", KNOWN)
def test_few_launches_of_a_trainer_never_seen_run_out_of_memory(known: str) -> None:
    """Of a sweep a fifth of which does."""
    played = sweep(Case(TABLE, 96.0, known))
    assert played.out_of_memory == pytest.approx(0.2, abs=0.01)
    assert out_of_memory(played, seeds=1) <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("gib", [None, 96.0])
def test_they_do_so_over_many_seeds(name: str, known: str, gib: float | None) -> None:
    assert out_of_memory(sweep(Case(DATA / name, gib, known)), seeds=10) <= 0.1
