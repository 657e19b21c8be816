from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.judge.search import Table, comparison, main, replay

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


FOREIGN = """# LLaMA 65B on 64 A100s: somebody else's sweep
num_gpus,tensor_parallel_size,pipeline_parallel_size,micro_batch_size,recompute,status,mfu,step_time_s
64,2,8,1,none,ok,0.59,21.5
64,4,4,1,none,ok,0.55,23.1
64,8,2,1,none,ok,0.50,25.4
64,2,8,2,none,oom,,
64,2,8,2,full,ok,0.46,27.6
64,4,4,4,full,ok,0.44,28.9
64,1,16,1,full,ok,0.47,27.0
"""


def test_a_foreign_table_is_searched_by_its_measure_of_speed(tmp_path: Path) -> None:
    found = table(tmp_path, FOREIGN)
    assert found.objectives == {"mfu": "maximize"}
    fastest, *_, slowest, _ = found.results
    assert found.front == [fastest]
    assert found.reached([slowest]) == pytest.approx(0.44 / 0.59)
    assert replay(found, "auto", seed=0).trials[-1] <= len(found.results)
    only_times = table(tmp_path, "num_gpus,micro_batch_size,step_time_s\n8,1,5\n8,2,4\n")
    assert only_times.objectives == {"step_time_s": "minimize"}
    assert only_times.reached(list(only_times.results)[:1]) == pytest.approx(4 / 5)


@pytest.mark.parametrize("sampler", ["random", "tpe", "auto"])
def test_each_sampler_gets_there_and_what_it_spent_is_counted(sampler: str, tmp_path: Path) -> None:
    found = replay(table(tmp_path, FRONT), sampler, seed=1)
    assert 1 <= found.trials[0] <= found.trials[-1] <= 5
    assert found.trials[-1] >= 2
    assert 160 <= found.gpu_seconds[-1] <= 352
    assert found.out_of_memory in ((0,) if sampler == "random" else (0, 1))


SPEC = """
name: table
model: llama3-8b
data: synthetic
sequence_length: 8192
global_batch_size: 16
cluster: {gpus_per_node: 4, accelerator: h200}
space: {zero_stage: 3}
"""
TOO_BIG = """num_gpus,tensor_parallel_size,zero_stage,micro_batch_size,status,tokens_per_s,joules_per_token
4,1,1,1,ok,30000,0.080
4,1,1,2,oom,,
4,1,1,4,oom,,
4,1,3,1,ok,36000,0.070
4,2,1,1,ok,33000,0.078
4,4,0,1,ok,24000,0.100
"""


def test_a_spec_beside_the_table_lets_predictions_and_memory_take_part(tmp_path: Path) -> None:
    (tmp_path / "table.yaml").write_text(SPEC)
    found = table(tmp_path, TOO_BIG)
    assert {layout.global_batch_size for layout in found.results} == {16}
    assert set(found.predicted()) == set(found.results)
    taken = [replay(found, "auto", seed) for seed in range(3)]
    assert [each.out_of_memory for each in taken] == [0, 0, 0]
    assert max(each.trials[-1] for each in taken) <= len(found.good)
    lines = list(comparison(found, "table.csv", ["auto", "random"], 2))
    assert lines[0].startswith("table.csv: 6 layouts (4 ok, 2 oom), 1 on the front of tokens_per_s and joules")
    assert [line.split()[0] for line in lines[1:]] == ["tokens_per_s", "joules_per_token", "sampler", "random", "auto"]
    assert lines[-1].split()[-1] == "0.0%"
    assert Table(tmp_path / "table.csv", blind=True).predicted() == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("micro_batch_size,tokens_per_s\n1,5\n", "row 1: .*num_gpus"),
        ("num_gpus,tokens_per_s\n8,5\n8,6\n", "row 2: the same layout as row 1"),
        ("num_gpus,micro_batch_size,tokens_per_s\n8,1,5\n8,2,\n", "row 2: no tokens_per_s"),
        ("num_gpus,micro_batch_size,latency\n8,1,5\n8,2,6\n", "no objective differs"),
        ("num_gpus,micro_batch_size,status\n8,1,oom\n8,2,oom\n", "no objective differs"),
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
