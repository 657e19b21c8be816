from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from benchmarks.convert.table import write
from benchmarks.judge.search import Table
from search_spaces.layout import Layout
from service.record.results import TrialRecord
from service.result import Purpose
from tests.service.records import STARTED, search, trial


def of(layout: Layout, made: TrialRecord) -> TrialRecord:
    ended = STARTED + timedelta(seconds=4)
    return replace(made, label=layout.label, layout=layout, started=STARTED, ended=ended)


def test_a_search_as_a_table_is_read_back(tmp_path: Path) -> None:
    fast, thrifty, full = (Layout("megatron", 4, 8, micro_batch_size=size) for size in (1, 2, 4))
    uneven = replace(full, pipeline_parallel_size=2, stage_layers=(3, 5), sequence_parallel=True)
    found = search(
        of(fast, trial("a", tokens_per_s=20.0, joules_per_token=2.0, window_time_s=3.0, warmup_time_s=2.0)),
        of(thrifty, trial("b", tokens_per_s=10.0, joules_per_token=1.0, window_time_s=3.0)),
        of(full, trial("c", status="oom")),
        of(uneven, trial("d", tokens_per_s=5.0, joules_per_token=3.0)),
        of(fast, replace(trial("e", tokens_per_s=19.0, joules_per_token=2.0), purpose=Purpose.FINALIST)),
        of(replace(fast, zero_stage=1), trial("f", status="stopped")),
    )
    path = tmp_path / "table.csv"
    with path.open("w") as file:
        write(found, file)
    table = Table(path)
    assert {layout: result.status for layout, result in table.results.items()} == {
        fast: "ok",
        thrifty: "ok",
        full: "oom",
        uneven: "ok",
    }
    assert table.results[fast].metrics["tokens_per_s"] == 20.0
    assert [table.gpu_seconds[layout] for layout in (fast, thrifty, full)] == [20.0, 12.0, 16.0]
    assert table.front == [fast, thrifty] or table.front == [thrifty, fast]
