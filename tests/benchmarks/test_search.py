from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.search import Table, main, trials_to_shares

FRONT = """# of a cluster that nobody has
num_gpus,tensor_parallel_size,micro_batch_size,recompute,status,gpu_seconds,tokens_per_s,joules_per_token
8,1,1,none,ok,80,100,1.0
8,2,1,none,ok,80,80,0.5
8,4,1,none,ok,80,60,0.9
8,1,2,none,oom,16,,
8,1,2,full,ok,96,70,0.7
"""


def table(folder: Path, text: str) -> Table:
    path = folder / "table.csv"
    path.write_text(text)
    return Table(path)


def test_a_table_is_its_layouts_and_what_became_of_them(tmp_path: Path) -> None:
    found = table(tmp_path, FRONT)
    assert [layout.label for layout in found.results][:2] == [
        "megatron 8gpu dp8 zero0 mbs1",
        "megatron 8gpu dp4 tp2 zero0 mbs1",
    ]
    assert [result.status for result in found.results.values()] == ["ok", "ok", "ok", "oom", "ok"]
    assert sum(found.gpu_seconds.values()) == 352
    assert found.objectives == {"tokens_per_s": "maximize", "joules_per_token": "minimize"}


def test_the_front_alone_has_the_whole_hypervolume(tmp_path: Path) -> None:
    found = table(tmp_path, FRONT)
    fastest, thriftiest, beaten, failed, between = found.results
    assert found.reached([fastest, thriftiest]) == pytest.approx(found.full)
    assert 0 < found.reached([beaten]) < found.reached([between]) < found.full
    assert found.reached([failed]) == found.reached([]) == 0


def test_one_metric_is_reached_by_its_best_value(tmp_path: Path) -> None:
    found = table(tmp_path, "num_gpus,micro_batch_size,tokens_per_s\n8,1,50\n8,2,100\n8,4,80\n")
    one, two, four = found.results
    assert [found.reached(tried) for tried in ([one], [one, four], [four, two])] == [0.5, 0.8, 1.0]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_each_sampler_gets_there_and_what_it_spent_is_counted(sampler: str, tmp_path: Path) -> None:
    found = trials_to_shares(table(tmp_path, FRONT), sampler, seed=1)
    assert 2 <= found["trials 90%"] <= found["trials 99%"] <= 5
    assert 160 <= found["GPU-s 99%"] <= 352
    assert found["out of memory"] in (0, 1 / 3, 1 / 4, 1 / 5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("micro_batch_size,tokens_per_s\n1,5\n", "row 1: .*num_gpus"),
        ("num_gpus,tokens_per_s\n8,5\n8,6\n", "row 2: the same layout as row 1"),
        ("num_gpus,micro_batch_size,tokens_per_s\n8,1,5\n8,2,\n", "row 2: no tokens_per_s"),
        ("num_gpus,micro_batch_size,latency\n8,1,5\n8,2,6\n", "no objective differs"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_its_row(
    text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=reason):
        table(tmp_path, text)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "table.csv")])
    assert ended.value.code == 2
    assert "table.csv" in capsys.readouterr().err
